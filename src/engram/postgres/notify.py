"""Waking somebody up through PostgreSQL: a hint that is quick and may be lost.

NOTIFY inside a writing transaction makes all writers queue behind one lock. So
it is sent after the commit, by itself, and many pokes become one. Whoever
listens must poll as well: a notification is lost while either side reconnects,
and a connection pooler in transaction mode drops them all without a word.

    async with running(Notifier(db, "engram_outbox")) as notifier:
        notifier.poke()

    async with running(Listener(dsn, "engram_outbox")) as listener:
        await listener.heard.wait()
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import psycopg
from psycopg import sql

from engram.kernel.backoff import exponential_capped_ms
from engram.kernel.errors import EngramError
from engram.kernel.logs import fields
from engram.postgres.errors import translate
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import bounded
from engram.postgres.query import Query, Statement, nothing

log = logging.getLogger(__name__)

AT_MOST_EVERY_SECONDS = 0.05
RECONNECT_MS = (100, 10_000)

_SEND = Statement("notify.send", "SELECT pg_notify(%(channel)s, '')")


class Notifier:
    """Sends what was poked, soon and not too often. A failure is dropped: the listener polls."""

    def __init__(self, db: AsyncExecutor, channel: str) -> None:
        self._db = db
        self._query = Query(_SEND, nothing, {"channel": channel})
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """Call it after the commit, in the event loop's thread; it never waits and never fails."""
        self._poked.set()

    async def run(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            try:
                await self._db.run(self._query)
            except EngramError as error:
                log.debug("notify.dropped", extra=fields(error=error.message))
            await asyncio.sleep(AT_MOST_EVERY_SECONDS)


class Listener:
    """Sets `heard` at every notification, and whenever some may have been missed."""

    def __init__(self, dsn: str, channel: str, *, application_name: str = "engram-listen") -> None:
        self.heard = asyncio.Event()
        self._conninfo = bounded(dsn, application_name=application_name)
        self._listen = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        self._failures = 0

    async def run(self) -> None:
        """For ever: a server that is away is tried again, ever more rarely."""
        while True:
            try:
                await self._listen_until_lost()
            except (psycopg.Error, OSError) as error:
                self._failures += 1
                log.debug("listen.lost", extra=fields(error=translate(error, "listen").message))
            await asyncio.sleep(exponential_capped_ms(self._failures, *RECONNECT_MS) / 1000)

    async def _listen_until_lost(self) -> None:
        async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
            await connection.execute(self._listen)
            self._failures = 0
            self.heard.set()
            async for _ in connection.notifies():
                self.heard.set()


Part = TypeVar("Part", Notifier, Listener)


@asynccontextmanager
async def running(part: Part) -> AsyncIterator[Part]:
    """`part` works in the background for as long as the block runs."""
    task = asyncio.create_task(part.run())
    try:
        yield part
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
