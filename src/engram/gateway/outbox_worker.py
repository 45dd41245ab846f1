"""Delivers what was parked: claim, renew, deliver, settle.

`run_once` leases a batch, renews it in one statement that also tells what is
known of each memory, delivers its rows concurrently, and settles them in bulk,
each with its audit in the same statement. A failure that says nothing about a
row (no connection, a refused key, a server that fails its probe too) hands the
row back without counting a try, and while the memory server is down nothing is
claimed at all, so no outage uses up a row's retries. A server that fails this
row alone meant this row: that counts.

Batches run in a few lanes that share the calls' slots: some settle and claim
while others call, so the memory server is never idle, and never has more than
a batch of calls. Asked to stop, a worker claims nothing more, gives the
calls in hand a moment, and hands back every lease it still has.

    python -m engram.gateway.outbox_worker --once | --loop
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import TypeVar

from engram.gateway.alerts import Alerts
from engram.gateway.memory_store import idempotency_key, metadata_of
from engram.gateway.openmemory_client import Memory, OpenMemoryClient
from engram.kernel.backoff import exponential_with_jitter
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import BackendError, DatabaseError, DatabaseTimeout
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.metrics import OUTBOX_DEAD, OUTBOX_OLDEST_SECONDS, OUTBOX_PENDING, OUTBOX_SETTLED
from engram.kernel.settings import Settings
from engram.logbook import kv, outbox
from engram.logbook.outbox import Dead, Failed, Released, Renewal, Sent, Settlement
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Query, Row

log = logging.getLogger(__name__)

# One that calls, one that settles, one that claims.
LANES = 3
SETTLE_AGAIN_SECONDS = 0.2
NOBODYS_SECONDS = 3600.0
# What calls in hand may still take once the worker is asked to stop.
GRACE_SECONDS = 2.0
HEARTBEATS = "worker.heartbeat"
HEARTBEAT_KEPT_SECONDS = 86_400.0
# Refusals of us, not of a memory; and no connection at all. No probe is needed to tell.
_ABOUT_THE_SERVER = frozenset({"connection", "breaker_open", "unauthorized", "wrong_url", "rate_limited"})
# Refusals that last until somebody mends them: the alert for each, and where to look.
_NEEDS_SOMEBODY = {
    "unauthorized": ("openmemory_unauthorized", "OPENMEMORY_API_KEY"),
    "wrong_url": ("openmemory_wrong_url", "OPENMEMORY_BASE_URL"),
}


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


@dataclass(frozen=True, slots=True)
class Held:
    """A renewed lease; a call under it must end by `until`, half the lease later."""

    renewal: Renewal
    until: float


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

    def add(self, more: Counts) -> None:
        self.probed = self.probed and more.probed
        for name, count in more.numbers().items():
            setattr(self, name, getattr(self, name) + count)

    def numbers(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _NUMBERS}


_NUMBERS = tuple(f.name for f in dataclass_fields(Counts) if f.name != "probed")


class OutboxWorker:
    """`stop`, once set, ends it: see `GRACE_SECONDS`."""

    def __init__(
        self,
        db: AsyncExecutor,
        client: OpenMemoryClient,
        settings: Settings,
        *,
        worker_id: str | None = None,
        alerts: Alerts | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.worker_id = worker_id or new_worker_id()
        self.done = Counts()
        self._db = db
        self._client = client
        self._settings = settings
        self._alerts = alerts or Alerts()
        self._stop = stop or asyncio.Event()
        self._slots = asyncio.Semaphore(settings.outbox_batch_size)
        self._healthy = False
        self._trouble: str | None = None
        self._probing: asyncio.Task[bool] | None = None
        self._paused_until = 0.0
        # A call ends well before the lease does, so that its row can be settled.
        self._half_lease = settings.outbox_lease_seconds / 2
        self._call_seconds = min(settings.openmemory_timeout_seconds, self._half_lease)
        # A probe may follow a call, and the row must still be settled after that.
        self._probe_seconds = min(self._call_seconds, self._half_lease / 2)

    async def drain(self) -> Counts:
        """Batches in every lane until nothing is due, or what is due only comes back."""
        total, over = Counts(), asyncio.Event()

        async def lane() -> None:
            try:
                while not over.is_set() and not self._stop.is_set():
                    counts = await self.run_once()
                    total.add(counts)
                    if counts.claimed == counts.handed_back:
                        return
            finally:
                over.set()

        for ended in await asyncio.gather(*(lane() for _ in range(LANES)), return_exceptions=True):
            if ended is not None:
                raise ended
        return total

    async def run_once(self) -> Counts:
        if self._stop.is_set() or not await self._reachable():
            return Counts(probed=False)
        rows = await self._db.run(
            outbox.claim_outbox.query(
                self.worker_id, self._settings.outbox_batch_size, self._settings.outbox_lease_seconds
            )
        )
        failpoint("outbox_worker.after_claim")
        if not rows:
            return Counts()
        held = await self._renewed(rows)
        failpoint("outbox_worker.after_renew")
        outcomes = await self._delivered(rows, held)
        failpoint("outbox_worker.after_call")
        return await self._settle(outcomes)

    async def beat(self) -> int:
        """Say that this worker is alive."""
        value = {"pid": os.getpid(), "host": socket.gethostname(), "counts": self.done.numbers()}
        key = f"outbox:{self.worker_id}"
        await self._db.run(kv.beat.query(HEARTBEATS, key, value, HEARTBEAT_KEPT_SECONDS))
        return 0

    async def measure(self) -> None:
        """Set the gauges of what waits."""
        found = await self._db.run(outbox.backlog.query())
        OUTBOX_PENDING.set(found["pending"])
        OUTBOX_OLDEST_SECONDS.set(found["oldest_pending_seconds"])

    async def _reachable(self) -> bool:
        """Probe before the first claim, and again after any sign of an outage; one probe for all who ask."""
        if SYSTEM_CLOCK.monotonic() < self._paused_until:
            return False
        if self._healthy and not self._client.breaker.is_open:
            return True
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        probing, stopped = self._probing, asyncio.create_task(self._stop.wait())
        await asyncio.wait((probing, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return probing.done() and probing.result()

    async def _probe(self) -> bool:
        self._healthy = False
        try:
            async with asyncio.timeout(self._probe_seconds):
                await self._client.probe()
            self._healthy = True
        except TimeoutError:
            said = "the memory server did not answer a probe in time"
            self._noticed(BackendError(said, reason="timeout", retryable=True, outage=True))
        except BackendError as error:
            self._noticed(error)
        return self._healthy

    def _noticed(self, error: BackendError) -> None:
        """Say once what is wrong with the server, and again only if that changes."""
        if error.reason in (self._trouble, "breaker_open"):
            return
        self._trouble = error.reason
        if error.reason in _NEEDS_SOMEBODY:
            kind, setting = _NEEDS_SOMEBODY[error.reason]
            said = (
                f"the memory server refuses engram ({error.message}): nothing is delivered; check {setting}"
            )
            self._alerts.raise_alert(kind, said, reason=error.reason, worker_id=self.worker_id)
        else:
            log.warning("outbox.memory_server_down", extra=fields(reason=error.reason, error=error.message))

    async def _renewed(self, rows: Sequence[Row]) -> dict[int, Held | DatabaseError]:
        """The leases that are still ours. A row that the database chokes on does not hold up the rest."""
        until = SYSTEM_CLOCK.monotonic() + self._half_lease
        leases = [(row["outbox_id"], row["lease_token"]) for row in rows]
        try:
            renewals = await self._db.run(outbox.renew_many.query(self.worker_id, leases))
            return {outbox_id: Held(renewal, until) for outbox_id, renewal in renewals.items()}
        except DatabaseError as error:
            if len(rows) == 1 or not _may_be_one_row(error):
                return {row["outbox_id"]: error for row in rows}
        alone = await asyncio.gather(*(self._renewed([row]) for row in rows))
        return {outbox_id: held for part in alone for outbox_id, held in part.items()}

    async def _delivered(self, rows: Sequence[Row], held: dict[int, Held | DatabaseError]) -> list[Outcome]:
        """What became of each row. Asked to stop, calls that outlast the grace are cut off."""
        calls = [asyncio.create_task(self._deliver(row, held.get(row["outbox_id"]))) for row in rows]
        guard = asyncio.create_task(self._cut_off(calls))
        try:
            await asyncio.wait(calls)
        finally:
            for task in (guard, *calls):
                task.cancel()
        return [call.result() for call in calls]

    async def _cut_off(self, calls: Iterable[asyncio.Task[Outcome]]) -> None:
        await self._stop.wait()
        await asyncio.sleep(GRACE_SECONDS)
        for call in calls:
            call.cancel()

    async def _deliver(self, row: Row, held: Held | DatabaseError | None) -> Outcome:
        try:
            async with self._slots:
                if isinstance(held, Held) and held.until - SYSTEM_CLOCK.monotonic() < self._call_seconds / 2:
                    # It waited so long for its slot that a call would not fit into the lease any more.
                    held = (await self._renewed([row])).get(row["outbox_id"])
                return await self._judged(row, held)
        except asyncio.CancelledError:
            return Released(row["outbox_id"], row["lease_token"])
        except Exception as error:
            # A defect of ours or of the server's, about this row: the others must not pay for it.
            log.exception("outbox.unexpected", extra=fields(outbox_id=row["outbox_id"]))
            return self._retried(row, f"unexpected: {type(error).__name__}", ambiguous=True)

    async def _judged(self, row: Row, held: Held | DatabaseError | None) -> Outcome:
        outbox_id, token = row["outbox_id"], row["lease_token"]
        if held is None:
            return LeaseLost(outbox_id, token)
        if isinstance(held, DatabaseError):
            return Released(outbox_id, token, held.message, reason=_reason_of(held))
        if held.renewal.forgotten or self._stop.is_set():
            return Released(outbox_id, token)
        if held.renewal.state is None:
            # Nothing that is not forgotten has this content: nobody wants it delivered.
            return Released(outbox_id, token, "there is no memory with this content", NOBODYS_SECONDS)
        return _settled_elsewhere(row, held.renewal) or await self._send(row, held)

    async def _send(self, row: Row, held: Held) -> Outcome:
        seconds = min(self._call_seconds, held.until - SYSTEM_CLOCK.monotonic())
        try:
            return await self._called(row, held.renewal, seconds)
        except asyncio.CancelledError:
            said = "the worker was stopped before the memory server answered"
            return Released(row["outbox_id"], row["lease_token"], said, self._look_later, ambiguous=True)

    async def _called(self, row: Row, renewal: Renewal, seconds: float) -> Outcome:
        try:
            memory_id, found = await self._client.store(
                _memory_of(row, renewal), find_first=row["ambiguous"], seconds=seconds
            )
        except BackendError as error:
            return await self._failure(row, error)
        self._trouble = None
        reason = "outbox_flush_dedup_hit" if found else "outbox_flush_success"
        return Sent(row["outbox_id"], row["lease_token"], memory_id, reason)

    @property
    def _look_later(self) -> float:
        """The server may still be applying a write: a look that comes too soon finds nothing."""
        return 2 * self._call_seconds

    async def _failure(self, row: Row, error: BackendError) -> Outcome:
        outbox_id, token = row["outbox_id"], row["lease_token"]
        if await self._is_outage(error):
            delay = max(error.retry_after or 0.0, self._look_later if error.ambiguous else 0.0)
            return Released(outbox_id, token, error.message, delay, error.ambiguous)
        if not error.retryable:
            return Dead(outbox_id, token, error.message, error.ambiguous, cause=error.reason)
        return self._retried(row, error.message, ambiguous=error.ambiguous)

    def _retried(self, row: Row, said: str, *, ambiguous: bool) -> Outcome:
        """Counts a try; the last one is the row's end."""
        outbox_id, token, tries = row["outbox_id"], row["lease_token"], row["retry_count"] + 1
        if tries >= self._settings.outbox_max_retries:
            return Dead(outbox_id, token, said, ambiguous)
        return Failed(outbox_id, token, said, delay=self._backoff(tries), ambiguous=ambiguous)

    async def _is_outage(self, error: BackendError) -> bool:
        """No answer, or none about this memory. A server that is well otherwise meant this one."""
        if not error.outage:
            return False
        self._healthy = False
        if error.retry_after:
            self._paused_until = max(self._paused_until, SYSTEM_CLOCK.monotonic() + error.retry_after)
        if error.reason in _ABOUT_THE_SERVER:
            self._noticed(error)
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
        applied: list[Settlement] = []
        for group in _by_kind(outcomes):
            applied += await self._applied(group)
        settled = {o.outbox_id for o in applied}
        refused = [(o.outbox_id, o.lease_token) for o in outcomes if o.outbox_id not in settled]
        lost = (
            await self._insisted(outbox.record_conflicts.query(self.worker_id, refused)) if refused else set()
        )
        failpoint("outbox_worker.after_settle")
        return self._counted(len(outcomes), applied, len(lost))

    async def _applied(self, group: Sequence[Settlement]) -> list[Settlement]:
        """Those of one kind that were settled. A row that the database chokes on does not hold up the rest."""
        several = len(group) > 1
        try:
            settled = await self._insisted(_settling(self.worker_id, group), through_timeouts=not several)
        except DatabaseError as error:
            if several and _may_be_one_row(error):
                parts = await asyncio.gather(*(self._applied([one]) for one in group))
                return [outcome for part in parts for outcome in part]
            if error.retryable:
                raise
            return await self._choked_on(group[0], error)
        return [outcome for outcome in group if outcome.outbox_id in settled]

    async def _choked_on(self, outcome: Settlement, error: DatabaseError) -> list[Settlement]:
        """The database will not have this settlement, ever: the row goes back, to be looked for later."""
        if isinstance(outcome, Released):
            raise error
        log.error("outbox.cannot_settle", extra=fields(outbox_id=outcome.outbox_id, error=error.message))
        delay, reason = self._backoff(1), _reason_of(error)
        back = Released(outcome.outbox_id, outcome.lease_token, error.message, delay, True, reason)
        return await self._applied([back])

    async def _insisted(self, query: Query[set[int]], *, through_timeouts: bool = True) -> set[int]:
        """Insist while the leases live: what was delivered must not wait for them to run out."""
        give_up = SYSTEM_CLOCK.monotonic() + self._half_lease
        while True:
            try:
                return await self._db.run(query)
            except DatabaseError as error:
                if isinstance(error, DatabaseTimeout) and not through_timeouts:
                    raise
                if not error.retryable or SYSTEM_CLOCK.monotonic() > give_up:
                    raise
                log.warning("outbox.settle_failed", extra=fields(code=error.code, error=error.message))
                await asyncio.sleep(SETTLE_AGAIN_SECONDS)

    def _counted(self, claimed: int, applied: Sequence[Settlement], conflicts: int) -> Counts:
        counts = Counts(
            claimed=claimed,
            sent=len(_only(Sent, applied)),
            retried=len(_only(Failed, applied)),
            dead=len(_only(Dead, applied)),
            handed_back=len(_only(Released, applied)),
            conflicts=conflicts,
        )
        self.done.add(counts)
        for result in ("sent", "retried", "dead", "handed_back", "conflicts"):
            OUTBOX_SETTLED.labels(result).inc(getattr(counts, result))
        for dead in _only(Dead, applied):
            self._bury(dead)
        log.info("outbox.batch", extra=fields(**counts.numbers()))
        return counts

    def _bury(self, dead: Dead) -> None:
        OUTBOX_DEAD.inc()
        self._alerts.raise_alert(
            "outbox_dead",
            f"outbox row {dead.outbox_id} is dead ({dead.cause}): its memory was not delivered",
            outbox_id=dead.outbox_id,
            reason=dead.cause,
            next=f"engram outbox show {dead.outbox_id}",
        )


def _settled_elsewhere(row: Row, known: Renewal) -> Outcome | None:
    """Another write brought the same content there, or is about to."""
    if known.state == "stored":
        return Sent(row["outbox_id"], row["lease_token"], known.memory_id, "outbox_flush_dedup_hit")
    if known.state == "intent" and known.intent_left_seconds > 0:
        return Released(row["outbox_id"], row["lease_token"], delay=known.intent_left_seconds)
    return None


def _memory_of(row: Row, known: Renewal) -> Memory:
    key = idempotency_key(known.delivery_key) if known.delivery_key else f"engram-outbox-{row['outbox_id']}"
    return Memory(
        content=row["payload_md"],
        space=row["target_space"],
        payload_sha=row["payload_sha"],
        idempotency_key=key,
        metadata=metadata_of(row["kind"], row["actor_user_id"], row["correlation_id"], row["meta_json"]),
    )


def _settling(worker_id: str, group: Sequence[Settlement]) -> Query[set[int]]:
    """The one statement for settlements of one kind."""
    match group[0]:
        case Sent():
            return outbox.ack_many.query(worker_id, _only(Sent, group))
        case Failed():
            return outbox.fail_many.query(worker_id, _only(Failed, group))
        case Dead():
            return outbox.dead_many.query(worker_id, _only(Dead, group))
        case Released():
            return outbox.release_many.query(worker_id, _only(Released, group))


def _may_be_one_row(error: DatabaseError) -> bool:
    """A lock or a rule that concerns one row of a statement stops all of it."""
    return isinstance(error, DatabaseTimeout) or not error.retryable


def _reason_of(error: DatabaseError) -> str:
    return "outbox_flush_db_timeout" if isinstance(error, DatabaseTimeout) else "outbox_flush_db_error"


def _by_kind(outcomes: Sequence[Outcome]) -> list[Sequence[Settlement]]:
    kinds: list[Sequence[Settlement]] = [
        _only(Sent, outcomes),
        _only(Failed, outcomes),
        _only(Dead, outcomes),
        _only(Released, outcomes),
    ]
    return [group for group in kinds if group]


def _only(kind: type[Kind], outcomes: Iterable[Outcome]) -> list[Kind]:
    return [o for o in outcomes if isinstance(o, kind)]


if __name__ == "__main__":
    from engram.cli.roles import run_worker_command

    run_worker_command()
