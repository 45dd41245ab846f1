"""Delivers what was parked: claim, deliver, settle.

`run_once` leases a batch, delivers its rows concurrently, and settles them in
bulk, each with its audit in the same statement. A failure that says nothing
about a row (no connection, a refused key, a server that fails its probe too)
hands the row back without counting a try, and while the memory server is down
nothing is claimed at all, so no outage uses up a row's retries. A server that
fails this row alone meant this row: that counts.

    python -m engram.gateway.outbox_worker --once | --loop
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from engram.gateway.memory_store import idempotency_key, metadata_of
from engram.gateway.openmemory_client import Memory, OpenMemoryClient
from engram.kernel.backoff import exponential_with_jitter
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import BackendError, DatabaseError
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.metrics import OUTBOX_SETTLED
from engram.kernel.settings import Settings
from engram.logbook import memories, outbox
from engram.logbook.outbox import Dead, Failed, Released, Sent
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Query, Row

log = logging.getLogger(__name__)

SETTLE_AGAIN_SECONDS = 0.2
# Refusals of us, not of a memory; and no connection at all. No probe is needed to tell.
_ABOUT_THE_SERVER = frozenset({"connection", "breaker_open", "unauthorized", "wrong_url", "rate_limited"})


def calculate_backoff_with_jitter(
    retry_count: int,
    base_seconds: int = 60,
    max_seconds: int = 3600,
    jitter_factor: float = 0.3,
) -> int:
    """Seconds to wait before retry `retry_count`: doubled, capped, then jittered."""
    return exponential_with_jitter(retry_count, base_seconds, max_seconds, jitter_factor)


def new_worker_id() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease could not be renewed, so the row was not touched."""

    outbox_id: int
    lease_token: int


Outcome = Sent | Failed | Dead | Released | LeaseLost
Kind = TypeVar("Kind", Sent, Failed, Dead, Released)


@dataclass(slots=True)
class Counts:
    """What one `run_once` did. `probed` False: the memory server is down, nothing was claimed."""

    probed: bool = True
    claimed: int = 0
    sent: int = 0
    retried: int = 0
    dead: int = 0
    handed_back: int = 0
    conflicts: int = 0


class OutboxWorker:
    def __init__(
        self,
        db: AsyncExecutor,
        client: OpenMemoryClient,
        settings: Settings,
        *,
        worker_id: str | None = None,
    ) -> None:
        self.worker_id = worker_id or new_worker_id()
        self._db = db
        self._client = client
        self._settings = settings
        self._healthy = False
        # A call ends well before the lease does, so that its row can be settled.
        self._call_seconds = min(settings.openmemory_timeout_seconds, settings.outbox_lease_seconds / 2)

    async def run_once(self) -> Counts:
        if not await self._reachable():
            return Counts(probed=False)
        rows = await self._db.run(
            outbox.claim_outbox.query(
                self.worker_id, self._settings.outbox_batch_size, self._settings.outbox_lease_seconds
            )
        )
        failpoint("outbox_worker.after_claim")
        if not rows:
            return Counts()
        outcomes = await asyncio.gather(*(self._deliver(row) for row in rows))
        failpoint("outbox_worker.after_call")
        return await self._settle(outcomes)

    async def _reachable(self) -> bool:
        """Probe before the first claim, and again after any sign of an outage."""
        if self._healthy and not self._client.breaker.is_open:
            return True
        try:
            await self._client.probe()
            self._healthy = True
        except BackendError as error:
            self._healthy = False
            log.warning("outbox.memory_server_down", extra=fields(reason=error.reason, error=error.message))
        return self._healthy

    async def _deliver(self, row: Row) -> Outcome:
        """What became of one row. A database that is away says nothing about it."""
        try:
            known = await self._db.run(memories.by_content.query(row["target_space"], row["payload_sha"]))
            return _settled_elsewhere(row, known) or await self._send(row, known)
        except DatabaseError as error:
            return Released(row["outbox_id"], row["lease_token"], error.message)

    async def _send(self, row: Row, known: Row | None) -> Outcome:
        outbox_id, token = row["outbox_id"], row["lease_token"]
        if not await self._db.run(outbox.renew_lease.query(outbox_id, self.worker_id, lease_token=token)):
            return LeaseLost(outbox_id, token)
        try:
            memory_id, found = await self._client.store(
                _memory_of(row, known), find_first=row["ambiguous"], seconds=self._call_seconds
            )
        except BackendError as error:
            return await self._failure(row, error)
        reason = "outbox_flush_dedup_hit" if found else "outbox_flush_success"
        return Sent(outbox_id, token, memory_id, reason)

    async def _failure(self, row: Row, error: BackendError) -> Outcome:
        outbox_id, token = row["outbox_id"], row["lease_token"]
        tries = row["retry_count"] + 1
        if await self._is_outage(error):
            # The server may still be applying it: a look that comes too soon finds nothing.
            delay = max(error.retry_after or 0.0, 2 * self._call_seconds if error.ambiguous else 0.0)
            return Released(outbox_id, token, error.message, delay, error.ambiguous)
        if not error.retryable or tries >= self._settings.outbox_max_retries:
            return Dead(outbox_id, token, error.message, error.ambiguous)
        return Failed(outbox_id, token, error.message, delay=self._backoff(tries), ambiguous=error.ambiguous)

    async def _is_outage(self, error: BackendError) -> bool:
        """No answer, or none about this memory. A server that is well otherwise meant this one."""
        if not error.outage:
            return False
        self._healthy = False
        if error.reason in _ABOUT_THE_SERVER:
            return True
        return not await self._reachable()

    def _backoff(self, tries: int) -> int:
        return calculate_backoff_with_jitter(
            tries,
            self._settings.outbox_base_backoff_seconds,
            self._settings.outbox_max_backoff_seconds,
            self._settings.outbox_jitter_factor,
        )

    async def _settle(self, outcomes: Sequence[Outcome]) -> Counts:
        settled: set[int] = set()
        for query in self._settling(outcomes):
            settled |= await self._settled(query)
        refused = [(o.outbox_id, int(o.lease_token or 0)) for o in outcomes if o.outbox_id not in settled]
        lost = await self._settled(outbox.record_conflicts.query(refused)) if refused else set()
        failpoint("outbox_worker.after_settle")
        return _counted(outcomes, settled, lost)

    async def _settled(self, query: Query[set[int]]) -> set[int]:
        """Insist while the leases live: what was delivered must not wait for them to run out."""
        give_up = SYSTEM_CLOCK.monotonic() + self._settings.outbox_lease_seconds / 2
        while True:
            try:
                return await self._db.run(query)
            except DatabaseError as error:
                if not error.retryable or SYSTEM_CLOCK.monotonic() > give_up:
                    raise
                log.warning("outbox.settle_failed", extra=fields(code=error.code, error=error.message))
                await asyncio.sleep(SETTLE_AGAIN_SECONDS)

    def _settling(self, outcomes: Sequence[Outcome]) -> Iterator[Query[set[int]]]:
        if sent := _only(Sent, outcomes):
            yield outbox.ack_many.query(self.worker_id, sent)
        if failed := _only(Failed, outcomes):
            yield outbox.fail_many.query(self.worker_id, failed)
        if dead := _only(Dead, outcomes):
            yield outbox.dead_many.query(self.worker_id, dead)
        if released := _only(Released, outcomes):
            yield outbox.release_many.query(self.worker_id, released)


def _settled_elsewhere(row: Row, known: Row | None) -> Outcome | None:
    """Another write brought the same content there, or is about to."""
    if known and known["state"] == "stored":
        return Sent(row["outbox_id"], row["lease_token"], known["memory_id"], "outbox_flush_dedup_hit")
    if known and known["state"] == "intent" and known["intent_left_seconds"] > 0:
        return Released(row["outbox_id"], row["lease_token"], delay=known["intent_left_seconds"])
    return None


def _memory_of(row: Row, known: Row | None) -> Memory:
    key = idempotency_key(known["delivery_key"]) if known else f"engram-outbox-{row['outbox_id']}"
    return Memory(
        content=row["payload_md"],
        space=row["target_space"],
        payload_sha=row["payload_sha"],
        idempotency_key=key,
        metadata=metadata_of(row["kind"], row["actor_user_id"], row["correlation_id"], row["meta_json"]),
    )


def _only(kind: type[Kind], outcomes: Iterable[Outcome]) -> list[Kind]:
    return [o for o in outcomes if isinstance(o, kind)]


def _counted(outcomes: Sequence[Outcome], settled: set[int], lost: set[int]) -> Counts:
    done = [o for o in outcomes if o.outbox_id in settled]
    counts = Counts(
        claimed=len(outcomes),
        sent=len(_only(Sent, done)),
        retried=len(_only(Failed, done)),
        dead=len(_only(Dead, done)),
        handed_back=len(_only(Released, done)),
        conflicts=len(lost),
    )
    for result in ("sent", "retried", "dead", "handed_back", "conflicts"):
        OUTBOX_SETTLED.labels(result).inc(getattr(counts, result))
    for dead in _only(Dead, done):
        log.error("outbox.dead", extra=fields(outbox_id=dead.outbox_id, error=dead.error))
    log.info("outbox.batch", extra=fields(**asdict(counts)))
    return counts


if __name__ == "__main__":
    from engram.cli.roles import run_worker_command

    run_worker_command()
