"""What reconcile may repair, and what it can only report.

Repaired: an audit that a settled row lacks, the redirect audit of a row that was
enqueued bare, a lock whose holder has been gone for a second lease length. The
outcome of a write is never touched: no row's status, content or space changes.
Reported: a redirect audit whose row is gone.

The outbox is looked at page by page, so that a pass costs the same however long
it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, Row, rows, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "repairs.sql")

Seen = Sequence[tuple[int, datetime]]
PAGE = 1000
LOOKED_AT = 10_000
# A script writes the row and then its audit: it is given the time for that.
GRACE_SECONDS = 60.0


@primitive
def last_of_page(after_id: int = 0, limit: int = PAGE, config: Config | None = None) -> Query[int | None]:
    """The last id of the page that begins after `after_id`; None: there is no such page."""
    return Query(SQL["last_of_page"], scalar, {"after_id": after_id, "limit": limit})


@primitive
def settled_without_audit(
    after_id: int = 0, limit: int = PAGE, config: Config | None = None
) -> Query[list[tuple[int, datetime]]]:
    """Sent and dead rows without the audit that says so, as they were seen."""
    params = {"after_id": after_id, "limit": limit, "grace_seconds": GRACE_SECONDS}
    return Query(SQL["settled_without_audit"], _seen, params)


@primitive
def write_settled_audits(seen: Seen, config: Config | None = None) -> Query[set[int]]:
    return Query(SQL["write_settled_audits"], _ids, _as_seen(seen))


@primitive
def parked_without_audit(
    after_id: int = 0, limit: int = PAGE, config: Config | None = None
) -> Query[list[tuple[int, datetime]]]:
    params = {"after_id": after_id, "limit": limit, "grace_seconds": GRACE_SECONDS}
    return Query(SQL["parked_without_audit"], _seen, params)


@primitive
def write_redirect_audits(seen: Seen, config: Config | None = None) -> Query[set[int]]:
    return Query(SQL["write_redirect_audits"], _ids, _as_seen(seen))


@primitive
def stale_locks(limit: int = LOOKED_AT, config: Config | None = None) -> Query[list[dict[str, Any]]]:
    """Due rows, among the first `limit`, whose holder let a second lease length pass."""
    return Query(SQL["stale_locks"], rows, {"limit": limit})


@primitive
def clear_stale_locks(leases: Sequence[tuple[int, int]], config: Config | None = None) -> Query[set[int]]:
    """By their tokens: a row that somebody has claimed again is left alone."""
    held = sorted(leases)
    params = {"outbox_ids": [i for i, _ in held], "lease_tokens": [token for _, token in held]}
    return Query(SQL["clear_stale_locks"], _ids, params)


@primitive
def redirects_without_row(limit: int = 100, config: Config | None = None) -> Query[list[dict[str, Any]]]:
    return Query(SQL["redirects_without_row"], rows, {"limit": limit})


def _as_seen(seen: Seen) -> dict[str, Any]:
    ordered = sorted(seen)
    return {"outbox_ids": [i for i, _ in ordered], "seen_at": [at for _, at in ordered]}


def _seen(found: list[Row]) -> list[tuple[int, datetime]]:
    return [(row["outbox_id"], row["updated_at"]) for row in found]


def _ids(found: list[Row]) -> set[int]:
    return {row["outbox_id"] for row in found}
