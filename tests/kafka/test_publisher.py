"""Events on their way to Kafka: in order, once, fenced, and dead in the end if nobody takes them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from confluent_kafka import Consumer, TopicPartition

from engram.ingest import events
from engram.ingest.events import Published
from engram.ingest.kafka import KafkaPublisher
from engram.ingest.publisher import EventPublisher
from engram.kernel.metrics import KAFKA_BACKLOG, REGISTRY
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from kafka.conftest import make_tasks

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("kafka")]

NOBODY = "127.0.0.1:1"


def table(dsn: str, sql: str = "SELECT * FROM ingest.outbox_event ORDER BY lane_id, seq") -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute(sql.encode()).fetchall()


def put_events(dsn: str, kind: str, lanes: int, each: int) -> None:
    """Events of a kind of their own: a topic of its own on the shared broker."""
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO ingest.outbox_lane (aggregatetype, aggregateid, next_seq)"
            " SELECT %(kind)s, 'key-' || n, %(each)s + 1 FROM generate_series(1, %(lanes)s) n",
            {"kind": kind, "each": each, "lanes": lanes},
        )
        connection.execute(
            "INSERT INTO ingest.outbox_event (id, aggregatetype, aggregateid, type, payload, lane_id, seq)"
            " SELECT gen_random_uuid(), l.aggregatetype, l.aggregateid, 'Tested',"
            " jsonb_build_object('n', s), l.id, s"
            " FROM ingest.outbox_lane l, generate_series(1, %(each)s) s WHERE l.aggregatetype = %(kind)s",
            {"kind": kind, "each": each},
        )


def read_topic(servers: str, kind: str, count: int, seconds: float = 20) -> list[dict]:
    """All there is in the topic, once there is so much: what came twice is in it twice."""
    topic = events.topic_of(kind)
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": f"reader-{uuid4().hex}", "enable.auto.commit": False}
    )
    found: list[dict] = []
    give_up = time.monotonic() + seconds
    try:
        partitions = consumer.list_topics(topic, 10).topics[topic].partitions
        read = dict.fromkeys(partitions, 0)
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        while time.monotonic() < give_up:
            for message in consumer.consume(500, 0.2):
                if message.error() is None:
                    read[message.partition()] = message.offset() + 1
                    headers = {name: value.decode() for name, value in message.headers()}
                    value = json.loads(message.value())
                    found.append({"key": message.key().decode(), "value": value, "headers": headers})
            if len(found) >= count and all(
                consumer.get_watermark_offsets(TopicPartition(topic, number), 5)[1] == at
                for number, at in read.items()
            ):
                break
    finally:
        consumer.close()
    return found


async def drained(*publishers: EventPublisher) -> None:
    async def drain(each: EventPublisher) -> None:
        while await each.run_once():
            pass

    async with asyncio.timeout(60):
        await asyncio.gather(*map(drain, publishers))


async def test_a_task_has_one_event_that_waits(db: AsyncExecutor, dsn: str) -> None:
    (task,) = await make_tasks(db, 1)
    first = await db.run(events.emit([task]))
    assert await db.run(events.emit([task])) == first
    twice = await asyncio.gather(*(db.run(events.emit([task])) for _ in range(8)))
    assert twice == [first] * 8
    (row,) = table(dsn)
    assert (row["status"], row["attempt_count"], row["next_retry_at"], row["seq"]) == ("NEW", 0, None, 1)
    assert row["payload"]["taskId"] == str(task)
    (lane,) = table(dsn, "SELECT head_seq, next_seq FROM ingest.outbox_lane")
    assert (lane["head_seq"], lane["next_seq"]) == (1, 2)


async def test_events_arrive_in_order_with_several_publishers(
    db: AsyncExecutor, dsn: str, broker: str, settings_for_kafka: Settings, topic_of_its_own: str
) -> None:
    put_events(dsn, topic_of_its_own, lanes=30, each=10)
    producers = [KafkaPublisher(broker, message_seconds=2.0) for _ in range(3)]
    await drained(
        *(
            EventPublisher(db, kafka, settings_for_kafka, worker_id=f"p{n}")
            for n, kafka in enumerate(producers)
        )
    )
    for kafka in producers:
        kafka.close()
    rows = table(dsn)
    assert {row["status"] for row in rows} == {"SENT"}
    assert all(row["sent_at"] and row["last_error"] is None and row["next_retry_at"] is None for row in rows)
    found = read_topic(broker, topic_of_its_own, 300)
    by_key = defaultdict(list)
    for message in found:
        by_key[message["key"]].append(message["value"]["n"])
    assert by_key == {f"key-{n}": list(range(1, 11)) for n in range(1, 31)}
    assert {message["headers"]["id"] for message in found} == {str(row["id"]) for row in rows}
    assert {message["headers"]["eventType"] for message in found} == {"Tested"}


async def test_nobody_there_means_retry_later_and_later_and_dead_in_the_end(
    db: AsyncExecutor, dsn: str, settings_for_kafka: Settings
) -> None:
    """Its lane goes on, and the task says why it waits."""
    (task,) = await make_tasks(db, 1)
    await db.run(events.emit([task]))
    settings = replace(
        settings_for_kafka, ingest_kafka_base_backoff_ms=60_000, ingest_kafka_max_backoff_ms=600_000
    )
    kafka = KafkaPublisher(NOBODY, message_seconds=0.3)
    publisher = EventPublisher(db, kafka, settings, worker_id="p1")
    waits = []
    for attempt in (1, 2):
        assert await publisher.run_once() == 1
        (row,) = table(dsn)
        assert (row["status"], row["attempt_count"]) == ("RETRYING", attempt)
        assert row["last_error"]
        waits.append(row["next_retry_at"])
        assert await publisher.run_once() == 0, "it is not due"
        with connect(dsn) as connection:
            connection.execute("UPDATE ingest.outbox_lane SET due_at = now()")
    assert (waits[1] - waits[0]).total_seconds() > 50
    await publisher.run_once()
    (row,) = table(dsn)
    assert (row["status"], row["attempt_count"], row["next_retry_at"]) == ("DEAD", 3, None)
    (told,) = table(dsn, "SELECT status, last_error, error_message FROM ingest.ingest_task")
    assert told["status"] == "QUEUED"
    assert told["last_error"] == told["error_message"] == f"not published: {row['last_error']}"
    (lane,) = table(dsn, "SELECT head_seq, next_seq, locked_by FROM ingest.outbox_lane")
    assert (lane["head_seq"], lane["next_seq"], lane["locked_by"]) == (2, 2, None)
    kafka.close()


@pytest.mark.parametrize("size", [3_000_000, 800_000], ids=["for the client", "for the broker"])
async def test_behind_one_that_failed_nothing_is_sent(
    db: AsyncExecutor,
    dsn: str,
    broker: str,
    settings_for_kafka: Settings,
    topic_of_its_own: str,
    size: int,
    takes_little: bool,
) -> None:
    if size < 1_000_000 and not takes_little:
        pytest.skip("this broker takes a message of that size")
    put_events(dsn, topic_of_its_own, lanes=1, each=3)
    with connect(dsn) as connection:  # too large
        huge = json.dumps({"n": 2, "x": "x" * size})
        connection.execute("UPDATE ingest.outbox_event SET payload = %s WHERE seq = 2", [huge])
    kafka = KafkaPublisher(broker, message_seconds=2.0)
    publisher = EventPublisher(db, kafka, settings_for_kafka, worker_id="p1")
    await publisher.run_once()
    assert [row["status"] for row in table(dsn)] == ["SENT", "RETRYING", "NEW"]
    await drained(publisher)
    assert [row["status"] for row in table(dsn)] == ["SENT", "DEAD", "SENT"]
    assert [m["value"]["n"] for m in read_topic(broker, topic_of_its_own, 2)] == [1, 3]
    kafka.close()


async def test_a_publisher_whose_lease_ran_out_settles_nothing(
    db: AsyncExecutor, dsn: str, topic_of_its_own: str
) -> None:
    put_events(dsn, topic_of_its_own, lanes=1, each=1)
    (stale,) = await db.run(events.claim("p1", 10, 5.0))
    assert await db.run(events.claim("p2", 10, 5.0)) == []
    with connect(dsn) as connection:
        connection.execute("UPDATE ingest.outbox_lane SET locked_at = locked_at - interval '6 seconds'")
    assert await db.run(events.settle("p1", [Published(stale)], 3)) == [], "over"
    (fresh,) = await db.run(events.claim("p2", 10, 5.0))
    assert fresh.lease_token > stale.lease_token
    assert await db.run(events.settle("p1", [Published(stale)], 3)) == [], "somebody else's"
    assert await db.run(events.settle("p2", [Published(stale)], 3)) == [], "another token"
    (settled,) = await db.run(events.settle("p2", [Published(fresh)], 3))
    assert settled.status == "SENT"
    assert await db.run(events.settle("p2", [Published(fresh)], 3)) == [], "once"


async def test_a_long_lane_is_published_in_runs(
    db: AsyncExecutor, dsn: str, publisher: EventPublisher, topic_of_its_own: str
) -> None:
    put_events(dsn, topic_of_its_own, lanes=1, each=120)
    assert await publisher.run_once() == 50
    put_events(dsn, f"{topic_of_its_own}_b", lanes=1, each=120)
    claimed = await db.run(events.claim("p2", 50, 5.0))
    assert len(claimed) == 50
    assert len({event.lane_id for event in claimed}) == 2, "both get their share"


async def test_the_metrics(
    db: AsyncExecutor, dsn: str, publisher: EventPublisher, topic_of_its_own: str
) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    put_events(dsn, topic_of_its_own, lanes=2, each=1)
    await publisher.measure()
    assert KAFKA_BACKLOG._value.get() == 2
    before = value("outbox_publish_total", result="success")
    count = value("outbox_publish_seconds_count", result="success")
    delays = value("outbox_publish_delay_seconds_count")
    await drained(publisher)
    await publisher.measure()
    assert KAFKA_BACKLOG._value.get() == 0
    assert value("outbox_publish_total", result="success") == before + 2
    assert value("outbox_publish_seconds_count", result="success") == count + 2
    assert value("outbox_publish_delay_seconds_count") == delays + 2


async def test_an_event_of_its_own_transaction(db: AsyncExecutor, dsn: str) -> None:
    """Ids are drawn by whoever emits, so that the task can name its event."""
    (task,) = await make_tasks(db, 1)
    mine: UUID = uuid4()
    with connect(dsn) as connection:
        (row,) = connection.execute(
            "SELECT ingest.emit(id, document_id, %s) AS event FROM ingest.ingest_task WHERE id = %s",
            [mine, task],
        ).fetchall()
    assert row["event"] == mine
