"""Tasks against a plain model: starts, leases that run out, stale tokens, retries, hand-backs.

Time is moved by shifting the rows. Lease lengths and delays lie between the
steps of the clock, so that the real seconds a run takes decide nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engram.ingest import tasks
from engram.ingest.lifecycle import TASK
from engram.ingest.seam import Work
from engram.ingest.tasks import Failure, Upload
from engram.logbook.config import Config
from engram.logbook.connection import run
from engram.postgres.pool import connect

TICK, LEASE, DELAY, MAX_ATTEMPTS = 10, 35, 15, 3

picks = st.integers(0, 2)
stale = st.booleans()


@dataclass
class Task:
    """What the rules say of one task."""

    id: UUID
    entry: str
    status: str = "QUEUED"
    attempts: int = 0
    due: float = 0.0
    token: int = 0
    until: float = 0.0

    def may_start(self, now: float) -> bool:
        return self.status in ("QUEUED", "RETRYING") and self.due <= now

    def held(self, token: int) -> bool:
        return self.status == "RUNNING" and self.token == token

    def fail(self, now: float, *, final: bool) -> None:
        self.attempts += 1
        self.status = "DEAD" if final or self.attempts >= MAX_ATTEMPTS else "RETRYING"
        self.due = now + DELAY if self.status == "RETRYING" else 0.0


class Model(RuleBasedStateMachine):
    config: Config

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        with connect(self.config.postgres_dsn or "") as connection:
            connection.execute("DELETE FROM ingest.knowledge_document")
        self.tasks = [self._made(number) for number in range(3)]

    def _made(self, number: int) -> Task:
        sha256 = hashlib.sha256(str(number).encode()).hexdigest()
        task = Task(uuid4(), f"{number}-1")
        upload = Upload(
            task.id, uuid4(), "ann", None, "a", "text/plain", sha256, 1, f"blobs/{sha256[:2]}/{sha256}"
        )
        run(tasks.create(upload), self.config)
        assert run(tasks.put_on_stream([(task.id, task.entry)]), self.config) == [task.id]
        return task

    def _token(self, task: Task, old: bool) -> int:
        return task.token - 1 if old else task.token

    def _begun(self, task: Task, token: int) -> None:
        assert token > task.token
        task.status, task.token, task.until, task.due = "RUNNING", token, self.now + LEASE, 0.0

    @rule(pick=picks, other=st.booleans())
    def start(self, pick: int, other: bool) -> None:
        """By its own entry, or by one that only names it."""
        task = self.tasks[pick]
        found = run(tasks.start("w", [(task.id, "9-9" if other else task.entry)], LEASE), self.config)
        assert bool(found) == (task.may_start(self.now) and not other)
        if found:
            self._begun(task, found[task.id].work.lease_token)

    @rule()
    def start_due(self) -> None:
        found = run(tasks.start_due("w", 10, LEASE), self.config)
        assert set(found) == {t.id for t in self.tasks if t.status == "RETRYING" and t.due <= self.now}
        for task in self.tasks:
            if task.id in found:
                self._begun(task, found[task.id].work.lease_token)

    @rule(pick=picks, old=stale)
    def succeed(self, pick: int, old: bool) -> None:
        task = self.tasks[pick]
        token = self._token(task, old)
        work = Work(task.id, uuid4(), "ann", "a", "text/plain", "", token)
        done = run(tasks.succeed([(work, 2)]), self.config)
        assert bool(done) == (task.held(token) and self.now < task.until)
        if done:
            task.status = "SUCCEEDED"

    @rule(pick=picks, old=stale, final=st.booleans())
    def fail(self, pick: int, old: bool, final: bool) -> None:
        task = self.tasks[pick]
        token = self._token(task, old)
        done = run(tasks.fail([Failure(task.id, token, "no", DELAY, final)], MAX_ATTEMPTS), self.config)
        assert bool(done) == (task.held(token) and self.now < task.until)
        if done:
            task.fail(self.now, final=final)
            assert (done[0].status, done[0].attempt_count) == (task.status, task.attempts)

    @rule()
    def count_lapsed(self) -> None:
        over = [t for t in self.tasks if t.status == "RUNNING" and t.until <= self.now]
        found = run(tasks.lapsed(10), self.config)
        assert {row["id"] for row in found} == {t.id for t in over}
        failures = [Failure(row["id"], row["lease_token"], "gone", DELAY) for row in found]
        done = run(tasks.fail(failures, MAX_ATTEMPTS, lapsed=True), self.config)
        assert {each.task_id for each in done} == {t.id for t in over}
        for task in over:
            task.fail(self.now, final=False)

    @rule(pick=picks, old=stale)
    def hand_back(self, pick: int, old: bool) -> None:
        task = self.tasks[pick]
        token = self._token(task, old)
        done = run(tasks.hand_back([(task.id, token)]), self.config)
        assert bool(done) == task.held(token)
        if done:
            task.status, task.due = "RETRYING", self.now

    @rule(pick=picks, old=stale)
    def renew(self, pick: int, old: bool) -> None:
        """Late too, as long as nobody has taken it."""
        task = self.tasks[pick]
        token = self._token(task, old)
        done = run(tasks.renew([(task.id, token)]), self.config)
        assert bool(done) == task.held(token)
        if done:
            task.until = self.now + LEASE

    @rule(pick=picks)
    def retry(self, pick: int) -> None:
        task = self.tasks[pick]
        done = run(tasks.retry("ann", task.id), self.config)
        assert (done is not None) == (task.status == "DEAD")
        if done is not None:
            task.status, task.attempts = "QUEUED", 0
            run(tasks.put_on_stream([(task.id, task.entry)]), self.config)

    @rule()
    def time_passes(self) -> None:
        self.now += TICK
        with connect(self.config.postgres_dsn or "") as connection:
            connection.execute(
                "UPDATE ingest.ingest_task SET locked_at = locked_at - make_interval(secs => %s),"
                " next_retry_at = next_retry_at - make_interval(secs => %s)",
                [TICK, TICK],
            )

    @invariant()
    def the_rows_and_their_histories_agree_with_the_model(self) -> None:
        for task in self.tasks:
            row = run(tasks.get("ann", task.id), self.config)
            assert row is not None
            assert (row["status"], row["attempt_count"]) == (task.status, task.attempts)
            steps = run(tasks.transitions(task.id), self.config)
            ways = [(step["from_status"], step["to_status"]) for step in steps]
            assert ways[0] == (None, "QUEUED")
            assert all(TASK.allows(*way) for way in ways[1:])
            assert [way[0] for way in ways[1:]] == [way[1] for way in ways[:-1]]
            assert ways[-1][1] == task.status


def test_tasks_do_what_the_model_does(config: Config, scale: float) -> None:
    kind = type("Bound", (Model,), {"config": config})
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=int(15 * scale),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("status", TASK.states)
def test_the_schema_knows_the_states_of_the_table(config: Config, status: str) -> None:
    with connect(config.postgres_dsn or "") as connection:
        row = connection.execute(
            "SELECT pg_get_constraintdef(oid) AS said FROM pg_constraint WHERE conname = 'task_status_known'"
        ).fetchone()
    assert row is not None
    assert f"'{status}'" in row["said"]
