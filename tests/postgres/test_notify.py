"""A hint through PostgreSQL: quick, coalesced, never in anybody's way, back after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from engram.embedded import EmbeddedPostgres
from engram.kernel.errors import DatabaseUnavailable
from engram.postgres import notify
from engram.postgres.executors import AsyncExecutor
from engram.postgres.notify import Listener, Notifier, running
from engram.postgres.pool import async_pool, connect

pytestmark = pytest.mark.anyio

CHANNEL = "engram_demo"


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def heard(listener: Listener) -> None:
    async with asyncio.timeout(20):
        await listener.heard.wait()
    listener.heard.clear()


def listening(dsn: str) -> list[int]:
    with connect(dsn) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'ears'"
        ).fetchall()
    return [row["pid"] for row in found]


class Counting:
    """A database that counts what is sent, and fails when told to."""

    def __init__(self, db: AsyncExecutor | None = None) -> None:
        self.sent = 0
        self._db = db

    async def run(self, query):
        self.sent += 1
        if self._db is None:
            raise DatabaseUnavailable("away")
        return await self._db.run(query)


async def test_a_poke_is_heard(empty_dsn: str) -> None:
    async with async_pool(empty_dsn) as pool, running(Listener(empty_dsn, CHANNEL)) as listener:
        await heard(listener)  # it listens now: some may have been missed before
        async with running(Notifier(AsyncExecutor(pool), CHANNEL)) as notifier:
            notifier.poke()
            await heard(listener)


async def test_other_channels_are_not_heard(empty_dsn: str) -> None:
    async with running(Listener(empty_dsn, 'a "quoted" name')) as listener:
        await heard(listener)
        with connect(empty_dsn) as connection:
            connection.execute("NOTIFY engram_demo")
            connection.execute("""NOTIFY "a ""quoted"" name" """)
        await heard(listener)
        assert not listener.heard.is_set()


async def test_many_pokes_become_few_notifications(empty_dsn: str) -> None:
    async with async_pool(empty_dsn) as pool:
        counting = Counting(AsyncExecutor(pool))
        async with running(Notifier(counting, CHANNEL)) as notifier:
            for _ in range(100):
                for _ in range(1000):
                    notifier.poke()
                await asyncio.sleep(0)
            await until(lambda: counting.sent)
    assert counting.sent <= 2


async def test_a_poke_while_one_is_being_sent_is_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "AT_MOST_EVERY_SECONDS", 0.001)
    counting = Counting()
    async with running(Notifier(counting, CHANNEL)) as notifier:
        notifier.poke()
        await until(lambda: counting.sent == 1)
        notifier.poke()
        await until(lambda: counting.sent == 2)


async def test_a_failure_reaches_nobody_and_the_next_poke_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "AT_MOST_EVERY_SECONDS", 0.001)
    counting = Counting()
    async with running(Notifier(counting, CHANNEL)) as notifier:
        for n in range(1, 4):
            notifier.poke()
            await until(lambda n=n: counting.sent == n)


async def test_a_listener_whose_connection_is_cut_comes_back_and_says_so(empty_dsn: str) -> None:
    async with running(Listener(empty_dsn, CHANNEL, application_name="ears")) as listener:
        for _ in range(2):
            await heard(listener)
            (pid,) = listening(empty_dsn)
            with connect(empty_dsn) as connection:
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        await heard(listener)
        with connect(empty_dsn) as connection:
            connection.execute("NOTIFY engram_demo")
        await heard(listener)


async def test_a_listener_leaves_no_connection_behind(empty_dsn: str) -> None:
    async with running(Listener(empty_dsn, CHANNEL, application_name="ears")) as listener:
        await heard(listener)
        assert len(listening(empty_dsn)) == 1
    await until(lambda: not listening(empty_dsn))


async def test_a_server_that_is_not_there_is_waited_for_and_one_that_is_killed_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "RECONNECT_MS", (10, 50))
    with EmbeddedPostgres(tmp_path) as server:
        dsn = server.dsn("postgres")
        async with async_pool(dsn, min_size=0) as pool, running(Listener(dsn, CHANNEL)) as listener:
            await heard(listener)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: not server.is_alive())
            await until(lambda: listener._failures > 2)
            assert not listener.heard.is_set()
            await asyncio.to_thread(server.start)
            await heard(listener)
            async with running(Notifier(AsyncExecutor(pool), CHANNEL)) as notifier:
                async with asyncio.timeout(20):
                    while not listener.heard.is_set():
                        notifier.poke()
                        await asyncio.sleep(0.05)
