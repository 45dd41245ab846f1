"""What search needs now and then: fresh numbers from ANALYZE, and an index over the vectors.

Up to some thousand memories every vector is compared, which is exact and takes
a millisecond or two. Beyond, an IVFFlat index is built in the background, without
stopping writes, and built anew with more lists when the table has grown
fourfold. It costs an add a twentieth of a millisecond; HNSW, its alternative in
pgvector, is no faster to ask at these sizes and costs an add two milliseconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import isqrt
from typing import Any

import psycopg
from psycopg import sql

from engram.kernel.errors import EngramError
from engram.kernel.logs import fields
from engram.memory import store
from engram.memory.frequencies import Frequencies
from engram.memory.vectors import Vectors
from engram.postgres import AsyncExecutor, Row
from engram.postgres.errors import translated
from engram.postgres.pool import bounded

log = logging.getLogger(__name__)

INDEX_FROM_ROWS = 5_000
PREFIX = "memories_near_"
_LOCK_KEY = 0x6E656172  # "near"

_BUILD = sql.SQL(
    "CREATE INDEX CONCURRENTLY {name} ON public.memories"
    " USING ivfflat (embedding halfvec_cosine_ops) WITH (lists = {lists})"
)
_DROP = sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS public.{name}")


def lists_for(rows: float) -> int:
    """About as many lists as each has rows: a search looks at some lists, and at all their rows.

    >>> [lists_for(rows) for rows in (5_000, 100_000, 1_000_000)]
    [87, 395, 1250]
    """
    return isqrt(int(rows)) * 5 // 4


class Upkeep:
    def __init__(
        self, dsn: str, db: AsyncExecutor, vectors: Vectors, *, index_from: int = INDEX_FROM_ROWS
    ) -> None:
        self.frequencies = Frequencies()
        self._conninfo = bounded(dsn, application_name="engram-memory-index")
        self._db = db
        self._vectors = vectors
        self._index_from = index_from

    async def run_once(self) -> int:
        """Answers 0: there is nothing more to do before the next round."""
        self.frequencies = await self._db.run(store.frequencies())
        rows = self.frequencies.rows or 0
        if self._vectors.state in ("ready", "resting") and rows >= self._index_from:
            try:
                await self._index(lists_for(rows))
            except EngramError as error:
                log.warning("memory.index_failed", extra=fields(error=str(error)))
        return 0

    async def _index(self, wanted: int) -> None:
        if not (await self._plan(wanted)).needed:
            return
        # Outside the pool, whose time-outs are for callers who wait.
        with translated("build the vector index"):
            async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK_KEY])
                if (await cursor.fetchone()) == (True,):
                    # Looked at again: another process may have done it before the lock was ours.
                    await _rebuild(connection, await self._plan(wanted))

    async def _plan(self, wanted: int) -> _Plan:
        found = await self._db.run(store.near_indexes())
        finished = sorted(_lists(index) for index in found if index["finished"])
        unfinished = [_lists(index) for index in found if not index["finished"]]
        grown = not finished or wanted >= 2 * finished[-1]
        return _Plan(unfinished, wanted if grown else None, finished if grown else finished[:-1])


@dataclass(frozen=True, slots=True)
class _Plan:
    """Indexes by their number of lists: left half done, to be built, then no longer needed."""

    unfinished: list[int]
    build: int | None
    replaced: list[int]

    @property
    def needed(self) -> bool:
        return bool(self.unfinished or self.build or self.replaced)


async def _rebuild(connection: psycopg.AsyncConnection[tuple[Any, ...]], plan: _Plan) -> None:
    await connection.execute("SET statement_timeout = 0")
    await connection.execute("SET lock_timeout = 0")
    await connection.execute("SET maintenance_work_mem = '256MB'")
    for lists in plan.unfinished:
        await connection.execute(_DROP.format(name=_name(lists)))
    if plan.build:
        log.info("memory.index_begun", extra=fields(lists=plan.build))
        await connection.execute(_BUILD.format(name=_name(plan.build), lists=plan.build))
        log.info("memory.index_built", extra=fields(lists=plan.build))
    for lists in plan.replaced:
        await connection.execute(_DROP.format(name=_name(lists)))


def _name(lists: int) -> sql.Identifier:
    return sql.Identifier(f"{PREFIX}{lists}")


def _lists(index: Row) -> int:
    return int(index["name"].removeprefix(PREFIX))
