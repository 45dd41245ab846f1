"""A broker for the session: a real one where it can be had."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from engram.embedded.kafka import VERSION, Broker, NoBroker, jars
from engram.ingest import tasks
from engram.ingest.kafka import KafkaPublisher
from engram.ingest.publisher import EventPublisher
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from support.kafka import mock_cluster
from support.parts import used

_numbers = itertools.count()
_started: list[str] = []


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a broker is; the closing report says of which kind."""
    if given := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        used("Kafka", "real: the one of KAFKA_BOOTSTRAP_SERVERS")
        yield given
        return
    try:
        if os.environ.get("ENGRAM_TEST_KAFKA") == "mock":
            raise NoBroker("ENGRAM_TEST_KAFKA=mock")
        jars()
    except NoBroker as why:
        used("Kafka", f"stand-in: librdkafka's mock cluster, because {why}")
        with mock_cluster() as servers:
            yield servers
        return
    real = Broker(tmp_path_factory.mktemp("kafka"))
    real.start()
    _started.append(real.servers)
    used("Kafka", f"real: Apache Kafka {VERSION}, KRaft")
    yield real.servers
    real.kill()


@pytest.fixture
def takes_little(broker: str) -> bool:
    """Whether it is the broker that was started here, which takes no large messages."""
    return broker in _started


@pytest.fixture
def topic_of_its_own() -> str:
    """Tests share a broker: each has its own kind of aggregate, so its own topic."""
    return f"test_{os.getpid()}_{next(_numbers)}"


@pytest.fixture
def settings_for_kafka(settings: Settings) -> Settings:
    return replace(
        settings,
        ingest_kafka_lease_seconds=6.0,
        ingest_kafka_base_backoff_ms=0,
        ingest_kafka_max_attempts=3,
        ingest_kafka_publish_batch_size=50,
    )


@pytest.fixture
async def publisher(
    db: AsyncExecutor, broker: str, settings_for_kafka: Settings
) -> AsyncIterator[EventPublisher]:
    kafka = KafkaPublisher(broker, message_seconds=2.0)
    yield EventPublisher(db, kafka, settings_for_kafka, worker_id="p1")
    kafka.close()


async def make_tasks(db: AsyncExecutor, count: int) -> list[UUID]:
    """Tasks of as many documents."""
    given = [(uuid4(), uuid4(), f"{uuid4().hex}{uuid4().hex}") for _ in range(count)]
    return await db.run(tasks.create_many("ada", "text/plain", given))
