"""`memory_query`: what the caller may read, best first, whether or not the memory server answers.

The memory server's hits are filtered by what engram itself knows (space and
state); memories still in the outbox are searched as well, so a write that was
deferred a second ago is found. When the server fails in any way, the logbook
alone answers, with what it has of memories, candidates and events, and the
reply says `degraded`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engram.gateway.callers import Caller
from engram.gateway.openmemory_client import Hit, OpenMemoryClient
from engram.gateway.spaces import parse_space, private_space, team_space
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import BackendError, InputError
from engram.kernel.logs import fields
from engram.kernel.metrics import QUERIES
from engram.kernel.settings import Settings
from engram.logbook import memories, recall
from engram.logbook.memories import NO_FILTERS, Filters
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row
from engram.search.fusion import fuse

log = logging.getLogger(__name__)

MAX_TOP_K = 100
MAX_QUERY_CHARS = 4000
# The server cannot filter by space, so more is asked for than is wanted.
OVER_FETCH = 3


@dataclass(frozen=True, slots=True)
class QueryRequest:
    query: str
    actor_user_id: str
    correlation_id: str
    spaces: list[str] | None = None
    top_k: int = 10
    filters: Filters = NO_FILTERS
    # The shared spaces that the caller's token allows; None: all.
    shared_spaces: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class QueryReply:
    ok: bool
    results: list[dict[str, Any]]
    total: int
    spaces_searched: list[str]
    degraded: bool
    correlation_id: str
    message: str = field(default="")


class MemoryQuery:
    def __init__(self, db: AsyncExecutor, client: OpenMemoryClient, settings: Settings) -> None:
        self._db = db
        self._client = client
        self._project = settings.project_key
        self._deadline = settings.query_deadline_seconds

    async def query(self, request: QueryRequest) -> QueryReply:
        _validate(request)
        spaces = self._readable(request)
        asked = asyncio.create_task(self._answered(request, spaces))
        try:
            waiting = await self._unasked(request, spaces)
            found, degraded, why = _merged(await asked, waiting, request.top_k), False, ""
        except BackendError as error:
            log.warning("memory_query.degraded", extra=fields(reason=error.reason))
            found, degraded, why = await self._degraded(request, spaces), True, str(error)
        finally:
            asked.cancel()
        QUERIES.labels(str(degraded).lower()).inc()
        return _reply(request, spaces, found, degraded, why)

    def _readable(self, request: QueryRequest) -> list[str]:
        """The spaces asked for, each of them readable; by default the team's and the caller's own."""
        caller = Caller(request.actor_user_id, shared_spaces=request.shared_spaces)
        if request.spaces is None:
            return caller.readable(map(str, (team_space(self._project), private_space(caller.actor))))
        caller.check_readable(request.spaces)
        return list(dict.fromkeys(request.spaces))

    async def _answered(self, request: QueryRequest, spaces: list[str]) -> list[Row]:
        """The server's hits that the caller may see, asking for more until there are enough."""
        wanted = min(request.top_k * OVER_FETCH, MAX_TOP_K)
        until = SYSTEM_CLOCK.monotonic() + self._deadline
        while True:
            left = max(0.001, until - SYSTEM_CLOCK.monotonic())
            hits = await self._client.query(request.query, k=wanted, seconds=left)
            known = await self._known(hits, spaces, request.filters)
            if len(known) >= request.top_k or len(hits) < wanted:
                return known
            if wanted >= MAX_TOP_K:
                # Others' memories fill what the server will give: ours are in the logbook.
                return _merged(known, await self._search(request, spaces, ["stored"]), request.top_k)
            wanted = min(wanted * 2, MAX_TOP_K)

    async def _known(self, hits: Sequence[Hit], spaces: list[str], filters: Filters) -> list[Row]:
        ids = [hit.memory_id for hit in hits]
        rows = await self._db.run(memories.by_memory_ids.query(ids, spaces, filters=filters))
        by_id = {row["memory_id"]: row for row in rows}
        return [
            {**by_id[hit.memory_id], "score": hit.score, "source": "openmemory", "state": "stored"}
            for hit in hits
            if hit.memory_id in by_id
        ]

    async def _unasked(self, request: QueryRequest, spaces: list[str]) -> list[Row]:
        query = memories.search_unasked.query(request.query, spaces, request.top_k, filters=request.filters)
        return [{**row, "source": "logbook"} for row in await self._db.run(query)]

    async def _search(self, request: QueryRequest, spaces: list[str], states: list[str]) -> list[Row]:
        query = memories.search.query(request.query, spaces, states, request.top_k, filters=request.filters)
        return [{**row, "source": "logbook"} for row in await self._db.run(query)]

    async def _degraded(self, request: QueryRequest, spaces: list[str]) -> list[Row]:
        known = await self._search(request, spaces, ["stored", "parked"])
        query = recall.search.query(request.query, spaces, request.top_k, filters=request.filters)
        others = [_recalled(row) for row in await self._db.run(query)]
        return _merged(known, _unknown(others, known), request.top_k)


def _validate(request: QueryRequest) -> None:
    wrong = {}
    if not request.query.strip():
        wrong["query"] = "must not be empty"
    elif len(request.query) > MAX_QUERY_CHARS:
        wrong["query"] = f"has {len(request.query)} characters; the limit is {MAX_QUERY_CHARS}"
    if not 1 <= request.top_k <= MAX_TOP_K:
        wrong["top_k"] = f"must be between 1 and {MAX_TOP_K}"
    if parse_space(f"private:{request.actor_user_id}") is None:
        wrong["actor_user_id"] = "must be 1 to 128 characters without spaces"
    if wrong:
        raise InputError("; ".join(f"{k} {v}" for k, v in wrong.items()), fields=wrong)


def _unknown(recalled: list[Row], known: list[Row]) -> list[Row]:
    """Without the candidates that have become memories: their title, and then the same text."""
    texts = {row["payload_md"] for row in known}
    return [row for row in recalled if row["payload_md"].partition("\n\n")[2] not in texts]


def _recalled(row: Row) -> Row:
    """A candidate or an event in the shape of a memory; its own number keeps it apart from them."""
    return {
        **row,
        "memory_record_id": f"{row['source']}:{row['id']}",
        "payload_md": row["content"],
        "state": "recorded",
    }


def _merged(answered: list[Row], waiting: list[Row], top_k: int) -> list[Row]:
    by_record = {row["memory_record_id"]: row for row in [*answered, *waiting]}
    order = fuse([r["memory_record_id"] for r in answered], [r["memory_record_id"] for r in waiting])
    return [by_record[record] for record, _ in order[:top_k]]


def _reply(
    request: QueryRequest, spaces: list[str], found: list[Row], degraded: bool, why: str
) -> QueryReply:
    hint = f"degraded: answered from the logbook, lean less on memory ({why})" if degraded else ""
    return QueryReply(
        ok=True,
        results=[_result(row) for row in found],
        total=len(found),
        spaces_searched=spaces,
        degraded=degraded,
        correlation_id=request.correlation_id,
        message=hint or f"{len(found)} found",
    )


def _result(row: Row) -> dict[str, Any]:
    return {
        "memory_id": row.get("memory_id"),
        "outbox_id": row.get("outbox_id"),
        "content": row["payload_md"],
        "space": row["target_space"],
        "kind": row["kind"],
        "meta": row["meta_json"],
        "actor_user_id": row["actor_user_id"],
        "state": row["state"],
        "source": row["source"],
        "score": round(row["score"], 6),
        "created_at": row["created_at"].isoformat(),
    }
