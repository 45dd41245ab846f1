"""Leases against a plain model: several workers, stale tokens, expiry, restarts, requeues.

Time is moved by shifting the rows, never waited for. Lease lengths and due
times lie between the steps of the clock, so that the few real seconds a run
takes decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.outbox import Dead, Failed, Released, Sent
from engram.postgres.pool import connect

WORKERS = ["w1", "w2", "w3"]
LEASES = [35, 65]
TICK = 10

workers = st.sampled_from(WORKERS)
rows = st.integers(0, 11)
tokens = st.sampled_from(["own", "stale", "none"])


@dataclass
class Row:
    """What the protocol says of one row."""

    outbox_id: int
    text: str
    status: str = "pending"
    retries: int = 0
    due: float = 0.0
    holder: str | None = None
    token: int | None = None
    locked_at: float = 0.0
    lease: int = 0
    ambiguous: bool = False
    requeued_from: int | None = None

    def lease_is_over(self, now: float) -> bool:
        return self.holder is None or self.locked_at + self.lease <= now

    def settleable(self, worker: str, token: int | None, now: float) -> bool:
        return self.held_by(worker, token) and not self.lease_is_over(now)

    def held_by(self, worker: str, token: int | None) -> bool:
        return self.status == "pending" and self.holder == worker and token in (None, self.token)


class Leases(RuleBasedStateMachine):
    config: Config

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.model: dict[int, Row] = {}
        self.audited = 0
        self.settled_by: dict[int, int] = {}
        self.connection = connect(self.config.postgres_dsn)
        self.connection.execute("TRUNCATE logbook.outbox_memory, logbook.memories")
        self.first_audit = self._count()

    def teardown(self) -> None:
        self.connection.close()

    @rule(n=st.integers(0, 5))
    def enqueue(self, n: int) -> None:
        text = f"fact {n}"
        live = [r for r in self.model.values() if r.text == text and r.status != "dead"]
        outbox_id = outbox.enqueue_memory(text, "team:a", config=self.config)
        if live:
            assert outbox_id == live[0].outbox_id
        else:
            self.model[outbox_id] = Row(outbox_id, text, due=self._instant())

    @rule(worker=workers, limit=st.integers(1, 4), lease=st.sampled_from(LEASES))
    def claim(self, worker: str, limit: int, lease: int) -> None:
        due = [
            r
            for r in self.model.values()
            if r.status == "pending" and r.due <= self.now and r.lease_is_over(self.now)
        ]
        expected = sorted(due, key=lambda r: (r.due, r.outbox_id))[:limit]
        claimed = outbox.claim_outbox(worker, limit, lease, self.config)
        assert {c["outbox_id"] for c in claimed} == {r.outbox_id for r in expected}
        for found in claimed:
            row = self.model[found["outbox_id"]]
            assert row.token is None or found["lease_token"] > row.token, "tokens only grow"
            row.ambiguous |= row.holder is not None
            row.holder, row.token, row.locked_at, row.lease = worker, found["lease_token"], self.now, lease

    @rule(worker=workers, n=rows, which=tokens)
    def ack(self, worker: str, n: int, which: str) -> None:
        if row := self._row(n):
            token = self._token(row, which)
            expected = row.settleable(worker, token, self.now)
            memory_id = f"mem-{row.outbox_id}"
            assert (
                outbox.ack_sent(row.outbox_id, worker, memory_id, self.config, lease_token=token) is expected
            )
            if expected:
                self._settle(row, "sent")

    @rule(worker=workers, n=rows, which=tokens, delay=st.sampled_from([5, 25]))
    def fail(self, worker: str, n: int, which: str, delay: int) -> None:
        if row := self._row(n):
            token = self._token(row, which)
            expected = row.settleable(worker, token, self.now)
            at = datetime.now(UTC) + timedelta(seconds=delay)
            assert (
                outbox.fail_retry(row.outbox_id, worker, "500", at, self.config, lease_token=token)
                is expected
            )
            if expected:
                row.retries, row.due, row.holder = row.retries + 1, self._instant() + delay, None

    @rule(worker=workers, n=rows, which=tokens)
    def die(self, worker: str, n: int, which: str) -> None:
        if row := self._row(n):
            token = self._token(row, which)
            expected = row.settleable(worker, token, self.now)
            assert (
                outbox.mark_dead_by_worker(row.outbox_id, worker, "422", self.config, lease_token=token)
                is expected
            )
            if expected:
                self._settle(row, "dead")

    @rule(worker=workers, n=rows, which=tokens)
    def renew(self, worker: str, n: int, which: str) -> None:
        if row := self._row(n):
            token = self._token(row, which)
            expected = row.held_by(worker, token)
            assert outbox.renew_lease(row.outbox_id, worker, self.config, lease_token=token) is expected
            if expected:
                row.locked_at = self.now

    @rule(worker=workers, n=rows, which=tokens, delay=st.sampled_from([0, 15]))
    def release(self, worker: str, n: int, which: str, delay: int) -> None:
        if row := self._row(n):
            token = self._token(row, which)
            expected = row.held_by(worker, token)
            assert (
                outbox.release_lease(row.outbox_id, worker, delay, self.config, lease_token=token) is expected
            )
            if expected:
                row.holder, row.due = None, max(row.due, self._instant() + delay)

    @rule(
        worker=workers,
        ns=st.lists(rows, min_size=1, max_size=4, unique=True),
        which=tokens,
        kind=st.integers(0, 3),
    )
    def settle_in_bulk(self, worker: str, ns: list[int], which: str, kind: int) -> None:
        asked = {r.outbox_id: (r, self._token(r, which)) for n in ns if (r := self._row(n))}
        if kind == 3:
            expected = {i for i, (row, token) in asked.items() if row.held_by(worker, token)}
        else:
            expected = {i for i, (row, token) in asked.items() if row.settleable(worker, token, self.now)}
        assert self._bulk(worker, asked, kind) == expected
        self._instant()
        for outbox_id in expected:
            self._apply(self.model[outbox_id], kind)
        self.audited += 0 if kind == 3 else len(expected)

    def _bulk(self, worker: str, asked: dict[int, Any], kind: int) -> set[int]:
        tokens_of = {i: token for i, (_, token) in asked.items()}
        if kind == 0:
            return outbox.ack_many(
                worker, [Sent(i, t, f"mem-{i}") for i, t in tokens_of.items()], self.config
            )
        if kind == 1:
            return outbox.fail_many(
                worker, [Failed(i, t, "500", delay=5) for i, t in tokens_of.items()], self.config
            )
        if kind == 2:
            return outbox.dead_many(worker, [Dead(i, t, "422") for i, t in tokens_of.items()], self.config)
        return outbox.release_many(worker, [Released(i, t) for i, t in tokens_of.items()], self.config)

    def _apply(self, row: Row, kind: int) -> None:
        if kind == 1:
            row.retries, row.due, row.holder = row.retries + 1, self.now + 5, None
        elif kind == 3:
            row.holder, row.due = None, max(row.due, self.now)
        else:
            self._settle(row, "sent" if kind == 0 else "dead")

    @precondition(lambda self: any(r.status == "dead" for r in self.model.values()))
    @rule(n=rows)
    def requeue(self, n: int) -> None:
        dead = [r for r in self.model.values() if r.status == "dead"]
        row = dead[n % len(dead)]
        live = [r for r in self.model.values() if r.text == row.text and r.status != "dead"]
        found = outbox.requeue(row.outbox_id, "ada", self.config)
        assert found is not None
        assert found.fresh is not bool(live)
        if live:
            assert found.outbox_id == live[0].outbox_id
        else:
            self.audited += 1
            self.model[found.outbox_id] = replace(
                Row(found.outbox_id, row.text, due=self._instant()),
                ambiguous=row.ambiguous,
                requeued_from=row.outbox_id,
            )

    @rule(ticks=st.integers(1, 4))
    def time_passes(self, ticks: int) -> None:
        self.now += ticks * TICK
        self.connection.execute(
            "UPDATE logbook.outbox_memory SET locked_at = locked_at - make_interval(secs => %(s)s),"
            " next_attempt_at = next_attempt_at - make_interval(secs => %(s)s)",
            {"s": ticks * TICK},
        )

    @invariant()
    def the_table_is_the_model(self) -> None:
        found = {r["outbox_id"]: r for r in self.connection.execute("SELECT * FROM logbook.outbox_memory")}
        assert found.keys() == self.model.keys()
        for outbox_id, row in self.model.items():
            there = found[outbox_id]
            assert (there["status"], there["retry_count"], there["locked_by"], there["ambiguous"]) == (
                row.status, row.retries, row.holder if row.status == "pending" else None, row.ambiguous,
            )  # fmt: skip
            assert there["lease_token"] == row.token
            assert there["requeued_from"] == row.requeued_from

    @invariant()
    def every_bulk_settle_has_its_audit(self) -> None:
        assert self._count() - self.first_audit == self.audited

    @invariant()
    def a_sent_row_has_its_memory(self) -> None:
        found = self.connection.execute(
            "SELECT m.state, m.memory_id, o.status, o.outbox_id FROM logbook.outbox_memory o"
            " JOIN logbook.memories m USING (outbox_id)"
        )
        for pair in found:
            expected = (
                ("stored", f"mem-{pair['outbox_id']}") if pair["status"] == "sent" else ("parked", None)
            )
            assert (pair["state"], pair["memory_id"]) == expected

    def _instant(self) -> float:
        """Later than every one before: of two rows due in one step of the clock, the earlier is first."""
        self.now += 1e-6
        return self.now

    def _row(self, n: int) -> Row | None:
        known = list(self.model.values())
        return known[n % len(known)] if known else None

    def _token(self, row: Row, which: str) -> int | None:
        return {"own": row.token, "stale": (row.token or 0) - 1, "none": None}[which]

    def _settle(self, row: Row, status: str) -> None:
        assert row.outbox_id not in self.settled_by, "settled twice"
        self.settled_by[row.outbox_id] = row.token or 0
        row.status, row.holder = status, None

    def _count(self) -> int:
        found = self.connection.execute("SELECT count(*) AS n FROM governance.write_audit").fetchone()
        return found["n"] if found else 0


@pytest.mark.timeout(600)
def test_leases_follow_the_model(config: Config, scale: float) -> None:
    Leases.config = config
    run_state_machine_as_test(
        Leases,
        settings=settings(
            max_examples=int(34 * scale),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
