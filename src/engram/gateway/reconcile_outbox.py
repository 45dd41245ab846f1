"""Finishes what a gateway that died could not: its intents are parked, never guessed at.

An intent is left alone until twice its own deadline has passed; then the write
is parked as ambiguous, and the worker looks for it on the memory server before
sending it again.
"""

from __future__ import annotations

import logging

from engram.kernel.logs import fields
from engram.logbook import writes
from engram.postgres.executors import AsyncExecutor

log = logging.getLogger(__name__)

DEADLINES_BEFORE_PARKING = 2.0
BATCH = 100


class Reconciler:
    def __init__(self, db: AsyncExecutor) -> None:
        self._db = db

    async def run_once(self) -> int:
        """Park abandoned intents; answers how many."""
        abandoned = await self._db.run(writes.overdue(times=DEADLINES_BEFORE_PARKING, limit=BATCH))
        parked = 0
        for intent in abandoned:
            if await self._db.run(writes.park_abandoned(intent["audit_id"])):
                parked += 1
                log.warning("reconcile.parked_intent", extra=fields(**intent))
        return parked
