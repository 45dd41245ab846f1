"""Ends what is past its time, finishes or fails what was left half-made, removes what nobody knows.

Any number of gateways may run it at once: each change is a guarded update, and
to remove a folder that is gone is no error. A folder is removed only when no
living row has its id; the row is always there before the folder.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.postgres.executors import AsyncExecutor
from engram.sandboxes import rows
from engram.sandboxes.driver import Driver
from engram.sandboxes.making import this_host

log = logging.getLogger(__name__)

# Longer than making one takes; whoever still makes it then finds it failed, and says so.
HALF_MADE_SECONDS = 60.0
# A folder on a host that does not look after it any more is not waited for.
ABANDONED_SECONDS = 600.0
# How long the rows of sandboxes that ended can still be listed.
KEPT_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Reaped:
    expired: int = 0
    finished: int = 0
    failed: int = 0
    removed: int = 0
    forgotten: int = 0

    @property
    def total(self) -> int:
        return self.expired + self.finished + self.failed + self.removed + self.forgotten


async def reap(db: AsyncExecutor, driver: Driver) -> Reaped:
    """One pass; what is too much for one is left to the next."""
    expired = await db.run(rows.expire())
    failpoint("reaper.after_expire")
    finished, failed = await _half_made(db, driver)
    removed = await _unknown(db, driver)
    forgotten = await db.run(rows.purge(KEPT_SECONDS))
    reaped = Reaped(len(expired), finished, failed, removed, len(forgotten))
    if reaped.total:
        log.info(
            "sandboxes.reaped",
            extra=fields(expired=reaped.expired, finished=finished, failed=failed, removed=removed),
        )
    return reaped


async def _half_made(db: AsyncExecutor, driver: Driver) -> tuple[int, int]:
    finished = failed = 0
    long_ago = {sandbox_id for sandbox_id, _ in await db.run(rows.half_made(ABANDONED_SECONDS))}
    for sandbox_id, host in await db.run(rows.half_made(HALF_MADE_SECONDS)):
        if host == this_host() and await driver.has(sandbox_id):
            finished += await db.run(rows.finish(sandbox_id))
        elif host == this_host() or sandbox_id in long_ago:
            failed += await db.run(rows.fail(sandbox_id, "left half-made"))
    return finished, failed


async def _unknown(db: AsyncExecutor, driver: Driver) -> int:
    """The folders are listed before the rows are read: a folder that is made in between is not seen."""
    here = await driver.known()
    if not here:
        return 0
    living: set[str] = await db.run(rows.alive(here))
    unknown = sorted(set(here) - living)
    for sandbox_id in unknown:
        await driver.destroy(sandbox_id)
    return len(unknown)
