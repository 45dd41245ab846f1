"""Looks at everything engram depends on, all at once, each look bounded in time.

A look says what it saw, or raises; whatever it raises means that the capability
failed. Nothing is skipped here but what somebody said to skip. Of each
capability one look is under way at a time: whoever asks meanwhile is told its
outcome, so that a part which hangs, or a probe that asks every moment, ties up
no more than that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engram.gateway.gate import CAPABILITIES, FAILED, OK, SKIPPED, checked_skips, gate_check
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.outbox_worker import HEARTBEATS
from engram.gateway.redis_probe import ping
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import BackendError, EngramError
from engram.kernel.logs import fields, redact
from engram.logbook import governance, kv
from engram.logbook.artifacts import ArtifactStore
from engram.postgres.executors import AsyncExecutor
from engram.postgres.migrations import Migration

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
# A worker beats every 5 seconds, and its reconcile every 15 at the least.
WORKER_FRESH_SECONDS = 30.0
RECONCILE_FRESH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """`word` is for everybody; `reason` may name hosts and folders, for those who may verify."""

    status: str
    reason: str
    word: str = ""
    milliseconds: float = 0.0

    @property
    def public(self) -> str:
        return f"{self.status}: {self.word}" if self.word else self.status


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    reason: str
    mode: str
    capabilities: dict[str, Finding]


Look = Callable[[], Awaitable[Finding]]


class Gatekeeper:
    """`skipped`: what the settings say to leave out."""

    def __init__(
        self,
        looks: Mapping[str, Look],
        *,
        mode: str,
        skipped: Iterable[str] = (),
        look_seconds: float | None = None,
    ) -> None:
        self._looks = looks
        self._mode = mode
        self._skipped = frozenset(skipped)
        self._look_seconds = look_seconds or LOOK_SECONDS
        self._under_way: dict[str, asyncio.Task[Finding]] = {}

    async def verify(self, skip: Iterable[str] = (), mode: str | None = None) -> Verdict:
        """Look at everything but what is to be skipped, and judge by the gate of the mode."""
        asked = checked_skips(skip)
        seen = await asyncio.gather(*(self._finding(name, asked) for name in self._looks))
        found = dict(zip(self._looks, seen, strict=True))
        result = gate_check(
            mode or self._mode,
            {name: finding.status for name, finding in found.items()},
            {f"skip_{name}": True for name in self._skipped | asked},
        )
        return Verdict(result.passed, result.reason, mode or self._mode, found)

    async def _finding(self, name: str, asked: frozenset[str]) -> Finding:
        if name in asked:
            return Finding(SKIPPED, "this request skips it")
        if name in self._skipped:
            return Finding(SKIPPED, f"skip_{name} is set: GATEWAY_SKIP_{name.upper()}, or in engram.toml")
        begun = SYSTEM_CLOCK.monotonic()
        seen = await self._bounded(name)
        return replace(seen, milliseconds=round((SYSTEM_CLOCK.monotonic() - begun) * 1000, 1))

    async def _bounded(self, name: str) -> Finding:
        look = self._under_way.get(name)
        if look is None or look.done():
            look = self._under_way[name] = asyncio.create_task(_seen(name, self._looks[name]))
        # Not cancelled when the time is up: that would wait for a part which hangs.
        done, _ = await asyncio.wait((look,), timeout=self._look_seconds)
        if not done:
            return Finding(FAILED, f"no answer within {self._look_seconds:g} s", "timeout")
        return look.result()


async def _seen(name: str, look: Look) -> Finding:
    """An exception while looking is a failure, whatever it is."""
    try:
        return await look()
    except BackendError as error:
        return Finding(FAILED, redact(error.message), error.reason)
    except EngramError as error:
        return Finding(FAILED, redact(str(error)), error.code.value)
    except Exception as error:
        log.exception("capability.look_crashed", extra=fields(capability=name))
        return Finding(FAILED, f"the look itself failed: {type(error).__name__}; see the log", "INTERNAL")


@dataclass(frozen=True, slots=True)
class Looks:
    """`pending` tells the migrations that are missing; `redis_url` where Redis is, if anywhere."""

    db: AsyncExecutor
    client: OpenMemoryClient
    artifacts: ArtifactStore
    project_key: str
    pending: Callable[[], Sequence[Migration]]
    redis_url: Callable[[], str | None]

    def table(self) -> dict[str, Look]:
        return {name: getattr(self, name) for name in CAPABILITIES}

    async def database(self) -> Finding:
        await self.db.run(governance.read_settings.query(self.project_key))
        return Finding(OK, "answers a query")

    async def migrations(self) -> Finding:
        todo = await asyncio.to_thread(self.pending)
        if todo:
            said = f"{len(todo)} migration(s) are missing, first {todo[0]}; run `engram migrate`"
            return Finding(FAILED, said, "behind")
        return Finding(OK, "the schema is this version's")

    async def openmemory(self) -> Finding:
        await self.client.look()
        return Finding(OK, "answers and takes our key")

    async def outbox_worker(self) -> Finding:
        return await self._alive("outbox:", "a worker", WORKER_FRESH_SECONDS)

    async def reconcile(self) -> Finding:
        return await self._alive("reconcile:", "a worker's reconcile", RECONCILE_FRESH_SECONDS)

    async def evidence_store(self) -> Finding:
        await asyncio.to_thread(self._keep_and_remove)
        return Finding(OK, "keeps, gives back and deletes")

    async def redis(self) -> Finding:
        url = await asyncio.to_thread(self.redis_url)
        if url is None:
            return Finding(FAILED, "none is running here, and REDIS_URL is not set", "missing")
        await ping(url)
        return Finding(OK, "answers PING")

    async def _alive(self, prefix: str, who: str, fresh_seconds: float) -> Finding:
        age = await self.db.run(kv.seconds_since_beat.query(HEARTBEATS, prefix))
        if age is None:
            return Finding(FAILED, f"{who} never ran; start one with `engram worker outbox`", "missing")
        if age > fresh_seconds:
            said = f"{who} last said so {age:.0f} s ago; start one with `engram worker outbox`"
            return Finding(FAILED, said, "stale")
        return Finding(OK, f"ran {max(age, 0):.0f} s ago")

    def _keep_and_remove(self) -> None:
        kept = self.artifacts.put(b"a probe of engram's " + secrets.token_bytes(16))
        try:
            with self.artifacts.open(kept.key) as reader:
                reader.read()  # which verifies
        finally:
            self.artifacts.delete(kept.key)
