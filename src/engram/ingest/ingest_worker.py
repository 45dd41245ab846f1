"""Runs ingest tasks: take, start, work, settle, acknowledge.

The stream says that there is work; the row decides whether it runs. New tasks
come from the stream, retries from the rows themselves when their time has come.
A task is leased when it starts and the lease is renewed while it runs. An entry
is acknowledged and deleted only once its task is final, so whatever dies in
between leaves something behind from which another worker goes on.

Outcomes are settled together, as many as there are at the moment. Asked to
stop, a worker takes nothing more, gives what runs a moment, and hands the rest
back without counting an attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from engram.ingest import tasks
from engram.ingest.queue import Death, Done, Entry, Queue
from engram.ingest.seam import Pipeline, Work
from engram.ingest.tasks import Failed, Failure, Started
from engram.kernel.backoff import exponential_capped_ms
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import DocumentRefused, EngramError, LeaseLost
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.metrics import INGEST_DEAD_LETTERS, INGEST_PROCESSED, INGEST_SECONDS
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

log = logging.getLogger(__name__)

# How long an idle worker waits for the stream before it looks whether it should stop.
TAKE_SECONDS = 1.0
# How often it looks for retries that another worker left.
DUE_SECONDS = 1.0
# What running tasks may still take once the worker is asked to stop.
GRACE_SECONDS = 2.0
LAPSED_AT_ONCE = 100
DEFECT = "an internal error; the worker's log has it under the task's id"


def new_worker_id() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Finished:
    segments: int


@dataclass(frozen=True, slots=True)
class Broken:
    error: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker was asked to stop first."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The task is somebody else's by now."""


Outcome = Finished | Broken | Stopped | Lost


@dataclass(slots=True)
class Run:
    """One started task in this process."""

    started: Started
    began: float
    task: asyncio.Task[None] | None = None
    outcome: Outcome | None = None
    lost: bool = False

    @property
    def work(self) -> Work:
        return self.started.work

    @property
    def lease(self) -> tuple[UUID, int]:
        return self.work.task_id, self.work.lease_token


@dataclass(slots=True)
class _Settled:
    """What became of some outcomes: a word for each, and the entries that nobody needs any more."""

    results: dict[UUID, str] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)


class TaskLease:
    """The pipeline's side of a lease."""

    def __init__(self, db: AsyncExecutor, work: Work) -> None:
        self._db = db
        self._work = work

    async def progress(self, processed: int, total: int) -> None:
        query = tasks.progress(self._work.task_id, self._work.lease_token, processed, total)
        if not await self._db.run(query):
            raise LeaseLost(f"task {self._work.task_id} is not this worker's any more")


class IngestWorker:
    """`stop`, once set, ends it: see `GRACE_SECONDS`."""

    def __init__(
        self,
        db: AsyncExecutor,
        queue: Queue,
        pipeline: Pipeline,
        settings: Settings,
        *,
        worker_id: str | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.worker_id = worker_id or new_worker_id()
        self.ended = asyncio.Event()
        self._db = db
        self._queue = queue
        self._pipeline = pipeline
        self._settings = settings
        self._stop = stop or asyncio.Event()
        self._running: dict[UUID, Run] = {}
        self._ended: list[Run] = []
        self._room_made = asyncio.Event()
        self._taking = asyncio.Lock()
        self._settling = asyncio.Lock()
        # Read from the stream while the database was away: they are this worker's to start.
        self._unserved: list[Entry] = []
        self._unacked: list[Done] = []
        self._look_for_due_at = 0.0

    async def run_once(self) -> int:
        """Start retries that are due and new tasks, as many as there is room for."""
        async with self._taking:
            room = await self._room()
            if room == 0:
                return 0
            count = await self._start_due(room)
            if count < room:
                wait = 0.0 if self._unserved else self._patience()
                taken = await self._queue.take(self.worker_id, room - count, wait)
                self._unserved += taken
                if taken:
                    failpoint("ingest_worker.after_take")
            count += len(self._unserved)
            await self.serve(self._unserved)
            self._unserved = []
        return count

    async def serve(self, entries: Sequence[Entry]) -> None:
        """Start the tasks that entries stand for, and turn away those that may not run now."""
        if not entries:
            return
        asked = [(entry.task_id, entry.id) for entry in entries if entry.task_id is not None]
        query = tasks.start(self.worker_id, asked, self._settings.ingest_lease_seconds)
        started = await self._db.run(query)
        self._launch(started.values())
        begun = {run.stream_id for run in started.values()}
        await self._turn_away([entry for entry in entries if entry.id not in begun])

    async def settle(self) -> int:
        """Write down how runs ended, then take their entries off the stream."""
        async with self._settling:
            ended, self._ended = self._ended, []
            try:
                settled = await self._written(ended)
            except BaseException:
                self._ended = ended + self._ended
                raise
            for run in ended:
                self._running.pop(run.work.task_id, None)
                self._count(run, settled.results.get(run.work.task_id, "skipped"))
            self._room_made.set()
            self._unacked += settled.done
            if not self._queue.keeps_entries:
                self._unacked += [Done(entry) for run in ended if (entry := _noted(run))]
            if ended:
                failpoint("ingest_worker.before_ack")
            await self._acknowledge()
            return len(ended)

    async def renew(self) -> int:
        """Keep the leases of what runs; a run whose lease is somebody else's is ended."""
        runs = list(self._running.values())
        if runs:
            held = await self._db.run(tasks.renew([run.lease for run in runs]))
            for run in runs:
                # Not those that are being settled this moment: their row says so itself.
                if run.work.task_id not in held and run.outcome is None and run.task is not None:
                    run.lost = True
                    run.task.cancel()
        return 0

    async def count_lapsed(self) -> int:
        """A lease that ran out is a failure: its worker died, or its document killed it."""
        found = await self._db.run(tasks.lapsed(LAPSED_AT_ONCE))
        if not found:
            return 0
        failures = [
            self._failure(
                row["id"],
                row["lease_token"],
                row["attempt_count"],
                Broken(f"the worker {row['locked_by']} did not finish it and is gone"),
            )
            for row in found
        ]
        failed = await self._db.run(tasks.fail(failures, self._settings.ingest_max_attempts, lapsed=True))
        for each in failed:
            INGEST_PROCESSED.labels("dead" if each.status == "DEAD" else "retry").inc()
        self._expect_retry(0.0)
        self._unacked += _buried(failed)
        async with self._settling:
            await self._acknowledge()
        return len(failed)

    async def finish(self) -> None:
        """After `stop`: let runs end, for a moment, and hand back those that do not."""
        await self._stop.wait()
        left = [run.task for run in self._running.values() if run.task is not None]
        if left:
            _, late = await asyncio.wait(left, timeout=GRACE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.wait(left)
        try:
            await self.settle()
        except EngramError as error:
            # Nothing is lost: leases run out, and entries of a consumer that is gone are taken over.
            log.warning("ingest.not_settled", extra=fields(error=str(error), code=error.code))

    @property
    def room(self) -> int:
        """How many tasks more it may run now."""
        return max(0, self._settings.ingest_concurrency - len(self._running))

    @property
    def taking(self) -> asyncio.Lock:
        """Whoever starts tasks beside `run_once` holds this, so that both know the room there is."""
        return self._taking

    async def _room(self) -> int:
        while self.room == 0 and not self._stop.is_set():
            self._room_made.clear()
            stopped = asyncio.create_task(self._stop.wait())
            made = asyncio.create_task(self._room_made.wait())
            await asyncio.wait((stopped, made), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            made.cancel()
        return 0 if self._stop.is_set() else self.room

    async def _start_due(self, room: int) -> int:
        now = SYSTEM_CLOCK.monotonic()
        if now < self._look_for_due_at or not self._queue.keeps_entries:
            return 0
        query = tasks.start_due(self.worker_id, room, self._settings.ingest_lease_seconds)
        started = await self._db.run(query)
        if len(started) < room:
            self._look_for_due_at = now + DUE_SECONDS
        self._launch(started.values())
        return len(started)

    def _patience(self) -> float:
        """How long to wait for the stream: not past the next look at the retries."""
        if not self._queue.keeps_entries:
            return TAKE_SECONDS
        return min(TAKE_SECONDS, max(0.01, self._look_for_due_at - SYSTEM_CLOCK.monotonic()))

    def _expect_retry(self, delay: float) -> None:
        self._look_for_due_at = min(self._look_for_due_at, SYSTEM_CLOCK.monotonic() + delay)

    def _launch(self, started: Iterable[Started]) -> None:
        for each in started:
            failpoint("ingest_worker.after_start")
            run = Run(each, SYSTEM_CLOCK.monotonic())
            self._running[each.work.task_id] = run
            run.task = asyncio.create_task(self._run(run))

    async def _run(self, run: Run) -> None:
        run.outcome = await self._outcome(run)
        self._ended.append(run)
        self.ended.set()

    async def _outcome(self, run: Run) -> Outcome:
        try:
            segments = await self._pipeline.ingest(run.work, TaskLease(self._db, run.work))
            failpoint("ingest_worker.after_work")
            return Finished(segments)
        except asyncio.CancelledError:
            return Lost() if run.lost else Stopped()
        except LeaseLost:
            return Lost()
        except DocumentRefused as refused:
            return Broken(refused.message, final=True)
        except EngramError as error:
            return Broken(str(error))
        except Exception:
            log.exception("ingest.unexpected", extra=fields(task_id=str(run.work.task_id)))
            return Broken(DEFECT)

    async def _turn_away(self, entries: Sequence[Entry]) -> None:
        """Entries whose task may not run now. Only those that nobody needs leave the stream."""
        if not entries:
            return
        rows = await self._db.run(tasks.judge([e.task_id for e in entries if e.task_id is not None]))
        for entry in entries:
            row = rows.get(entry.task_id) if entry.task_id is not None else None
            INGEST_PROCESSED.labels("not_due" if row and row["waits"] else "skipped").inc()
            if done := _unneeded(entry, row):
                self._unacked.append(done)
            elif not self._queue.keeps_entries:
                self._unacked.append(Done(entry.id))
        async with self._settling:
            await self._acknowledge()

    async def _written(self, ended: Sequence[Run]) -> _Settled:
        settled = _Settled()
        if finished := [run for run in ended if isinstance(run.outcome, Finished)]:
            await self._succeeded(finished, settled)
        if broken := [run for run in ended if isinstance(run.outcome, Broken)]:
            await self._failed(broken, settled)
        if stopped := [run for run in ended if isinstance(run.outcome, Stopped)]:
            await self._db.run(tasks.hand_back([run.lease for run in stopped]))
        return settled

    async def _succeeded(self, runs: Sequence[Run], settled: _Settled) -> None:
        done = [(run.work, run.outcome.segments) for run in runs if isinstance(run.outcome, Finished)]
        ours = await self._db.run(tasks.succeed(done))
        if len(ours) < len(runs):
            ours += await self._settled_before(runs, "SUCCEEDED")
        for run in runs:
            if run.work.task_id in ours:
                settled.results[run.work.task_id] = "succeeded"
                if run.started.stream_id:
                    settled.done.append(Done(run.started.stream_id))

    async def _failed(self, runs: Sequence[Run], settled: _Settled) -> None:
        failures = [
            self._failure(*run.lease, run.started.attempt_count, run.outcome)
            for run in runs
            if isinstance(run.outcome, Broken)
        ]
        failed = await self._db.run(tasks.fail(failures, self._settings.ingest_max_attempts))
        if len(failed) < len(runs):
            known = {each.task_id for each in failed}
            before = await self._settled_before(runs, "RETRYING", "DEAD")
            failed += [_as_failed(row) for task_id, row in before.items() if task_id not in known]
        for each in failed:
            settled.results[each.task_id] = "dead" if each.status == "DEAD" else "retry"
        settled.done += _buried(failed)
        self._expect_retry(min(failure.delay for failure in failures))
        for failure in failures:
            log.warning("ingest.failed", extra=fields(task_id=str(failure.task_id), error=failure.error))

    async def _settled_before(self, runs: Sequence[Run], *statuses: str) -> dict[UUID, Row]:
        """Those that this very lease has settled already; only the database's reply was lost."""
        rows = await self._db.run(tasks.judge([run.work.task_id for run in runs]))
        tokens = dict(run.lease for run in runs)
        return {
            task_id: row
            for task_id, row in rows.items()
            if row["lease_token"] == tokens[task_id] and row["status"] in statuses
        }

    def _failure(self, task_id: UUID, token: int, attempts: int, broken: Broken) -> Failure:
        delay = exponential_capped_ms(
            attempts + 1, self._settings.ingest_base_backoff_ms, self._settings.ingest_max_backoff_ms
        )
        return Failure(task_id, token, broken.error, delay / 1000, broken.final)

    async def _acknowledge(self) -> None:
        """Take settled entries off the stream; while Redis is away they are kept for later."""
        if self._unacked:
            done = list(self._unacked)
            INGEST_DEAD_LETTERS.inc(await self._queue.settle(done))
            del self._unacked[: len(done)]
            failpoint("ingest_worker.after_ack")

    def _count(self, run: Run, result: str) -> None:
        if isinstance(run.outcome, Stopped):
            return
        INGEST_PROCESSED.labels(result).inc()
        INGEST_SECONDS.labels(result).observe(SYSTEM_CLOCK.monotonic() - run.began)


def _noted(run: Run) -> str | None:
    """The entry of a run whose end its row knows. One that was stopped is delivered to somebody else."""
    return None if isinstance(run.outcome, Stopped) else run.started.stream_id


def _unneeded(entry: Entry, row: Row | None) -> Done | None:
    """How an entry leaves the stream; None: its task is not final, so it stays."""
    if row is None or (row["stream_id"] is not None and row["stream_id"] != entry.id):
        return Done(entry.id)
    if row["status"] == "SUCCEEDED":
        return Done(entry.id)
    if row["status"] == "DEAD":
        return Done(entry.id, Death(row["id"], row["attempt_count"], row["last_error"]))
    return None


def _as_failed(row: Row) -> Failed:
    return Failed(row["id"], row["status"], row["attempt_count"], row["last_error"] or "", row["stream_id"])


def _buried(failed: Sequence[Failed]) -> list[Done]:
    return [
        Done(each.stream_id, Death(each.task_id, each.attempt_count, each.error))
        for each in failed
        if each.status == "DEAD" and each.stream_id is not None
    ]
