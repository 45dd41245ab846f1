"""Several clients, chance and a plain model: every answer and every row is as the model says.

Clients reserve, renew, save, lose the database's reply, stall and die; time is
moved, never waited for. Leases, the TTL and the steps of time are chosen so
that no deadline comes within ten seconds of a step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engram.kernel.errors import DatabaseUnavailable
from engram.logbook import idempotency
from engram.logbook.idempotency import (
    Answer,
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyOutcomeUnknown,
    IdempotencyService,
    Reservation,
    fingerprint,
    storable,
)
from engram.logbook.lifecycle import IDEMPOTENCY
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import async_pool, connect
from engram.postgres.query import Query, Row

LEASE = 100.0
TTL = 1010.0
STEP = 40.0

EXAMPLES = 60
STEPS = 50

SLOTS = st.sampled_from([("ann", "k1"), ("ann", "k1"), ("bob", "k1"), ("ann", "k2")])
BODIES = st.sampled_from(["create", "create", "create", "other", "exec"])
ANY = st.integers(0, 11)
STATUSES = st.sampled_from([200, 200, 201, 404, 408, 429, 503])

Slot = tuple[str, str]


@dataclass
class Key:
    """The model's idea of one row."""

    body: str
    resource_id: str
    token: int
    expires: float
    locked: float | None = None
    attempts: int = 1
    answer: tuple[int, str] | None = None

    def state(self, now: float) -> str:
        if self.expires <= now:
            return "expired"
        if self.answer:
            return "completed"
        return "reserved" if self.leased(now) else "unfinished"

    def leased(self, now: float) -> bool:
        return self.locked is not None and self.locked + LEASE > now

    def held_by(self, held: Reservation, now: float) -> bool:
        """Late is allowed until somebody takes the key, or its time is over."""
        unsettled = self.answer is None and self.locked is not None and self.expires > now
        return unsettled and self.token == held.lease_token


class Forgetful(AsyncExecutor):
    """Loses the database's reply to the next settling statement, when told to."""

    forget = False

    async def run(self, query: Query[Any]) -> Any:
        result = await super().run(query)
        if self.forget and query.statement.name in ("idempotency_keys.complete", "idempotency_keys.release"):
            self.forget = False
            raise DatabaseUnavailable("the reply was lost")
        return result


class World:
    """The real thing: one service on one database, driven from outside its event loop."""

    def __init__(self, runner: asyncio.Runner, db: Forgetful, eyes: psycopg.Connection[Row]) -> None:
        self.runner, self.db, self.eyes = runner, db, eyes
        self.service = IdempotencyService(db, ttl_seconds=TTL, lease_seconds=LEASE, wait_seconds=0)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What came of it: a value, or the class of the refusal."""
        try:
            return self.runner.run(work)
        except (IdempotencyInProgress, IdempotencyMismatch, IdempotencyOutcomeUnknown) as refused:
            return type(refused)

    def empty(self) -> None:
        self.eyes.execute("DELETE FROM logbook.idempotency_keys")

    def later(self, seconds: float) -> None:
        self.eyes.execute(
            "UPDATE logbook.idempotency_keys SET created_at = created_at - make_interval(secs => %(s)s),"
            " locked_at = locked_at - make_interval(secs => %(s)s),"
            " expires_at = expires_at - make_interval(secs => %(s)s)",
            {"s": seconds},
        )

    def rows(self) -> dict[Slot, tuple[Any, ...]]:
        found = self.eyes.execute("SELECT * FROM logbook.idempotency_keys").fetchall()
        return {
            (row["owner"], row["key"]): (
                row["request_fingerprint"],
                row["resource_id"],
                row["lease_token"],
                row["attempts"],
                row["locked_at"] is not None,
                None if row["status_code"] is None else (row["status_code"], row["response_snapshot"]),
            )
            for row in found
        }


class Clients(RuleBasedStateMachine):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.now = 0.0
        self.keys: dict[Slot, Key] = {}
        self.held: list[Reservation] = []
        self.sent: list[tuple[Slot, str]] = []
        self.answers: dict[str, Any] = {}
        self.states: dict[Slot, str] = {}
        self.serial = 0

    @initialize()
    def nothing_is_there(self) -> None:
        self.world.empty()

    @rule(slot=SLOTS, body=BODIES)
    def reserve(self, slot: Slot, body: str) -> None:
        found = self.world.run(
            self.world.service.check(*slot, "/x", "POST", body, resumable=body != "exec", new_id=self._new_id)
        )
        self.sent.append((slot, body))
        expected = self._reserved(slot, body, found)
        if isinstance(found, Reservation):
            assert (found.resource_id, found.resumed) == expected
            self.held.append(found)
        else:
            assert found == expected

    @precondition(lambda self: self.sent)
    @rule(back=st.integers(1, 3))
    def repeat(self, back: int) -> None:
        """One of the last requests again, by its client or another."""
        self.reserve(*self.sent[-min(back, len(self.sent))])

    def _reserved(self, slot: Slot, body: str, found: Any) -> Any:
        key = self.keys.get(slot)
        if key is None or key.state(self.now) == "expired":
            assert isinstance(found, Reservation)
            self.keys[slot] = Key(body, f"r-{self.serial}", 0, 0.0)
        elif key.body != body:
            return IdempotencyMismatch
        elif key.answer:
            return Answer(key.answer[0], json.loads(key.answer[1]), replayed=True)
        elif key.leased(self.now):
            return IdempotencyInProgress
        elif body == "exec":
            return IdempotencyOutcomeUnknown
        else:
            key.attempts += 1
        assert isinstance(found, Reservation)
        key = self.keys[slot]
        key.token, key.locked, key.expires = found.lease_token, self.now, self.now + LEASE + TTL
        return key.resource_id, key.attempts > 1

    def _new_id(self) -> str:
        self.serial += 1
        return f"r-{self.serial}"

    @precondition(lambda self: self.held)
    @rule(who=ANY)
    def renew(self, who: int) -> None:
        held = self.held[who % len(self.held)]
        assert self.world.run(self.world.service.renew(held)) is self._renewed(held)

    def _renewed(self, held: Reservation) -> bool:
        key = self.keys.get((held.owner, held.key))
        if key is None or not key.held_by(held, self.now):
            return False
        key.locked, key.expires = self.now, self.now + LEASE + TTL
        return True

    @precondition(lambda self: self.held)
    @rule(who=ANY, status=STATUSES, reply_lost=st.booleans(), again=st.booleans())
    def save(self, who: int, status: int, reply_lost: bool, again: bool) -> None:
        """`again`: the client does not go away, and may save another time."""
        held = self.held[who % len(self.held)] if again else self.held.pop(who % len(self.held))
        self.serial += 1
        body = {"n": self.serial}
        self.world.db.forget = reply_lost
        found = self.world.run(self.world.service.save(held, status_code=status, body=body))
        self.world.db.forget = False
        assert found == self._saved(held, Answer(status, body))

    def _saved(self, held: Reservation, own: Answer) -> Any:
        key = self.keys.get((held.owner, held.key))
        if key and key.held_by(held, self.now):
            if storable(own.status_code) and not key.leased(self.now):
                self._renewed(held)
                self._follow("by a statement")
            key.locked, key.expires = None, self.now + TTL
            if storable(own.status_code):
                key.answer = (own.status_code, json.dumps(own.body))
            return own
        if key is None or key.state(self.now) == "expired" or key.resource_id != held.resource_id:
            return own
        if key.token == held.lease_token:
            return own
        if key.answer:
            return Answer(key.answer[0], json.loads(key.answer[1]), replayed=True)
        return IdempotencyInProgress

    @precondition(lambda self: self.held)
    @rule(who=ANY)
    def release(self, who: int) -> None:
        held = self.held[who % len(self.held)]
        key = self.keys.get((held.owner, held.key))
        expected = key is not None and key.held_by(held, self.now)
        assert self.world.run(self.world.service.release(held)) is expected
        if key and expected:
            key.locked, key.expires = None, self.now + TTL

    @precondition(lambda self: len(self.held) > 2)
    @rule(who=ANY)
    def crash(self, who: int) -> None:
        """A client dies. Nothing happens, ever, to what it held."""
        self.held.pop(who % len(self.held))

    @rule(steps=st.sampled_from([1, 2, 3, 3, 3, 3, 3, 3, 26, 29]))
    def time_passes(self, steps: int) -> None:
        self.world.later(steps * STEP)
        self.now += steps * STEP
        self._follow("in time")

    @precondition(lambda self: self._expired())
    @rule()
    def sweep(self) -> None:
        over = self._expired()
        assert self.world.runner.run(self.world.db.run(idempotency.sweep())) == len(over)
        for slot in over:
            del self.keys[slot], self.states[slot]

    def _expired(self) -> list[Slot]:
        return [slot for slot, key in self.keys.items() if key.state(self.now) == "expired"]

    @invariant()
    def every_row_is_as_the_model_says(self) -> None:
        expected = {
            slot: (
                fingerprint("POST", "/x", key.body),
                key.resource_id,
                key.token,
                key.attempts,
                key.locked is not None,
                key.answer,
            )
            for slot, key in self.keys.items()
        }
        assert self.world.rows() == expected

    @invariant()
    def a_stored_answer_never_changes(self) -> None:
        for _, resource_id, *_, answer in self.world.rows().values():
            if answer is not None:
                assert self.answers.setdefault(resource_id, answer) == answer

    @invariant()
    def every_change_is_in_the_table(self) -> None:
        self._follow("by a statement")

    def _follow(self, how: str) -> None:
        """Each key went from its last known state to this one by a transition, if it moved."""
        for slot, key in self.keys.items():
            state = key.state(self.now)
            before = self.states.get(slot)
            if before is None:
                assert state in IDEMPOTENCY.initial
            elif state != before:
                assert _way(before, state, how), f"{before} -> {state} {how}"
            self.states[slot] = state


def _way(before: str, after: str, how: str) -> bool:
    """A long step of time may pass through a state; a statement may not."""
    if IDEMPOTENCY.allows(before, after):
        return True
    through = [
        s for s in IDEMPOTENCY.states if IDEMPOTENCY.allows(before, s) and IDEMPOTENCY.allows(s, after)
    ]
    return how == "in time" and "unfinished" in through


@pytest.fixture
def world(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(idempotency, "SWEEP_EVERY", 1 << 62)  # the model sweeps when it chooses to
    with asyncio.Runner() as runner, connect(dsn) as eyes:
        pool = async_pool(dsn, max_size=2)
        runner.run(pool.open())
        yield World(runner, Forgetful(pool), eyes)
        runner.run(pool.close())


@pytest.mark.timeout(3600)
def test_the_service_is_as_the_model(world: World, scale: float) -> None:
    run_state_machine_as_test(
        lambda: Clients(world),
        settings=settings(
            max_examples=int(EXAMPLES * scale),
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            # Not `explain`: it traces every line, and shrinking would take minutes.
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
