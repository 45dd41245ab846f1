"""The two ways to run a `Query`: blocking and not. They differ in nothing else.

A query is one statement and one transaction: it is done or it is not.
"""

from __future__ import annotations

from typing import TypeVar

from engram.kernel.errors import DatabaseUnavailable
from engram.postgres.errors import translated
from engram.postgres.pool import AsyncPool, SyncPool
from engram.postgres.query import Query

T = TypeVar("T")


class SyncExecutor:
    def __init__(self, pool: SyncPool) -> None:
        self.pool = pool

    def run(self, query: Query[T]) -> T:
        try:
            with translated(query.statement.name), self.pool.connection() as connection:
                cursor = connection.execute(query.statement.text, query.params)
                return query.read(cursor.fetchall() if cursor.description else [])
        except DatabaseUnavailable:
            # One broken connection usually means all are: replace them now,
            # not one failed request at a time.
            self.pool.check()
            raise


class AsyncExecutor:
    def __init__(self, pool: AsyncPool) -> None:
        self.pool = pool

    async def run(self, query: Query[T]) -> T:
        try:
            with translated(query.statement.name):
                async with self.pool.connection() as connection:
                    cursor = await connection.execute(query.statement.text, query.params)
                    return query.read(await cursor.fetchall() if cursor.description else [])
        except DatabaseUnavailable:
            await self.pool.check()
            raise
