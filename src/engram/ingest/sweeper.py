"""Puts on the stream what should be there and is not.

A task whose upload died before it was put, and every unfinished task of a Redis
that came back empty. The rows are the truth: an entry that is there twice is a
duplicate, which the row tells apart, so a sweep may be repeated at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from engram.ingest import tasks
from engram.ingest.redis_queue import RedisQueue
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.failpoints import failpoint
from engram.postgres.executors import AsyncExecutor

PAGE = 500
# An upload puts its task itself, a moment after it has written the row.
UPLOAD_SECONDS = 3.0
# One walk over everything unfinished, by one of all workers, in so long.
WALK_SECONDS = 15.0


class Sweeper:
    def __init__(self, db: AsyncExecutor, queue: RedisQueue, name: str = "") -> None:
        self._db = db
        self._queue = queue
        self._name = name
        self._walk_at = 0.0

    async def run_once(self) -> int:
        """Put what was never put, and now and then look for entries that vanished; how many it put."""
        count = await self._put_the_new(UPLOAD_SECONDS)
        now = SYSTEM_CLOCK.monotonic()
        if now >= self._walk_at and await self._queue.take_turn(self._name, WALK_SECONDS):
            self._walk_at = now + WALK_SECONDS
            count += await self.rebuild(UPLOAD_SECONDS)
        return count

    async def rebuild(self, settled_seconds: float = 0.0) -> int:
        """Give every unfinished task an entry; how many had none."""
        count, after = 0, None
        while page := await self._db.run(tasks.unfinished(after, PAGE, settled_seconds)):
            after = page[-1]["id"]
            placed = {row["stream_id"]: row["id"] for row in page if row["stream_id"] is not None}
            missing = await self._queue.missing(list(placed)) if placed else set()
            if missing:
                # Before they are put: a worker may read an entry at once, and must know it for theirs.
                gone = [(placed[entry], entry) for entry in missing]
                lost = await self._db.run(tasks.off_the_stream(gone))
                count += await self._put(lost)
        while new := await self._put_the_new(settled_seconds):
            count += new
        return count

    async def _put_the_new(self, settled_seconds: float) -> int:
        found = await self._db.run(tasks.not_on_the_stream(PAGE, settled_seconds))
        return await self._put(found)

    async def _put(self, task_ids: Sequence[UUID]) -> int:
        if not task_ids:
            return 0
        entries = await self._queue.put(task_ids)
        failpoint("sweeper.after_put")
        await self._db.run(tasks.put_on_stream(list(zip(task_ids, entries, strict=True))))
        return len(task_ids)
