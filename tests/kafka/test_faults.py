"""Publishers and the broker killed under load: nothing lost, order kept, duplicates counted."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from engram.embedded.kafka import Broker, NoBroker, jars
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from kafka.test_publisher import put_events, read_topic
from support.processes import environment, eventually, started

pytestmark = [pytest.mark.crash, pytest.mark.xdist_group("kafka")]

KIND = "under_fire"


def sent(dsn: str) -> int:
    with connect(dsn) as connection:
        (row,) = connection.execute(
            "SELECT count(*) AS sent FROM ingest.outbox_event WHERE status = 'SENT'"
        ).fetchall()
    return int(row["sent"])


@pytest.fixture
def own_broker(tmp_path: Path) -> Broker:
    try:
        jars()
    except NoBroker as why:
        pytest.skip(f"a broker that can be killed needs Java and Maven: {why}")
    return Broker(tmp_path / "kafka")


def test_every_event_arrives_in_order_whoever_is_killed(
    own_broker: Broker, settings: Settings, dsn: str, tmp_path: Path, scale: float
) -> None:
    keys, each = 50, max(4, int(10 * scale))
    total = keys * each
    served = replace(
        settings,
        kafka_bootstrap_servers=own_broker.servers,
        ingest_kafka_lease_seconds=4.0,
        ingest_kafka_base_backoff_ms=50,
        ingest_kafka_max_backoff_ms=500,
        ingest_kafka_max_attempts=100,
        ingest_kafka_publish_interval_ms=50,
    )
    put_events(dsn, KIND, keys, each)
    own_broker.start()
    failpoints = ["publisher.after_publish:2", "publisher.after_claim:3", None]
    try:
        with ExitStack() as held:
            publishers = [
                held.enter_context(
                    started(
                        "worker",
                        "publisher",
                        env=environment(served, **({"ENGRAM_FAILPOINT": name} if name else {})),
                        log=tmp_path / f"publisher{n}.log",
                    )
                )
                for n, name in enumerate(failpoints)
            ]
            eventually(lambda: sent(dsn) > total * 0.1, "the first events", 60)
            own_broker.kill()
            before = sent(dsn)
            own_broker.start()
            eventually(lambda: sent(dsn) == total, "all events", 90)
            dead = [p.poll() for p in publishers[:2]]
        assert before < total, "the broker was killed in the middle"
        assert -signal.SIGKILL in dead, "a failpoint was reached"
        found = read_topic(own_broker.servers, KIND, total, seconds=30)
    finally:
        own_broker.kill()
    by_key = defaultdict(list)
    for message in found:
        by_key[message["key"]].append(message["value"]["n"])
    assert len(by_key) == keys
    for numbers in by_key.values():
        assert list(dict.fromkeys(numbers)) == list(range(1, each + 1)), "in order, none missing"
    copies = Counter(message["headers"]["id"] for message in found)
    doubled = sum(count - 1 for count in copies.values())
    print(f"{total} events, {doubled} sent twice: by publishers that died before they had settled")
    assert len(copies) == total
    # Six producers at most had twenty events each in hand when the broker or they died.
    assert doubled <= (6 + 4) * 20


@pytest.mark.parametrize(
    ("name", "copies"),
    [("publisher.after_claim", 1), ("publisher.after_publish", 2), ("publisher.after_settle", 1)],
)
def test_a_publisher_killed_anywhere_is_followed_by_the_next(
    broker: str, settings: Settings, dsn: str, tmp_path: Path, topic_of_its_own: str, name: str, copies: int
) -> None:
    """Only what was sent and not settled is sent twice."""
    served = replace(settings, kafka_bootstrap_servers=broker, ingest_kafka_publish_interval_ms=50)
    put_events(dsn, topic_of_its_own, 1, 5)
    armed = environment(served, ENGRAM_FAILPOINT=name)
    with started("worker", "publisher", env=armed, log=tmp_path / "first.log") as first:
        assert first.wait(30) == -signal.SIGKILL
    with connect(dsn) as connection:  # its lease runs out
        connection.execute("UPDATE ingest.outbox_lane SET locked_at = locked_at - interval '1 hour'")
    with started("worker", "publisher", env=environment(served), log=tmp_path / "second.log"):
        eventually(lambda: sent(dsn) == 5, "all events", 30)
    found = read_topic(broker, topic_of_its_own, 5 * copies)
    assert [message["value"]["n"] for message in found] == list(range(1, 6)) * copies
