"""Delivers what was parked: claim, deliver, settle.

`run_once` leases a batch, delivers its rows concurrently, and settles them in
bulk, each with its audit in the same statement. A failure that says nothing
about a row (no connection, a refused key, an overloaded server) hands the row
back without counting a try, and while the memory server is down nothing is
claimed at all, so no outage uses up a row's retries.

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
from engram.kernel.errors import BackendError
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.metrics import OUTBOX_SETTLED
from engram.kernel.settings import Settings
from engram.logbook import memories, outbox
from engram.logbook.outbox import Dead, Failed, Released, Sent
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Query, Row

log = logging.getLogger(__name__)


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
        outbox_id, token = row["outbox_id"], row["lease_token"]
        if there := await self._already_there(row):
            return Sent(outbox_id, token, there, "outbox_flush_dedup_hit")
        if not await self._db.run(outbox.renew_lease.query(outbox_id, self.worker_id, lease_token=token)):
            return LeaseLost(outbox_id, token)
        try:
            memory_id, found = await self._client.store(
                await self._memory_of(row), find_first=row["ambiguous"], seconds=self._call_seconds
            )
        except BackendError as error:
            return self._failure(row, error)
        return Sent(
            outbox_id, token, memory_id, "outbox_flush_dedup_hit" if found else "outbox_flush_success"
        )

    async def _already_there(self, row: Row) -> str | None:
        """Another write brought the same content there in the meantime."""
        known = await self._db.run(memories.by_content.query(row["target_space"], row["payload_sha"]))
        return known["memory_id"] if known and known["state"] == "stored" else None

    async def _memory_of(self, row: Row) -> Memory:
        records = await self._db.run(memories.records_of.query([row["outbox_id"]]))
        record = records.get(row["outbox_id"])
        return Memory(
            content=row["payload_md"],
            space=row["target_space"],
            payload_sha=row["payload_sha"],
            idempotency_key=idempotency_key(record) if record else f"engram-outbox-{row['outbox_id']}",
            metadata=metadata_of(row["kind"], row["actor_user_id"], row["correlation_id"], row["meta_json"]),
        )

    def _failure(self, row: Row, error: BackendError) -> Outcome:
        outbox_id, token = row["outbox_id"], row["lease_token"]
        tries = row["retry_count"] + 1
        if error.outage:
            self._healthy = False
            return Released(outbox_id, token, error.message, error.retry_after or 0.0, error.ambiguous)
        if not error.retryable or tries >= self._settings.outbox_max_retries:
            return Dead(outbox_id, token, error.message)
        return Failed(outbox_id, token, error.message, delay=self._backoff(tries), ambiguous=error.ambiguous)

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
        lost = await self._db.run(outbox.record_conflicts.query(refused)) if refused else set()
        failpoint("outbox_worker.after_settle")
        return _counted(outcomes, settled, lost)

    async def _settled(self, query: Query[set[int]]) -> set[int]:
        return await self._db.run(query)

    def _settling(self, outcomes: Sequence[Outcome]) -> Iterator[Query[set[int]]]:
        if sent := _only(Sent, outcomes):
            yield outbox.ack_many.query(self.worker_id, sent)
        if failed := _only(Failed, outcomes):
            yield outbox.fail_many.query(self.worker_id, failed)
        if dead := _only(Dead, outcomes):
            yield outbox.dead_many.query(self.worker_id, dead)
        if released := _only(Released, outcomes):
            yield outbox.release_many.query(self.worker_id, released)


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
