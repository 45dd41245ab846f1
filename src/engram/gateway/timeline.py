"""What happened to a write, told from its audits, its outbox rows and its memory record. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from engram.kernel.logs import redact
from engram.logbook.trace import Audit, Story

EXCERPT_CHARS = 120


@dataclass(frozen=True, slots=True)
class Event:
    """`source` is the id to ask about next. The same `times` over: `at` is the first, `last_at` the last."""

    at: datetime
    source: str
    said: str
    times: int = 1
    last_at: datetime | None = None


def timeline(story: Story) -> list[Event]:
    """In the order it happened; what repeats itself is told once, with how often."""
    told: list[Event] = []
    for event in sorted(_events(story), key=lambda event: event.at):
        if told and told[-1].said == event.said:
            told[-1] = replace(told[-1], times=told[-1].times + 1, last_at=event.at)
        else:
            told.append(event)
    return told


def decision(audit: Audit) -> str:
    """One audit in words."""
    about = _OF_REASON.get(audit.reason or "") or _OF_ACTION.get(audit.action, audit.action)
    words = about.format(
        row=f"outbox:{audit.outbox_id}",
        memory=audit.memory_id or "a memory whose id it did not say",
        requested=audit.requested_space,
        target=audit.target_space,
        worker=extra(audit, "worker_id"),
        holder=extra(audit, "locked_by"),
        because=extra(audit, "asked_because"),
    )
    detail = "" if audit.reason in (None, *_OF_REASON) else f" ({audit.reason})"
    asked = audit.actor_user_id and not (audit.reason or "").startswith(("outbox_flush", "outbox_stale"))
    return excerpt(
        f"{words}{detail}{f', asked by {audit.actor_user_id}' if asked else ''}", EXCERPT_CHARS * 2
    )


def extra(audit: Audit, name: str) -> str:
    """What an audit says beside; a script may have written anything there."""
    values: Any = audit.extra
    return str(values.get(name) or "-") if isinstance(values, dict) else "-"


def excerpt(text: str | None, chars: int = EXCERPT_CHARS) -> str:
    """One short line that can be shown: without what a terminal would obey, and without secrets.

    >>> excerpt("a\\n\\tb\\x1b[31mc", 6)
    'a b [3…'
    """
    seen = redact((text or "")[: chars * 4])
    line = " ".join("".join(c if c.isprintable() else " " for c in seen).split())
    return line if len(line) <= chars else line[:chars] + "…"


def _events(story: Story) -> Iterator[Event]:
    for audit in story.audits:
        yield Event(audit.finalized_at or audit.created_at, f"audit:{audit.audit_id}", decision(audit))
    parked = {audit.outbox_id for audit in story.audits if audit.action == "redirect"}
    for row in story.rows:
        source = f"outbox:{row.outbox_id}"
        if str(row.outbox_id) not in parked:
            yield Event(row.created_at, source, "put in the outbox, without the audit that a gateway writes")
        if row.locked_at is not None:
            yield Event(row.locked_at, source, f"leased by {excerpt(row.locked_by)}")


_OF_ACTION = {
    "pending": "begun; the outcome is not known yet",
    "allow": "stored as {memory}",
    "redirect": "parked as {row}",
    "reject": "refused",
    "error": "an attempt failed",
    "dedup": "the same content was there already, as {row}",
    "retry": "a delivery failed, to be tried again",
    "conflict": "a worker came to settle what it did not hold any more",
    "stale": "a lock that nobody let go of was cleared",
}
_OF_REASON = {
    "already_stored": "asked again: stored already, as {memory}",
    "already_parked": "asked again: waits already, as {row}",
    "memory_forget": "forgotten (because: {because})",
    "outbox_enqueued": "put in the outbox by a script, as {row}",
    "outbox_requeued": "tried anew, as {row}",
    "outbox_flush_success": "delivered as {memory}",
    "outbox_flush_dedup_hit": "was on the memory server already, as {memory}",
    "outbox_flush_dead": "given up by a worker",
    "outbox_flush_retry": "a delivery failed, to be tried again",
    "outbox_flush_db_timeout": "the database took too long over it, to be tried again",
    "outbox_flush_db_error": "the database refused its settling, to be tried again",
    "outbox_flush_conflict": "{worker} came to settle what it did not hold any more; then held by {holder}",
    "outbox_stale": "the lock of {holder} was cleared: it had been gone for a second lease",
}
