"""What the database knows of one write: its outbox rows, its memory records, its audits.

`find` says what an id stands for, `story` fetches all that belongs to it, as of
one moment. They only read, and only what an index leads to. Of the payload no
more than an excerpt leaves the database.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, TypeVar

from engram.kernel.errors import InputError
from engram.logbook.config import Config
from engram.logbook.erasures import ERASE_LEASE_SECONDS
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, Row, one_row
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "trace.sql")

EXCERPT_CHARS = 80
MOST_AUDITS = 200
MAX_ID_CHARS = 512
MAX_BIGINT = (1 << 63) - 1

Kind = Literal["outbox", "memory", "memory_id", "audit", "correlation"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an id may mean, by kind; looked for in the order of the fields."""

    outbox_id: int | None = None
    memory_record_id: int | None = None
    memory_id: str | None = None
    audit_id: int | None = None
    correlation_id: str | None = None

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """
        >>> Wanted.parse("outbox:42").outbox_id, Wanted.parse("corr-12ab").correlation_id
        (42, 'corr-12ab')

        A bare number is an outbox row first; any other text may be the memory server's id or a
        correlation id. `corr:` says that it is the latter, whatever it looks like.
        """
        text = text.strip()
        if not 0 < len(text) <= MAX_ID_CHARS or not text.isprintable():
            raise _no_id(text)
        kind, colon, rest = text.partition(":")
        if colon and kind == "corr" and rest:
            return cls(correlation_id=rest)
        if colon and kind in ("outbox", "audit"):
            number = _number(rest)
            if number is None:
                raise _no_id(text)
            return cls(outbox_id=number) if kind == "outbox" else cls(audit_id=number)
        if colon and kind == "memory" and rest:
            number = _number(rest)
            return cls(memory_id=rest) if number is None else cls(memory_record_id=number)
        if text.startswith("corr-"):
            return cls(correlation_id=text)
        return cls(outbox_id=_number(text), memory_id=text, correlation_id=text)

    def places(self) -> list[str]:
        """Where it is looked for, for people."""
        asked = {
            "logbook.outbox_memory.outbox_id": self.outbox_id,
            "logbook.memories.memory_record_id": self.memory_record_id,
            "logbook.memories.memory_id": self.memory_id,
            "governance.write_audit.audit_id": self.audit_id,
            "governance.write_audit.correlation_id": self.correlation_id,
        }
        return [place for place, value in asked.items() if value is not None]


@dataclass(frozen=True, slots=True)
class Found:
    """Something with the id asked for. `id` is an audit's for a correlation, else the thing's own."""

    kind: Kind
    id: int
    target_space: str
    payload_sha: str | None
    correlation_id: str | None
    memory_id: str | None


@dataclass(frozen=True, slots=True)
class OutboxRow:
    outbox_id: int
    target_space: str
    excerpt: str
    status: str
    retry_count: int
    next_attempt_at: datetime
    locked_by: str | None
    locked_at: datetime | None
    lease_ends_at: datetime | None
    last_error: str | None
    memory_id: str | None
    ambiguous: bool
    requeued_from: int | None
    forgotten_at: datetime | None
    correlation_id: str | None
    actor_user_id: str | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """`park_due_at`: when reconcile parks an intent. `erase_ends_at`: end of an eraser's lease."""

    memory_record_id: int
    target_space: str
    payload_sha: str
    excerpt: str
    state: str
    memory_id: str | None
    audit_id: int | None
    outbox_id: int | None
    correlation_id: str | None
    actor_user_id: str | None
    intent_at: datetime | None
    intent_ends_at: datetime | None
    park_due_at: datetime | None
    forgotten_at: datetime | None
    erase_due_at: datetime | None
    erase_ends_at: datetime | None
    erase_tries: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Audit:
    """`outbox_id` is text: a script may have written anything there."""

    audit_id: int
    created_at: datetime
    finalized_at: datetime | None
    actor_user_id: str | None
    requested_space: str | None
    target_space: str
    action: str
    reason: str | None
    status: str
    memory_id: str | None
    correlation_id: str | None
    outbox_id: str | None
    extra: Any


@dataclass(frozen=True, slots=True)
class Story:
    """One content in one space, at the moment `now`; of its audits at most `MOST_AUDITS`."""

    now: datetime
    worker_seen_at: datetime | None
    rows: list[OutboxRow]
    memories: list[MemoryRecord]
    audits: list[Audit]
    audits_in_all: int


@primitive
def find(wanted: Wanted, limit: int = 20, config: Config | None = None) -> Query[list[Found]]:
    """Everything that has the id, kind by kind; of one request's writes the first `limit`."""
    params = {
        "outbox_id": wanted.outbox_id,
        "memory_record_id": wanted.memory_record_id,
        "memory_id": wanted.memory_id,
        "audit_id": wanted.audit_id,
        "correlation_id": wanted.correlation_id,
        "limit": limit,
    }
    return Query(SQL["find"], lambda found: [Found(**row) for row in found], params)


@primitive
def story(
    found: Found, *, heartbeats: str, parked_after: float, config: Config | None = None
) -> Query[Story]:
    """`heartbeats`: where workers say that they are alive. An intent is parked after so many deadlines."""
    params = {
        "outbox_id": found.id if found.kind == "outbox" else None,
        "memory_record_id": found.id if found.kind in ("memory", "memory_id") else None,
        "audit_id": found.id if found.kind in ("audit", "correlation") else None,
        "target_space": found.target_space,
        "payload_sha": found.payload_sha,
        "correlation_id": found.correlation_id,
        "memory_id": found.memory_id,
        "heartbeats": heartbeats,
        "times": parked_after,
        "erase_lease_seconds": ERASE_LEASE_SECONDS,
        "chars": EXCERPT_CHARS,
        "limit": MOST_AUDITS,
    }
    return Query(SQL["story"], _story, params)


def _story(found: list[Row]) -> Story:
    row = one_row(found)
    return Story(
        now=row["now"],
        worker_seen_at=row["worker_seen_at"],
        rows=[_made(OutboxRow, one) for one in row["rows"]],
        memories=[_made(MemoryRecord, one) for one in row["memories"]],
        audits=[_made(Audit, one) for one in row["audits"]],
        audits_in_all=row["audits_in_all"],
    )


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    """A fact from its JSON, which has times as text."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: _read(name, values[name]) for name in names})


def _read(name: str, value: Any) -> Any:
    return datetime.fromisoformat(value) if name.endswith("_at") and value is not None else value


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,19}", text) and 0 < int(text) <= MAX_BIGINT else None


def _no_id(text: str) -> InputError:
    shown = ascii(text[:40])
    return InputError(
        f"{shown} is no id",
        hint="give 42 or outbox:42, audit:7, memory:9, the memory server's id, or a correlation id",
        fields={"id": "must be an id"},
    )
