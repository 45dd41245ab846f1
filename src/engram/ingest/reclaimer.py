"""Serves entries whose consumer is gone, so that nothing read by a dead worker is stranded.

A worker beats; one that has not beaten for a while is gone, and its entries are
taken over at once. Entries that have been silent for the configured time are
taken over whoever has them. The row decides what becomes of either, so taking
over an entry of a living worker does no harm. A consumer that is gone is
removed once it has nothing pending.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from engram.ingest.ingest_worker import IngestWorker
from engram.ingest.queue import Entry
from engram.ingest.redis_queue import RedisQueue
from engram.kernel.errors import RedisUnavailable
from engram.kernel.metrics import INGEST_RECLAIMED
from engram.kernel.settings import Settings
from engram.logbook import kv
from engram.postgres.executors import AsyncExecutor

HEARTBEATS = "ingest.heartbeat"
HEARTBEAT_KEPT_SECONDS = 86_400.0
GONE_SECONDS = 20.0
# A pass over more than this goes on next time.
PAGES = 50


class Reclaimer:
    def __init__(
        self, db: AsyncExecutor, queue: RedisQueue, worker: IngestWorker, settings: Settings
    ) -> None:
        self._db = db
        self._queue = queue
        self._worker = worker
        self._idle_ms = settings.ingest_reclaim_idle_ms
        self._batch = settings.ingest_reclaim_batch_size
        self._cursor = "0-0"

    async def beat(self) -> int:
        """Say that this worker is alive: before its first read, and every few seconds."""
        value = {"pid": os.getpid(), "host": socket.gethostname()}
        await self._db.run(kv.beat.query(HEARTBEATS, self._worker.worker_id, value, HEARTBEAT_KEPT_SECONDS))
        return 0

    async def leave(self) -> None:
        """The worker is done: what it may still have pending is anybody's at once."""
        await self._db.run(kv.delete_value.query(HEARTBEATS, self._worker.worker_id))
        await self._queue.dismiss(self._worker.worker_id)

    async def run_once(self) -> int:
        try:
            await self._silent()
            await self._abandoned()
        except RedisUnavailable:
            INGEST_RECLAIMED.labels("error").inc()
            raise
        return 0

    async def _silent(self) -> None:
        """A pass over everything pending; where there is no room it goes on next time."""
        for _ in range(PAGES):
            async with self._worker.taking:
                room = min(self._batch, self._worker.room)
                if room == 0:
                    return
                self._cursor, entries = await self._queue.claim_idle(
                    self._worker.worker_id, self._idle_ms, room, self._cursor
                )
                await self._serve(entries)
            if self._cursor == "0-0":
                return

    async def _abandoned(self) -> None:
        for consumer in await self._queue.consumers():
            if consumer.name == self._worker.worker_id or not await self._is_gone(consumer.name):
                continue
            for _ in range(PAGES):
                async with self._worker.taking:
                    room = min(self._batch, self._worker.room)
                    entries = await self._queue.claim_from(consumer.name, self._worker.worker_id, room)
                    await self._serve(entries)
                if not entries:
                    break
            await self._queue.dismiss(consumer.name)

    async def _is_gone(self, name: str) -> bool:
        seconds = await self._db.run(kv.seconds_since_beat.query(HEARTBEATS, name))
        return seconds is None or seconds > GONE_SECONDS

    async def _serve(self, entries: Sequence[Entry]) -> None:
        INGEST_RECLAIMED.labels("claimed").inc(len(entries))
        await self._worker.serve(entries)
