"""Kafka's client: the one module that imports it.

`Publisher` and `Subscriber` block; their callers run them in a thread. librdkafka
keeps connections, retries and order by itself: an idempotent producer writes each
message once per session and in the order given, or says that it did not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from engram.ingest.events import Event
from engram.kernel.content import storable
from engram.kernel.errors import KafkaUnavailable
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

# How long librdkafka may gather messages into one request.
LINGER_MS = 2
POLL_SECONDS = 0.05
CLIENT_LOG_LEVEL = 3  # errors only: a broker that is away would fill the log


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a message, and how long the broker's word took; `error` None: it has it."""

    error: str | None
    seconds: float


class KafkaPublisher:
    """`message_seconds`: after so long without the broker's word a message has failed."""

    def __init__(self, servers: str, *, message_seconds: float) -> None:
        self._config = {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": LINGER_MS,
            "message.timeout.ms": max(1, int(message_seconds * 1000)),
            "log_level": CLIENT_LOG_LEVEL,
        }
        self._message_seconds = message_seconds
        self._producer: confluent_kafka.Producer | None = None

    def publish(self, lanes: Sequence[Sequence[Event]], until: float) -> dict[UUID, Fate]:
        """Send each lane's events one after the other; event -> its fate, if it was sent at all.

        An event follows when its predecessor has arrived. Behind one that failed, and once
        `until` (of the monotonic clock) has passed, nothing more of a lane is sent.
        """
        run = _Run(self._open(), until)
        for lane in lanes:
            run.send(iter(lane))
        give_up = until + self._message_seconds + 1
        while run.under_way and time.monotonic() < give_up:
            run.producer.poll(POLL_SECONDS)
        if run.fatal or run.under_way:
            log.warning("kafka.producer_renewed", extra=fields(why=run.fatal or "it lost messages"))
            self.close()
        for event_id in list(run.under_way):
            run.end(event_id, "the broker did not answer in time")
        return run.fates

    def close(self) -> None:
        """What was not sent is dropped: it is still in the database."""
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(1)
            self._producer = None

    def _open(self) -> confluent_kafka.Producer:
        if self._producer is None:
            self._producer = confluent_kafka.Producer(self._config)
        return self._producer


class _Run:
    """One call of `publish`."""

    def __init__(self, producer: confluent_kafka.Producer, until: float) -> None:
        self.producer = producer
        self.fates: dict[UUID, Fate] = {}
        self.under_way: dict[UUID, float] = {}
        self.fatal: str | None = None
        self._until = until

    def send(self, lane: Iterator[Event]) -> None:
        event = next(lane, None)
        if event is None or (self.fates and time.monotonic() >= self._until):
            return
        self.under_way[event.id] = time.monotonic()
        try:
            self._produce(event, partial(self._delivered, event, lane))
        except (KafkaException, BufferError) as error:
            self._failed(event, error.args[0] if error.args else error)

    def end(self, event_id: UUID, error: str | None) -> None:
        began = self.under_way.pop(event_id)
        self.fates[event_id] = Fate(error, time.monotonic() - began)

    def _produce(self, event: Event, on_delivery: Any) -> None:
        message = {
            "topic": event.topic,
            "key": event.key.encode(),
            "value": event.payload.encode(),
            "headers": [("id", str(event.id).encode()), ("eventType", event.type.encode())],
            "on_delivery": on_delivery,
        }
        try:
            self.producer.produce(**message)
        except BufferError:
            self.producer.poll(POLL_SECONDS)
            self.producer.produce(**message)

    def _delivered(self, event: Event, lane: Iterator[Event], error: KafkaError | None, _: Any) -> None:
        if event.id not in self.under_way:
            return  # it was given up before its answer came
        if error is not None:
            self._failed(event, error)
            return
        self.end(event.id, None)
        self.send(lane)

    def _failed(self, event: Event, error: Any) -> None:
        self.end(event.id, _told(error))
        if isinstance(error, KafkaError) and error.fatal():
            self.fatal = _told(error)


@dataclass(frozen=True, slots=True)
class Message:
    """`id` is the event's, if it has one."""

    id: str
    place: tuple[str, int, int]
    value: bytes


class KafkaSubscriber:
    """A member of a consumer group. Places are committed when they are settled, in order."""

    def __init__(self, servers: str, topics: Sequence[str], group: str) -> None:
        self._topics = list(topics)
        self._config = {
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "allow.auto.create.topics": True,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": 10_000,
            # A worker that is full asks for nothing; that it lives, its heartbeats say.
            "max.poll.interval.ms": 3_600_000,
            "heartbeat.interval.ms": 2_000,
            "topic.metadata.refresh.interval.ms": 5_000,
            "log_level": CLIENT_LOG_LEVEL,
        }
        self._consumer: confluent_kafka.Consumer | None = None
        self._failed: KafkaUnavailable | None = None
        self._read: dict[tuple[str, int], _Partition] = {}

    def take(self, count: int, wait_seconds: float) -> list[Message]:
        """Up to `count` messages; raises `KafkaUnavailable`, but only once those that came are taken."""
        found: list[Message] = []
        try:
            for message in () if self._failed else self._open().consume(count, wait_seconds):
                if not (error := message.error()):
                    found.append(self._noted(message))
                elif not _passes(error):
                    self._failed = KafkaUnavailable(_told(error), hint="check KAFKA_BOOTSTRAP_SERVERS")
        except KafkaException as error:
            raise KafkaUnavailable(_told(error.args[0])) from error
        if self._failed and not found:
            failed, self._failed = self._failed, None
            raise failed
        return found

    def settle(self, places: Sequence[tuple[str, int, int]]) -> None:
        """Commit what no earlier message is waited for any more."""
        moved = []
        for topic, partition, offset in places:
            if known := self._read.get((topic, partition)):
                known.done.add(offset)
        for (topic, partition), known in self._read.items():
            if known.advance():
                moved.append(TopicPartition(topic, partition, known.committed))
        if moved:
            try:
                self._open().commit(offsets=moved, asynchronous=False)
            except KafkaException as error:
                # Not committed is delivered again, and turned away by its row.
                log.debug("kafka.not_committed", extra=fields(error=_told(error.args[0])))

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _open(self) -> confluent_kafka.Consumer:
        if self._consumer is None:
            self._consumer = confluent_kafka.Consumer(self._config)
            self._consumer.subscribe(self._topics, on_revoke=self._revoked, on_lost=self._revoked)
        return self._consumer

    def _noted(self, message: Any) -> Message:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        self._read.setdefault((topic, partition), _Partition(offset)).waiting.append(offset)
        headers = dict(message.headers() or [])
        given = headers.get("id") or f"{topic}/{partition}/{offset}".encode()
        return Message(
            storable(given.decode("utf-8", "replace")), (topic, partition, offset), message.value() or b""
        )

    def _revoked(self, _: Any, partitions: Sequence[TopicPartition]) -> None:
        """They are somebody else's; what was read of them is delivered to it again."""
        for each in partitions:
            self._read.pop((each.topic, each.partition), None)


class _Partition:
    """Which of the messages read are settled; `committed` is where the next reader begins."""

    def __init__(self, first: int) -> None:
        self.committed = first
        self.waiting: list[int] = []
        self.done: set[int] = set()

    def advance(self) -> bool:
        before = self.committed
        while self.waiting and self.waiting[0] in self.done:
            offset = self.waiting.pop(0)
            self.done.discard(offset)
            self.committed = offset + 1
        return self.committed != before


def _passes(error: KafkaError) -> bool:
    """What librdkafka mends by itself: a topic that is not there yet, a broker that is away."""
    return error.code() in (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._PARTITION_EOF,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._MAX_POLL_EXCEEDED,
    )


def _told(error: Any) -> str:
    return error.str() if isinstance(error, KafkaError) else str(error)
