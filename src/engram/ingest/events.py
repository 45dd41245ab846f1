"""The rows of events that wait to be published to Kafka: `outbox_event` and its lanes.

    NEW -> SENT | RETRYING | DEAD        RETRYING -> SENT | RETRYING | DEAD

Events are leased by lane, which is one document's: a lane's events are published
in order and by one publisher at a time. The lease is fenced as the memory
outbox's is: a token from the same sequence, an end that is computed by the
database's clock, and a settle that writes nothing once either is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from engram.kernel.content import storable
from engram.postgres.arrays import numbers, texts
from engram.postgres.query import Query, Row, maybe_row, rows, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.ingest", "events.sql")

MAX_ERROR_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """A leased event. `payload` is JSON as it is sent; `lease_token` is its lane's."""

    id: UUID
    topic: str
    key: str
    type: str
    payload: str
    lane_id: int
    attempt_count: int
    lease_token: int


@dataclass(frozen=True, slots=True)
class Published:
    """What became of an event; `error` None: the broker has it."""

    event: Event
    error: str | None = None
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Settled:
    """`waited`: seconds from its making to its sending."""

    id: UUID
    status: str
    waited: float | None


def topic_of(aggregatetype: str) -> str:
    """As Debezium's outbox event router names it by default."""
    return f"outbox.event.{aggregatetype}"


def emit(task_ids: Sequence[UUID]) -> Query[dict[UUID, UUID]]:
    """An event for each task that has none waiting; task -> event."""
    return Query(SQL["emit"], _by_task, {"task_ids": list(task_ids)})


def claim(worker_id: str, batch: int, lease_seconds: float) -> Query[list[Event]]:
    """Lanes that are due, with about `batch` events: by lane, in the lane's order."""
    params = {"worker_id": worker_id, "batch": batch, "lease_seconds": lease_seconds}
    return Query(SQL["claim"], _events, params)


def settle(worker_id: str, published: Sequence[Published], max_attempts: int) -> Query[list[Settled]]:
    """What is missing from the answer was not this publisher's any more."""
    params = {
        "worker_id": worker_id,
        "max_attempts": max_attempts,
        "event_ids": texts(str(each.event.id) for each in published),
        "lane_ids": numbers(each.event.lane_id for each in published),
        "lease_tokens": numbers(each.event.lease_token for each in published),
        "errors": texts(each.error and storable(each.error)[:MAX_ERROR_CHARS] for each in published),
        "delays": [each.delay for each in published],
    }
    return Query(SQL["settle"], _settled, params)


def release(worker_id: str, events: Sequence[Event]) -> Query[list[Row]]:
    lanes = {event.lane_id: event.lease_token for event in events}
    params = {"worker_id": worker_id, "lane_ids": list(lanes), "lease_tokens": list(lanes.values())}
    return Query(SQL["release"], rows, params)


def backlog() -> Query[int]:
    return Query(SQL["backlog"], scalar, {})


def list_events(status: str | None, limit: int) -> Query[list[Row]]:
    return Query(SQL["list"], rows, {"status": status, "limit": limit})


def of_task(task_id: UUID, limit: int = 20) -> Query[list[Row]]:
    return Query(SQL["of_task"], rows, {"task_id": task_id, "limit": limit})


def story(wanted: UUID) -> Query[Row | None]:
    """What is known of a task, by its id, its document's or an event's."""
    return Query(SQL["story"], maybe_row, {"id": wanted})


def owed(limit: int, *, lost: bool = False, after: UUID | None = None) -> Query[list[UUID]]:
    return Query(SQL["owed"], _ids, {"limit": limit, "lost": lost, "after": after})


def _ids(found: list[Row]) -> list[UUID]:
    return [row["id"] for row in found]


def _by_task(found: list[Row]) -> dict[UUID, UUID]:
    return {row["task_id"]: row["id"] for row in found}


def _events(found: list[Row]) -> list[Event]:
    return [
        Event(
            id=row["id"],
            topic=topic_of(row["aggregatetype"]),
            key=row["aggregateid"],
            type=row["type"],
            payload=row["payload"],
            lane_id=row["lane_id"],
            attempt_count=row["attempt_count"],
            lease_token=row["lease_token"],
        )
        for row in found
    ]


def _settled(found: list[Row]) -> list[Settled]:
    return [Settled(row["id"], row["status"], row["waited"]) for row in found]
