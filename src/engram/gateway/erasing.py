"""Deletes the memory server's copies of what was forgotten.

A copy is deleted only by the holder of its erasing lease, and only if no other
memory has it. A server that is down, or refuses, leaves the copy due for later;
the memory itself has been unreadable since it was forgotten.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engram.gateway.openmemory_client import Memory, OpenMemoryClient
from engram.kernel.backoff import exponential_with_jitter
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import BackendError, ConstraintViolated
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.logbook import erasures
from engram.logbook.erasures import ERASE_LEASE_SECONDS, Erasure
from engram.postgres.executors import AsyncExecutor

log = logging.getLogger(__name__)

BATCH = 50
AGAIN_SECONDS, AGAIN_AT_MOST_SECONDS = 5, 3600


@dataclass(slots=True)
class Eraser:
    db: AsyncExecutor
    client: OpenMemoryClient

    async def run_once(self, limit: int = BATCH) -> int:
        """Erase what is due; answers how many copies are gone. Stops at the first sign of an outage."""
        gone = 0
        for record in await self.db.run(erasures.due.query(limit)):
            if not await self.erase(record):
                if self.client.breaker.is_open:
                    break
                continue
            gone += 1
        return gone

    async def erase(self, memory_record_id: int) -> bool:
        """Whether the copy is gone now. False: later, or somebody else is at it."""
        try:
            leased = await self.db.run(erasures.claim.query(memory_record_id))
        except ConstraintViolated:
            return False  # the same content began to be written this moment
        if leased is None:
            return False
        failpoint("erasing.after_lease")
        try:
            await self._delete(leased)
        except BackendError as error:
            # One that may still be carried out keeps its lease: until that is over nobody may
            # write the same content, or the server could delete the new copy.
            if not error.ambiguous:
                await self._postpone(leased, error)
            return False
        failpoint("erasing.after_delete")
        return await self.db.run(erasures.finish.query(memory_record_id, leased.erase_token))

    async def _delete(self, leased: Erasure) -> None:
        """All of it within half the lease, whatever the server takes for each."""
        until = SYSTEM_CLOCK.monotonic() + ERASE_LEASE_SECONDS / 2
        seconds = ERASE_LEASE_SECONDS / 4
        known = [leased.memory_id] if leased.memory_id else await self._sought(leased, seconds)
        used = await self.db.run(erasures.still_used.query(known))
        for memory_id in known:
            if memory_id not in used:
                left = until - SYSTEM_CLOCK.monotonic()
                await self.client.delete(memory_id, seconds=max(0.001, min(seconds, left)))

    async def _sought(self, leased: Erasure, seconds: float) -> list[str]:
        """A delivery of it may have arrived without our learning its id."""
        memory = Memory(
            content=leased.payload_md,
            space=leased.target_space,
            payload_sha=leased.payload_sha,
            idempotency_key="",
        )
        return await self.client.copies(memory, seconds=seconds)

    async def _postpone(self, leased: Erasure, error: BackendError) -> None:
        delay = exponential_with_jitter(leased.erase_tries, AGAIN_SECONDS, AGAIN_AT_MOST_SECONDS, 0.3)
        log.warning(
            "erasing.postponed",
            extra=fields(memory_record_id=leased.memory_record_id, reason=error.reason, seconds=delay),
        )
        await self.db.run(erasures.postpone.query(leased.memory_record_id, leased.erase_token, delay))
