"""The processes that bring documents in: workers and publishers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engram.assembly.addresses import dsn_of
from engram.assembly.knowledge import open_knowledge_vectors
from engram.assembly.parts import artifacts, open_executor
from engram.assembly.queues import kafka_servers, open_queue, sweeper_for
from engram.ingest.ingest_worker import IngestWorker, new_worker_id
from engram.ingest.kafka_queue import KafkaSweeper
from engram.ingest.parsing import Limits as ParserLimits
from engram.ingest.parsing import Parsers
from engram.ingest.pipeline import DocumentPipeline
from engram.ingest.publisher import EventPublisher, message_seconds
from engram.ingest.queue import Queue
from engram.ingest.reclaimer import Reclaimer
from engram.ingest.redis_queue import RedisQueue
from engram.ingest.seam import Pipeline
from engram.ingest.sweeper import Sweeper
from engram.ingest.upkeep import KnowledgeUpkeep
from engram.kernel.runloop import RunOnce, cut_off, run_loop
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor

INGEST_POLL_SECONDS = 0.5
INGEST_UPKEEP_SECONDS = 5.0
KAFKA_SWEEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class IngestParts:
    """What an ingest worker process runs."""

    queue: Queue
    worker: IngestWorker
    reclaimer: Reclaimer | None
    sweeper: Sweeper | KafkaSweeper
    upkeep: RunOnce | None = None

    def loops(self, settings: Settings, stop: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """Everything it does, each at its own pace, until `stop`."""
        work, keep, kafka = self.worker, self.reclaimer, isinstance(self.sweeper, KafkaSweeper)
        lease = settings.ingest_lease_seconds
        paces: list[tuple[str, RunOnce, float]] = [
            ("ingest", work.run_once, INGEST_POLL_SECONDS),
            ("ingest.renew", work.renew, lease / 3),
            ("ingest.lapsed", work.count_lapsed, min(lease / 2, INGEST_UPKEEP_SECONDS)),
            ("ingest.sweep", self.sweeper.run_once, KAFKA_SWEEP_SECONDS if kafka else INGEST_UPKEEP_SECONDS),
            ("ingest.measure", self.queue.measure, INGEST_UPKEEP_SECONDS),
        ]
        if keep is not None:
            paces.append(("ingest.heartbeat", keep.beat, INGEST_UPKEEP_SECONDS))
        if keep is not None and settings.ingest_reclaim_enabled:
            paces.append(("ingest.reclaim", keep.run_once, settings.ingest_reclaim_interval_ms / 1000))
        if self.upkeep is not None:
            paces.append(("knowledge.upkeep", cut_off(self.upkeep, stop), INGEST_UPKEEP_SECONDS))
        settling = run_loop(
            "ingest.settle", work.settle, idle_seconds=INGEST_POLL_SECONDS, stop=stop, wake=work.ended
        )
        return [settling, *(run_loop(name, run, idle_seconds=pace, stop=stop) for name, run, pace in paces)]


@asynccontextmanager
async def open_ingest(
    settings: Settings, pipeline: Pipeline | None = None, *, stop: asyncio.Event | None = None
) -> AsyncIterator[IngestParts]:
    """`pipeline` None: the one that the settings ask for."""
    async with AsyncExitStack() as held:
        db = await held.enter_async_context(open_executor(settings, "engram-ingest"))
        queue = await held.enter_async_context(open_queue(settings, db, reads=True))
        upkeep: RunOnce | None = None
        if pipeline is None:
            real, upkeep = await held.enter_async_context(open_pipeline(settings, db))
        worker = IngestWorker(db, queue, pipeline or real, settings, stop=stop)
        reclaimer = Reclaimer(db, queue, worker, settings) if isinstance(queue, RedisQueue) else None
        yield IngestParts(queue, worker, reclaimer, sweeper_for(db, queue, worker.worker_id), upkeep)


@asynccontextmanager
async def open_pipeline(settings: Settings, db: AsyncExecutor) -> AsyncIterator[tuple[Pipeline, RunOnce]]:
    """Reads documents in child processes and writes their passages; and what their table needs."""
    parsers = parsers_of(settings)
    async with open_knowledge_vectors(settings, db, fills=True) as vectors:
        try:
            pipeline = DocumentPipeline(db, artifacts(settings), parsers, vectors)
            yield pipeline, KnowledgeUpkeep(dsn_of(settings), db, vectors).run_once
        finally:
            await parsers.shut()


def parsers_of(settings: Settings) -> Parsers:
    limits = ParserLimits(
        memory_bytes=settings.parser_memory_mb << 20,
        cpu_seconds=settings.parser_seconds,
        wall_seconds=3 * settings.parser_seconds,
    )
    # More children than processors would only wait for each other.
    return Parsers(at_once=min(settings.ingest_concurrency, os.cpu_count() or 1), limits=limits)


@asynccontextmanager
async def open_publishers(settings: Settings) -> AsyncIterator[list[EventPublisher]]:
    """Two publishers, each with a producer of its own: one settles while the other sends."""
    # Imported here: its library is needed by nobody else.
    from engram.ingest.kafka import KafkaPublisher

    servers, seconds = kafka_servers(settings), message_seconds(settings.ingest_kafka_lease_seconds)
    producers = [KafkaPublisher(servers, message_seconds=seconds) for _ in range(2)]
    async with open_executor(settings, "engram-publisher") as db:
        name = new_worker_id()
        try:
            yield [
                EventPublisher(db, producer, settings, worker_id=f"{name}:{number}")
                for number, producer in enumerate(producers)
            ]
        finally:
            for producer in producers:
                producer.close()
