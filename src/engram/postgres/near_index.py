"""An index over a table's vectors: built when it pays, built anew when it is outgrown.

Up to some thousand rows every vector is compared, which is exact and takes a
millisecond or two. Beyond, an IVFFlat index is built in the background, without
stopping writes, and built anew with more lists when the table has grown
fourfold. It costs an insert a twentieth of a millisecond; HNSW, its alternative
in pgvector, is no faster to ask at these sizes and costs an insert two
milliseconds. The index's name ends in its number of lists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from engram.kernel.errors import EngramError
from engram.kernel.logs import fields
from engram.postgres.errors import translated
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import bounded
from engram.postgres.query import Query, Row

log = logging.getLogger(__name__)

INDEX_FROM_ROWS = 5_000
_LOCK_KEY = 0x6E656172  # "near"

_BUILD = sql.SQL(
    "CREATE INDEX CONCURRENTLY {name} ON {table}"
    " USING ivfflat (embedding halfvec_cosine_ops) WITH (lists = {lists})"
)
_DROP = sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {name}")

# The best plan depends on how rare the asked words and tags are, so plans are not
# reused. A search looks at so many lists of the index, and at more until its
# filter has let enough through.
SESSION = "-c plan_cache_mode=force_custom_plan -c ivfflat.probes=20 -c ivfflat.iterative_scan=relaxed_order"


def searching(dsn: str) -> str:
    """`dsn` for connections that search by words and vectors; what its `options` say wins."""
    return make_conninfo(dsn, options=f"{SESSION} {conninfo_to_dict(dsn).get('options') or ''}")


def lists_for(rows: float) -> int:
    """About as many lists as each has rows: a search looks at some lists, and at all their rows.

    >>> [lists_for(rows) for rows in (5_000, 100_000, 1_000_000)]
    [87, 395, 1250]
    """
    return isqrt(int(rows)) * 5 // 4


class NearIndex:
    """`listed` asks for the indexes whose name begins with `prefix`: name, and whether finished."""

    def __init__(
        self,
        dsn: str,
        db: AsyncExecutor,
        *,
        table: tuple[str, str],
        prefix: str,
        listed: Callable[[], Query[list[Row]]],
        subject: str,
        index_from: int = INDEX_FROM_ROWS,
    ) -> None:
        self._conninfo = bounded(dsn, application_name=f"engram-{subject}-index")
        self._db = db
        self._table = table
        self._prefix = prefix
        self._listed = listed
        self._subject = subject
        self._index_from = index_from

    async def keep(self, rows: float) -> None:
        """What a table of so many rows needs; a failure is logged and tried again in the next round."""
        if rows < self._index_from:
            return
        try:
            await self._index(lists_for(rows))
        except EngramError as error:
            log.warning(f"{self._subject}.index_failed", extra=fields(error=str(error)))

    async def _index(self, wanted: int) -> None:
        if not (await self._plan(wanted)).needed:
            return
        # Outside the pool, whose time-outs are for callers who wait.
        with translated("build the vector index"):
            async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK_KEY])
                if (await cursor.fetchone()) == (True,):
                    # Looked at again: another process may have done it before the lock was ours.
                    await self._rebuild(connection, await self._plan(wanted))

    async def _plan(self, wanted: int) -> _Plan:
        found = await self._db.run(self._listed())
        finished = sorted(self._lists(index) for index in found if index["finished"])
        unfinished = [self._lists(index) for index in found if not index["finished"]]
        grown = not finished or wanted >= 2 * finished[-1]
        return _Plan(unfinished, wanted if grown else None, finished if grown else finished[:-1])

    async def _rebuild(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], plan: _Plan) -> None:
        await connection.execute("SET statement_timeout = 0")
        await connection.execute("SET lock_timeout = 0")
        await connection.execute("SET maintenance_work_mem = '256MB'")
        for lists in plan.unfinished:
            await self._drop(connection, lists)
        if plan.build:
            log.info(f"{self._subject}.index_begun", extra=fields(lists=plan.build))
            name, table = sql.Identifier(f"{self._prefix}{plan.build}"), sql.Identifier(*self._table)
            await connection.execute(_BUILD.format(name=name, table=table, lists=plan.build))
            log.info(f"{self._subject}.index_built", extra=fields(lists=plan.build))
        for lists in plan.replaced:
            await self._drop(connection, lists)

    async def _drop(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], lists: int) -> None:
        schema, _ = self._table
        await connection.execute(_DROP.format(name=sql.Identifier(schema, f"{self._prefix}{lists}")))

    def _lists(self, index: Row) -> int:
        return int(index["name"].removeprefix(self._prefix))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Indexes by their number of lists: left half done, to be built, then no longer needed."""

    unfinished: list[int]
    build: int | None
    replaced: list[int]

    @property
    def needed(self) -> bool:
        return bool(self.unfinished or self.build or self.replaced)
