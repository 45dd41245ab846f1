"""The queue over Kafka: tasks are put by way of the outbox and taken from the topic.

A message only says that a task may be worked on. It is done with as soon as the
row has taken note of it, however that was: a task that failed comes back by an
event of its own when it is due, so the topic is never waited on.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from engram.ingest import events, tasks
from engram.ingest.queue import Done, Entry
from engram.kernel.failpoints import failpoint
from engram.kernel.metrics import KAFKA_BACKLOG
from engram.postgres.executors import AsyncExecutor

if TYPE_CHECKING:
    from engram.ingest.kafka import KafkaSubscriber, Message

GROUP = "ingest-workers"
TOPIC = events.topic_of("ingest_task")
PAGE = 500


class KafkaQueue:
    """`subscriber` None: it only puts."""

    is_told_by_rows = True
    keeps_entries = False

    def __init__(self, db: AsyncExecutor, subscriber: KafkaSubscriber | None) -> None:
        self._db = db
        self._subscriber = subscriber
        self._places: dict[str, list[tuple[str, int, int]]] = defaultdict(list)

    async def put(self, task_ids: Sequence[UUID]) -> list[str]:
        emitted = await self._db.run(events.emit(task_ids))
        return [str(emitted.get(task_id, "")) for task_id in task_ids]

    async def take(self, consumer: str, count: int, wait_seconds: float) -> list[Entry]:
        if self._subscriber is None:
            return []
        messages = await asyncio.to_thread(self._subscriber.take, count, wait_seconds)
        for message in messages:
            self._places[message.id].append(message.place)
        return [Entry(message.id, _task_of(message)) for message in messages]

    async def settle(self, done: Sequence[Done]) -> int:
        """Nothing is told of deaths: the row says it, and the topic goes on."""
        places = [place for each in done for place in self._places.pop(each.id, [])]
        if places and self._subscriber is not None:
            await asyncio.to_thread(self._subscriber.settle, places)
        return 0

    async def measure(self) -> int:
        waiting = await self._db.run(events.backlog())
        KAFKA_BACKLOG.set(waiting)
        return 0

    async def close(self) -> None:
        if self._subscriber is not None:
            await asyncio.to_thread(self._subscriber.close)


class KafkaSweeper:
    """Gives an event to every task that should have one: due retries, and tasks of another queue."""

    def __init__(self, db: AsyncExecutor) -> None:
        self._db = db

    async def run_once(self) -> int:
        owed = await self._db.run(events.owed(PAGE))
        return await self._tell(owed)

    async def rebuild(self) -> int:
        """Tell of every waiting task anew, once, also of those whose message may be lost; how many."""
        count, after = 0, None
        while page := await self._db.run(events.owed(PAGE, lost=True, after=after)):
            after = page[-1]
            count += await self._tell(page)
        return count

    async def _tell(self, owed: Sequence[UUID]) -> int:
        if not owed:
            return 0
        known = await self._db.run(tasks.judge(owed))
        old = [(task_id, row["stream_id"]) for task_id, row in known.items() if row["stream_id"]]
        if old:
            # From now on the next message that is read is their task's.
            await self._db.run(tasks.off_the_stream(old))
        emitted = await self._db.run(events.emit(owed))
        failpoint("sweeper.after_put")
        return len(emitted)


def _task_of(message: Message) -> UUID | None:
    """None for whatever is no task: anybody may write to a topic."""
    try:
        return UUID(str(json.loads(message.value)["taskId"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
