"""The two ways to run a `Query`: blocking and not. They differ in nothing else.

A query is one statement and one transaction: it is done or it is not.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psycopg

from engram.postgres.errors import translated
from engram.postgres.pool import STATEMENT_TIMEOUT_MS, AsyncPool, SyncPool
from engram.postgres.query import Query, Row

T = TypeVar("T")


# Past the server's own time-out: a server that is stalled does not keep its own.
CLIENT_DEADLINE_SECONDS = STATEMENT_TIMEOUT_MS / 1000 + 5


@contextmanager
def _cut_off_after(seconds: float, connection: psycopg.AsyncConnection[Row]) -> Iterator[None]:
    """Shut the connection's socket when the time is up; cancelling would wait for the server too."""

    def cut() -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(connection.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)

    timer = asyncio.get_running_loop().call_later(seconds, cut)
    try:
        yield
    finally:
        timer.cancel()


def _has_rows(cursor: psycopg.Cursor[Row] | psycopg.AsyncCursor[Row]) -> bool:
    """Whether the statement answers with rows. `cursor.description` says so too, and describes them all."""
    return bool(cursor.pgresult and cursor.pgresult.nfields)


class SyncExecutor:
    def __init__(self, pool: SyncPool) -> None:
        self.pool = pool

    def run(self, query: Query[T]) -> T:
        with translated(query.statement.name), self.pool.connection() as connection:
            cursor = connection.execute(query.statement.text, query.params)
            return query.read(cursor.fetchall() if _has_rows(cursor) else [])


class AsyncExecutor:
    def __init__(self, pool: AsyncPool) -> None:
        self.pool = pool

    async def run(self, query: Query[T]) -> T:
        with translated(query.statement.name):
            async with self.pool.connection() as connection:
                with _cut_off_after(CLIENT_DEADLINE_SECONDS, connection):
                    cursor = await connection.execute(query.statement.text, query.params)
                    return query.read(await cursor.fetchall() if _has_rows(cursor) else [])
