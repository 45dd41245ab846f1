"""Making a sandbox under an id that was chosen before: once, however often it is tried.

The row comes first, so that a folder without a living row is nobody's and may
be removed; then the folder; then the row says `ready`. A try that finds what an
earlier one made goes on from there.
"""

from __future__ import annotations

import socket
from math import ceil

from engram.kernel.content import storable
from engram.kernel.errors import LimitReached, SandboxUnavailable
from engram.kernel.failpoints import failpoint
from engram.kernel.metrics import SANDBOXES_MADE
from engram.postgres.executors import AsyncExecutor
from engram.sandboxes import rows
from engram.sandboxes.driver import Driver
from engram.sandboxes.rows import SandboxRow, Wanted

RETRY_AFTER_AT_MOST = 60


def this_host() -> str:
    return socket.gethostname()


async def make(
    db: AsyncExecutor, driver: Driver, sandbox_id: str, wanted: Wanted, *, at_most: int
) -> SandboxRow:
    """The sandbox as it is now: ready, unless its owner or its time has ended it meanwhile."""
    row = await prepare(db, driver, sandbox_id, wanted, at_most=at_most)
    if row.status != "creating":
        return row
    await db.run(rows.finish(sandbox_id))
    failpoint("making.after_ready")
    return await made(db, sandbox_id, wanted.owner)


async def prepare(
    db: AsyncExecutor, driver: Driver, sandbox_id: str, wanted: Wanted, *, at_most: int
) -> SandboxRow:
    """All but the last step: with `rows.finish` what is `creating` becomes ready."""
    row = await db.run(rows.begin(sandbox_id, wanted, host=this_host(), at_most=at_most))
    if row is None:
        SANDBOXES_MADE.labels("refused").inc()
        raise await _too_many(db, wanted.owner, at_most)
    failpoint("making.after_row")
    if row.status != "creating":
        return row
    try:
        await driver.create(sandbox_id)
    except SandboxUnavailable as error:
        SANDBOXES_MADE.labels("failed").inc()
        await db.run(rows.fail(sandbox_id, storable(error.message)))
        raise
    SANDBOXES_MADE.labels("made").inc()
    failpoint("making.after_folder")
    return row


async def made(db: AsyncExecutor, sandbox_id: str, owner: str) -> SandboxRow:
    """What has become of it; raises if others gave it up meanwhile."""
    row = await db.run(rows.find(sandbox_id, owner))
    if row is None or row.status == "failed":
        raise SandboxUnavailable("the sandbox took too long to make", hint="ask again with the same key")
    return row


async def _too_many(db: AsyncExecutor, owner: str, at_most: int) -> LimitReached:
    seconds: float = await db.run(rows.soonest_end(owner))
    return LimitReached(
        f"{owner} has {at_most} sandboxes already",
        hint="delete one, or wait until one expires",
        retry_after=max(1, min(ceil(seconds), RETRY_AFTER_AT_MOST)),
    )
