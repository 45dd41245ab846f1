"""Publishes waiting events to Kafka: lease lanes, send, settle.

An event is settled after the broker has confirmed it. A publisher that dies in
between leaves a lease that runs out, and the next sends the event once more:
that is where the producer's own guarantee ends, and the consumer finds a
duplicate. A lane's events are never sent past one that failed.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import groupby
from typing import TYPE_CHECKING
from uuid import UUID

from engram.ingest import events
from engram.ingest.events import Event, Published, Settled
from engram.kernel.backoff import exponential_capped_ms
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import DatabaseError
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.metrics import KAFKA_BACKLOG, KAFKA_DELAY_SECONDS, KAFKA_PUBLISHED, KAFKA_SECONDS
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor

if TYPE_CHECKING:
    from engram.ingest.kafka import Fate, KafkaPublisher

log = logging.getLogger(__name__)

MESSAGE_SECONDS = 10.0
SETTLE_AGAIN_SECONDS = 0.2
_RESULTS = {"SENT": "success", "RETRYING": "failure", "DEAD": "dead"}


def message_seconds(lease_seconds: float) -> float:
    """How long a message may take: with the time to begin one, less than the lease."""
    return min(MESSAGE_SECONDS, lease_seconds / 3)


class EventPublisher:
    def __init__(
        self, db: AsyncExecutor, kafka: KafkaPublisher, settings: Settings, *, worker_id: str
    ) -> None:
        self.worker_id = worker_id
        self._db = db
        self._kafka = kafka
        self._settings = settings

    async def run_once(self) -> int:
        """Publish one batch; how many events were tried."""
        lease = self._settings.ingest_kafka_lease_seconds
        began = SYSTEM_CLOCK.monotonic()
        claimed = await self._db.run(
            events.claim(self.worker_id, self._settings.ingest_kafka_publish_batch_size, lease)
        )
        if not claimed:
            return 0
        failpoint("publisher.after_claim")
        lanes = [list(lane) for _, lane in groupby(claimed, key=lambda event: event.lane_id)]
        fates = await asyncio.to_thread(self._kafka.publish, lanes, began + lease / 3)
        failpoint("publisher.after_publish")
        published = [self._judged(event, fates[event.id]) for event in claimed if event.id in fates]
        settled = await self._settled(published, began + lease)
        self._count(fates, settled)
        failpoint("publisher.after_settle")
        return len(published)

    async def measure(self) -> int:
        waiting = await self._db.run(events.backlog())
        KAFKA_BACKLOG.set(waiting)
        return 0

    def _judged(self, event: Event, fate: Fate) -> Published:
        if fate.error is None:
            return Published(event)
        log.warning("publisher.failed", extra=fields(event=str(event.id), error=fate.error))
        delay = exponential_capped_ms(
            event.attempt_count + 1,
            self._settings.ingest_kafka_base_backoff_ms,
            self._settings.ingest_kafka_max_backoff_ms,
        )
        return Published(event, fate.error, delay / 1000)

    async def _settled(self, published: list[Published], until: float) -> list[Settled]:
        """Insisted on while the lease lasts: what is not written down is sent twice."""
        query = events.settle(self.worker_id, published, self._settings.ingest_kafka_max_attempts)
        while True:
            try:
                return await self._db.run(query)
            except DatabaseError as error:
                if not error.retryable or SYSTEM_CLOCK.monotonic() >= until:
                    raise
                await asyncio.sleep(SETTLE_AGAIN_SECONDS)

    def _count(self, fates: dict[UUID, Fate], settled: list[Settled]) -> None:
        for status, result in _RESULTS.items():
            of_it = [each for each in settled if each.status == status]
            KAFKA_PUBLISHED.labels(result).inc(len(of_it))
            taken = KAFKA_SECONDS.labels(result)
            for each in of_it:
                taken.observe(fates[each.id].seconds)
        for each in settled:
            if each.waited is not None:
                KAFKA_DELAY_SECONDS.observe(max(0.0, each.waited))
            if each.status == "DEAD":
                log.error("publisher.dead", extra=fields(event=str(each.id), error=fates[each.id].error))
        if len(settled) < len(fates):
            log.warning("publisher.lease_lost", extra=fields(events=len(fates) - len(settled)))
