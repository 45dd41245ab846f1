"""A server that stalls does not keep its own time-outs: the client's deadline ends the wait."""

from __future__ import annotations

import os
import signal

import pytest

from engram.kernel.errors import DatabaseUnavailable
from engram.postgres import executors
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import async_pool
from engram.postgres.query import Query, Statement, scalar

pytestmark = pytest.mark.anyio

PID = Query(Statement("demo.pid", "SELECT pg_backend_pid() AS pid"), scalar)


async def test_a_stopped_backend_is_cut_off_and_replaced(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "CLIENT_DEADLINE_SECONDS", 0.5)
    async with async_pool(empty_dsn, max_size=1) as pool:
        db = AsyncExecutor(pool)
        stalled = await db.run(PID)
        os.kill(stalled, signal.SIGSTOP)
        try:
            with pytest.raises(DatabaseUnavailable):
                await db.run(PID)
            assert await db.run(PID) != stalled
        finally:
            os.kill(stalled, signal.SIGCONT)


async def test_a_statement_within_its_time_is_left_alone(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "CLIENT_DEADLINE_SECONDS", 5.0)
    async with async_pool(empty_dsn, max_size=1) as pool:
        db = AsyncExecutor(pool)
        first = await db.run(PID)
        await db.run(Query(Statement("demo.nap", "SELECT pg_sleep(0.2)::text AS slept"), scalar))
        assert await db.run(PID) == first
