"""Finishes what a process that died could not, and never touches what was decided.

abandoned write     parked, once twice its own deadline has passed; the worker then
                    looks for it on the memory server before sending it again
missing audit       written, for rows that were settled or enqueued without one
stale lock          cleared by its token after a second lease length, and audited
forgotten copy      deleted from the memory server
redirect, no row    reported: nothing can bring the row back

python -m engram.gateway.reconcile_outbox --once | --report
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engram.gateway.erasing import Eraser
from engram.gateway.outbox_worker import HEARTBEAT_KEPT_SECONDS, HEARTBEATS
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.logbook import erasures, governance, kv, repairs, writes
from engram.logbook.primitive import Primitive
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

log = logging.getLogger(__name__)

_Look = Primitive[..., list[tuple[int, datetime]]]
_Write = Primitive[..., set[int]]

DEADLINES_BEFORE_PARKING = 2.0
BATCH = 100
WHOLE = 1_000_000


@dataclass(slots=True)
class Findings:
    """What a pass found; with `repair`, what it mended. Of the last two nothing can be."""

    abandoned_writes: int = 0
    missing_audits: int = 0
    missing_redirects: int = 0
    stale_locks: int = 0
    erased_copies: int = 0
    redirects_without_row: list[dict[str, Any]] = field(default_factory=list)
    invariants: list[dict[str, Any]] = field(default_factory=list)

    @property
    def repaired(self) -> int:
        return (
            self.abandoned_writes
            + self.missing_audits
            + self.missing_redirects
            + self.stale_locks
            + self.erased_copies
        )

    @property
    def violated(self) -> bool:
        return bool(self.redirects_without_row) or not all(row["ok"] for row in self.invariants)


class Reconciler:
    """`eraser` None: copies are only counted."""

    def __init__(self, db: AsyncExecutor, eraser: Eraser | None = None) -> None:
        self._db = db
        self._eraser = eraser
        self._after_id = 0

    async def run_once(self) -> int:
        """One bounded pass, for the background: answers how much was mended."""
        found = Findings()
        await self._finish_writes(found, BATCH, repair=True)
        await self._page(found, repair=True)
        await self._locks(found, repairs.LOOKED_AT, repair=True)
        await self._copies(found, BATCH, repair=True)
        return found.repaired

    async def beat(self, worker_id: str) -> None:
        """Say that a pass came to its end."""
        key = f"reconcile:{worker_id}"
        await self._db.run(kv.beat.query(HEARTBEATS, key, {}, HEARTBEAT_KEPT_SECONDS))

    async def run_whole(self, *, repair: bool) -> Findings:
        """Everything, however long it takes; `repair` False only looks."""
        found = Findings()
        await self._finish_writes(found, WHOLE, repair=repair)
        self._after_id = 0
        while await self._page(found, repair=repair):
            pass
        await self._locks(found, WHOLE, repair=repair)
        await self._copies(found, WHOLE, repair=repair)
        found.redirects_without_row = await self._db.run(repairs.redirects_without_row.query())
        found.invariants = await self._db.run(governance.invariants.query())
        return found

    async def _finish_writes(self, found: Findings, limit: int, *, repair: bool) -> None:
        overdue = await self._db.run(writes.overdue(times=DEADLINES_BEFORE_PARKING, limit=limit))
        if not repair:
            found.abandoned_writes = len(overdue)
            return
        for intent in overdue:
            parked = await self._db.run(writes.park_abandoned(intent["audit_id"]))
            if parked is not None:
                found.abandoned_writes += 1
                _told("abandoned_write", intent)
                failpoint("reconcile_outbox.after_park")

    async def _page(self, found: Findings, *, repair: bool) -> bool:
        """Look at the next page of the outbox; False: that was the end, and the next call begins anew."""
        after = self._after_id
        found.missing_audits += await self._mended(
            repairs.settled_without_audit, repairs.write_settled_audits, after, repair=repair
        )
        found.missing_redirects += await self._mended(
            repairs.parked_without_audit, repairs.write_redirect_audits, after, repair=repair
        )
        last = await self._db.run(repairs.last_of_page.query(after))
        self._after_id = last or 0
        return last is not None

    async def _mended(self, lacking: _Look, write: _Write, after_id: int, *, repair: bool) -> int:
        seen = await self._db.run(lacking.query(after_id))
        if not repair or not seen:
            return len(seen)
        written = await self._db.run(write.query(seen))
        failpoint("reconcile_outbox.after_repair")
        return len(written)

    async def _locks(self, found: Findings, limit: int, *, repair: bool) -> None:
        stale = await self._db.run(repairs.stale_locks.query(limit))
        found.stale_locks = len(stale)
        if repair and stale:
            leases = [(row["outbox_id"], row["lease_token"]) for row in stale]
            cleared = await self._db.run(repairs.clear_stale_locks.query(leases))
            found.stale_locks = len(cleared)
            for row in stale:
                _told("stale_lock", row)

    async def _copies(self, found: Findings, limit: int, *, repair: bool) -> None:
        if repair and self._eraser is not None:
            found.erased_copies = await self._eraser.run_once(limit)
        elif not repair:
            found.erased_copies = (await self._db.run(erasures.waiting.query()))["waiting"]


def _told(what: str, row: Row) -> None:
    log.warning("reconcile.%s", what, extra=fields(**row))


if __name__ == "__main__":
    from engram.cli.roles import run_reconcile_command

    run_reconcile_command()
