"""Finishes what a gateway that died could not: its intents are parked, never guessed at.

An intent is left alone until twice its own deadline has passed; then the write
is parked as ambiguous, and the worker looks for it on the memory server before
sending it again.

    python -m engram.gateway.reconcile_outbox --once | --report
"""

from __future__ import annotations

import logging

from engram.kernel.logs import fields
from engram.logbook import writes
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

log = logging.getLogger(__name__)

DEADLINES_BEFORE_PARKING = 2.0
BATCH = 100


class Reconciler:
    def __init__(self, db: AsyncExecutor) -> None:
        self._db = db

    async def abandoned(self) -> int:
        """How many intents nobody will finish; at most a batch is looked at."""
        return len(await self._overdue())

    async def run_once(self) -> int:
        """Park abandoned intents; answers how many."""
        parked = 0
        for intent in await self._overdue():
            if await self._db.run(writes.park_abandoned(intent["audit_id"])):
                parked += 1
                log.warning("reconcile.parked_intent", extra=fields(**intent))
        return parked

    async def _overdue(self) -> list[Row]:
        return await self._db.run(writes.overdue(times=DEADLINES_BEFORE_PARKING, limit=BATCH))


if __name__ == "__main__":
    from engram.cli.roles import run_reconcile_command

    run_reconcile_command()
