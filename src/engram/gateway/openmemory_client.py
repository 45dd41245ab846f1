"""The memory server's HTTP API, as seen by its one client.

Every failure becomes a `BackendError` whose attributes say what it means:
whether another try may help, whether it says anything about this memory, and
whether the server may have applied the write before failing. Nothing is
swallowed: a caller always learns that its call failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
from pydantic_core import from_json

from engram.gateway.breaker import Breaker, Ticket
from engram.kernel.content import storable, why_unstorable
from engram.kernel.errors import BackendError

MAX_ANSWER_BYTES = 4 << 20
LOOKUP_CANDIDATES = 20

# Answers of something that is not the API: nothing is said about the memory.
_WRONG_URL = frozenset({404, 405, 407, 410, 421})
_PROBE = "/memory/all?l=1&u=0"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Memory:
    """What is sent. Tags carry the space and the content's hash, so it can be found again."""

    content: str
    space: str
    payload_sha: str
    idempotency_key: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tags(self) -> list[str]:
        return [f"space:{self.space}", f"sha:{self.payload_sha}"]


@dataclass(frozen=True, slots=True)
class Hit:
    memory_id: str
    content: str
    score: float


class OpenMemoryClient:
    def __init__(self, base_url: str, *, api_key: str | None, timeout: float, breaker: Breaker) -> None:
        self.base_url = base_url
        self.breaker = breaker
        self._timeout = timeout
        self._http = httpx2.AsyncClient(
            base_url=base_url,
            headers={"x-api-key": api_key} if api_key else {},
            timeout=timeout,
            limits=httpx2.Limits(max_connections=64, max_keepalive_connections=32, keepalive_expiry=30),
            # A proxy from the environment must never see traffic to this machine.
            trust_env=urlsplit(base_url).hostname not in _LOOPBACK,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def store(
        self, memory: Memory, *, find_first: bool, seconds: float | None = None
    ) -> tuple[str, bool]:
        """Bring `memory` to the server once; answers its id and whether it was there already.

        `find_first` is for a memory whose earlier try ended unknown: it is
        looked for by content and tags before it is added again.
        """
        until = self._deadline(seconds)
        if find_first and (found := await self._find(memory, until)):
            return found, True
        answer = await self._call("POST", "/memory/add", until, _add_body(memory), key=memory.idempotency_key)
        memory_id = answer.get("id")
        if not isinstance(memory_id, str) or not memory_id or why_unstorable(memory_id):
            raise _nonsense("no id in the answer to an add")
        if answer.get("deduplicated") and not await self._is_ours(memory_id, memory, until):
            raise BackendError(
                f"the memory server kept another memory ({memory_id}) instead of this one",
                reason="dropped_similar",
                retryable=False,
            )
        return memory_id, False

    async def query(self, text: str, *, k: int, seconds: float | None = None) -> list[Hit]:
        body = {"query": text, "k": k}
        return _hits(await self._call("POST", "/memory/query", self._deadline(seconds), body))

    async def delete(self, memory_id: str, *, seconds: float | None = None) -> None:
        """Remove a memory; one that is not there is as good as removed."""
        until = self._deadline(seconds)
        try:
            await self._call("DELETE", f"/memory/{quote(memory_id, safe='')}", until)
        except BackendError as error:
            if error.reason != "not_found":
                raise
            # Not there, or not the API that answered: the API answers a read.
            await self._probe(until)

    async def copies(self, memory: Memory, *, seconds: float | None = None) -> list[str]:
        """The ids of everything the server has with exactly this content in this space."""
        return await self._copies(memory, self._deadline(seconds))

    async def _find(self, memory: Memory, until: float) -> str | None:
        return next(iter(await self._copies(memory, until, at_most=1)), None)

    async def _copies(self, memory: Memory, until: float, *, at_most: int = LOOKUP_CANDIDATES) -> list[str]:
        body = {"query": memory.content, "k": LOOKUP_CANDIDATES, "filters": {"tags": memory.tags}}
        found: list[str] = []
        for hit in _hits(await self._call("POST", "/memory/query", until, body)):
            if len(found) == at_most:
                break
            if hit.content == memory.content and await self._is_ours(hit.memory_id, memory, until):
                found.append(hit.memory_id)
        return found

    async def probe(self) -> None:
        """An authenticated read: `/health` is public and says nothing of a bad key."""
        await self._probe(self._deadline(None))

    async def look(self) -> None:
        """The same, of the server as it is now: the breaker is neither asked nor told."""
        answer = await self._send("GET", _PROBE, self._deadline(None), None, None)
        _judge("GET", _PROBE, *answer)

    async def _probe(self, until: float) -> None:
        await self._call("GET", _PROBE, until)

    async def _is_ours(self, memory_id: str, memory: Memory, until: float) -> bool:
        try:
            kept = await self._call("GET", f"/memory/{quote(memory_id, safe='')}", until)
        except BackendError as error:
            if error.reason == "not_found":
                return False
            raise
        tags = kept.get("tags") or []
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise _nonsense("tags that are none")
        return set(memory.tags) <= set(tags) and kept.get("content") == memory.content

    def _deadline(self, seconds: float | None) -> float:
        """One deadline for all the calls of an operation."""
        return asyncio.get_running_loop().time() + (seconds or self._timeout)

    async def _call(
        self,
        method: str,
        path: str,
        until: float,
        body: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> dict[str, Any]:
        ticket = self.breaker.admit()
        if ticket is None:
            raise _left_alone()
        try:
            status, headers, raw = await self._send(method, path, until, body, key)
            answer = _judge(method, path, status, headers, raw)
        except BackendError as error:
            self._note(ticket, error)
            raise
        except BaseException:
            self.breaker.abandoned(ticket)
            raise
        self.breaker.succeeded(ticket)
        return answer

    async def _send(
        self, method: str, path: str, until: float, body: Mapping[str, Any] | None, key: str | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"Idempotency-Key": key} if key else {}
        try:
            async with asyncio.timeout_at(until):
                async with self._http.stream(method, path, json=body, headers=headers) as response:
                    return response.status_code, response.headers, await _bounded(response)
        except _UNSENT as error:
            raise _unreachable(error) from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise _timed_out() from error
        except httpx2.HTTPError as error:
            raise _broken(error) from error

    def _note(self, ticket: Ticket, error: BackendError) -> None:
        """Only failures of the server count against it; a refusal of this content does not."""
        if error.reason in ("unauthorized", "wrong_url"):
            self.breaker.failed(ticket, at_once=True)
        elif error.outage or error.reason in ("server_error", "bad_response"):
            self.breaker.failed(ticket)
        else:
            self.breaker.succeeded(ticket)


async def _bounded(response: httpx2.Response) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise _nonsense(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _judge(method: str, path: str, status: int, headers: Mapping[str, str], raw: bytes) -> dict[str, Any]:
    if status == 204:
        return {}
    if 200 <= status < 300:
        return _object(raw)
    raise _refused(method, path, status, headers, raw)


def _refused(method: str, path: str, status: int, headers: Mapping[str, str], raw: bytes) -> BackendError:
    """Which refusals are worth another try, and which are about this memory."""
    said = f"{method} {path.partition('?')[0]} answered {status}"
    if status in (401, 403):
        return BackendError(said, reason="unauthorized", retryable=True, outage=True)
    if status == 404 and method in ("GET", "DELETE") and not path.startswith(_PROBE):
        return BackendError(said, reason="not_found", retryable=False)
    if status in _WRONG_URL or 300 <= status < 400:
        return BackendError(said, reason="wrong_url", retryable=True, outage=True)
    if status == 429:
        after = _retry_after(headers, raw)
        return BackendError(said, reason="rate_limited", retryable=True, outage=True, retry_after=after)
    if status in (502, 503, 504):
        return BackendError(said, reason="unavailable", retryable=True, outage=True, ambiguous=True)
    if status in (408, 425) or status >= 500:
        return BackendError(said, reason="server_error", retryable=True, ambiguous=True)
    if status in (400, 413, 422):
        return BackendError(f"{said}: {_excerpt(raw)}", reason="refused", retryable=False)
    return BackendError(f"{said}: {_excerpt(raw)}", reason="client_error", retryable=True)


def _retry_after(headers: Mapping[str, str], raw: bytes) -> float | None:
    """The real server says it in the body; proxies say it in the header."""
    values: list[Any] = [headers.get("retry-after")]
    with suppress(BackendError):  # the body is only a second place to look
        values.append(_object(raw).get("retry_after"))
    for value in values:
        try:
            return max(0.0, min(float(value), 3600.0))
        except (TypeError, ValueError):
            continue
    return None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        answer = from_json(raw)
    except ValueError as error:
        raise _nonsense(f"not JSON: {_excerpt(raw)}") from error
    if not isinstance(answer, dict):
        raise _nonsense("JSON, but not an object")
    return answer


def _hits(answer: Mapping[str, Any]) -> list[Hit]:
    matches: Sequence[Any] = answer.get("matches") or []
    try:
        hits = [Hit(str(m["id"]), str(m["content"]), float(m.get("score") or 0.0)) for m in matches]
        return [hit for hit in hits if not why_unstorable(hit.memory_id)]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _nonsense("matches that are none") from error


def _excerpt(raw: bytes) -> str:
    return storable(raw[:200].decode("utf-8", "replace")).replace("\n", " ")


def _add_body(memory: Memory) -> dict[str, Any]:
    return {"content": memory.content, "tags": memory.tags, "metadata": dict(memory.metadata)}


def _left_alone() -> BackendError:
    said = "the memory server is being left alone after repeated failures"
    return BackendError(said, reason="breaker_open", retryable=True, outage=True)


def _unreachable(error: Exception) -> BackendError:
    said = f"the memory server cannot be reached: {error or type(error).__name__}"
    return BackendError(said, reason="connection", retryable=True, outage=True)


def _timed_out() -> BackendError:
    return BackendError(
        "the memory server did not answer in time",
        reason="timeout",
        retryable=True,
        outage=True,
        ambiguous=True,
    )


def _broken(error: Exception) -> BackendError:
    said = f"the connection to the memory server broke: {error or type(error).__name__}"
    return BackendError(said, reason="connection_broken", retryable=True, outage=True, ambiguous=True)


def _nonsense(what: str) -> BackendError:
    return BackendError(
        f"the memory server answered nonsense: {what}", reason="bad_response", retryable=True, ambiguous=True
    )
