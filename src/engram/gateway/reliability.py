"""`reliability_report`: what became of the writes, counted in the database and nowhere else.

    total_writes = count(*) of governance.write_audit
    success_rate = count(allow) / count(*); null when there is no audit

All numbers come from one statement, so they are of one moment and every
breakdown adds up to `total_writes`. `since` limits the audits that are counted;
the outbox is shown as it stands, and the invariants are of everything there is.
It has counts and engram's own words, never contents, names or spaces.

A script calls `reliability_report("24h", config)`; the gateway runs the same query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from engram.kernel.durations import seconds_of
from engram.kernel.errors import InputError
from engram.logbook import governance
from engram.logbook.config import Config
from engram.logbook.lifecycle import ACTIONS, AUDIT
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, Row


@dataclass(frozen=True, slots=True)
class OutboxState:
    """Rows by what they are now; each is one of pending, sent, dead and forgotten. Ages in seconds."""

    pending: int
    due: int
    sent: int
    dead: int
    forgotten: int
    oldest_pending_seconds: float
    pending_age_p50_seconds: float
    pending_age_p95_seconds: float


@dataclass(frozen=True, slots=True)
class EvidenceCoverage:
    """Of the decisions about stores, how many name evidence; `coverage` null when there is none."""

    stores: int
    with_evidence: int
    coverage: float | None


@dataclass(frozen=True, slots=True)
class Invariant:
    """Two counts that must be equal."""

    name: str
    left: int
    right: int
    ok: bool


@dataclass(frozen=True, slots=True)
class ReliabilityReport:
    ok: bool
    total_writes: int
    success_rate: float | None
    by_action: dict[str, int]
    by_status: dict[str, int]
    by_reason: dict[str, int]
    outbox: OutboxState
    evidence: EvidenceCoverage
    invariants: list[Invariant]
    since: str | None
    message: str
    correlation_id: str = field(default="")


@primitive
def reliability_report(since: str | None = None, config: Config | None = None) -> Query[ReliabilityReport]:
    """The report of everything, or since a time: ISO 8601, or a span such as `24h` or `7d`."""
    moment, seconds = _parsed(since)
    counted = governance.report.query(moment, seconds)
    return Query(counted.statement, lambda found: _report(counted.read(found)), counted.params)


def _parsed(since: str | None) -> tuple[datetime | None, float | None]:
    """A span ends at the database's now, so it stays a span; a time without a zone is UTC."""
    if since is None:
        return None, None
    try:
        return None, float(seconds_of(since))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(since.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC), None
    except (ValueError, OverflowError):
        raise InputError(
            "since is no time",
            hint="e.g. 2026-01-30, 2026-01-30T10:00:00Z, 24h or 7d",
            fields={"since": "must be an ISO 8601 time, or a number and s, m, h, d or w"},
        ) from None


def _report(row: Row) -> ReliabilityReport:
    total, by_action = row["total_writes"], row["by_action"] or {}
    invariants = [Invariant(**found) for found in row["invariants"]]
    since = row["since"]
    return ReliabilityReport(
        ok=True,
        total_writes=total,
        success_rate=_share(by_action.get("allow", 0), total),
        by_action=dict.fromkeys(ACTIONS, 0) | by_action,
        by_status=dict.fromkeys(AUDIT.states, 0) | (row["by_status"] or {}),
        by_reason=dict(row["by_reason"] or []),
        outbox=_outbox(row["outbox"]),
        evidence=_evidence(row["stores"]),
        invariants=invariants,
        since=since.isoformat() if since else None,
        message=_said(total, invariants),
    )


def _outbox(counts: dict[str, Any]) -> OutboxState:
    p50, p95, oldest = counts.pop("ages") or (0.0, 0.0, 0.0)
    return OutboxState(
        **counts, oldest_pending_seconds=oldest, pending_age_p50_seconds=p50, pending_age_p95_seconds=p95
    )


def _evidence(counts: dict[str, int]) -> EvidenceCoverage:
    stores, evidenced = counts["decided"], counts["evidenced"]
    return EvidenceCoverage(stores, evidenced, _share(evidenced, stores))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _said(total: int, invariants: list[Invariant]) -> str:
    broken = [i.name for i in invariants if not i.ok]
    if broken:
        return f"{total} writes; VIOLATED: {', '.join(broken)}; run `engram reconcile`"
    return f"{total} writes; all {len(invariants)} invariants hold"
