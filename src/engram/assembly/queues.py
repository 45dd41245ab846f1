"""What tells ingest workers that there is work, and what tells it again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engram.assembly.parts import open_executor
from engram.embedded import running_redis
from engram.ingest.kafka_queue import GROUP, TOPIC, KafkaQueue, KafkaSweeper
from engram.ingest.queue import Queue
from engram.ingest.redis_queue import RedisQueue
from engram.ingest.sweeper import Sweeper
from engram.kernel.errors import ConfigError
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor


@asynccontextmanager
async def open_queue(settings: Settings, db: AsyncExecutor, *, reads: bool = False) -> AsyncIterator[Queue]:
    """What tells ingest workers that there is work; it need not be there yet."""
    queue: RedisQueue | KafkaQueue
    if settings.ingest_queue == "kafka":
        queue = _kafka_queue(settings, db, reads=reads)
    else:
        queue = _redis_queue(settings)
    try:
        yield queue
    finally:
        await queue.close()


def _redis_queue(settings: Settings) -> RedisQueue:
    data_dir = settings.data_dir
    return RedisQueue(
        lambda: settings.redis_url or running_redis(data_dir), dlq=settings.ingest_dlq_stream_key
    )


def _kafka_queue(settings: Settings, db: AsyncExecutor, *, reads: bool) -> KafkaQueue:
    if not reads:
        return KafkaQueue(db, None)
    # Imported here: its library is needed by nobody else.
    from engram.ingest.kafka import KafkaSubscriber

    return KafkaQueue(db, KafkaSubscriber(kafka_servers(settings), [TOPIC], GROUP))


def sweeper_for(db: AsyncExecutor, queue: Queue, name: str = "") -> Sweeper | KafkaSweeper:
    return Sweeper(db, queue, name) if isinstance(queue, RedisQueue) else KafkaSweeper(db)


@asynccontextmanager
async def open_sweeper(settings: Settings) -> AsyncIterator[Sweeper | KafkaSweeper]:
    async with open_executor(settings, "engram-rebuild") as db, open_queue(settings, db) as queue:
        yield sweeper_for(db, queue)


def kafka_servers(settings: Settings) -> str:
    if settings.kafka_bootstrap_servers is None:
        raise ConfigError(
            "KAFKA_BOOTSTRAP_SERVERS is not set", hint="e.g. KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092"
        )
    return settings.kafka_bootstrap_servers
