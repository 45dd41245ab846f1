"""The circuit breaker: a dead server costs nothing, a recovered one is found by one call."""

from __future__ import annotations

import pytest

from engram.gateway.breaker import Breaker, Ticket
from engram.kernel.clock import ManualClock
from engram.kernel.metrics import REGISTRY

COOLDOWN = 2.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(failures=3, cooldown=COOLDOWN, clock=clock)


@pytest.fixture
def opened(breaker: Breaker) -> Breaker:
    for _ in range(3):
        breaker.failed(admitted(breaker))
    return breaker


def admitted(breaker: Breaker) -> Ticket:
    ticket = breaker.admit()
    assert ticket is not None
    return ticket


def gauge() -> float | None:
    return REGISTRY.get_sample_value("engram_openmemory_breaker_open")


def test_closed_it_admits_any_number_at_once(breaker: Breaker) -> None:
    assert not breaker.is_open
    assert all(breaker.admit() for _ in range(20))


def test_it_opens_after_its_failures_in_a_row_and_not_before(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed(admitted(breaker))
        assert breaker.admit()
    breaker.failed(admitted(breaker))
    assert breaker.is_open
    assert not breaker.admit()


def test_a_success_between_starts_the_count_anew(breaker: Breaker) -> None:
    breaker.failed(admitted(breaker))
    breaker.failed(admitted(breaker))
    breaker.succeeded(admitted(breaker))
    breaker.failed(admitted(breaker))
    breaker.failed(admitted(breaker))
    assert not breaker.is_open


def test_one_failure_is_enough_when_it_says_so(breaker: Breaker) -> None:
    breaker.failed(admitted(breaker), at_once=True)
    assert breaker.is_open
    assert not breaker.admit()


def test_open_it_admits_nothing_until_it_has_cooled(opened: Breaker, clock: ManualClock) -> None:
    clock.advance(COOLDOWN - 0.001)
    assert not opened.admit()
    clock.advance(0.001)
    assert opened.admit()


def test_half_open_it_admits_one_probe_only(opened: Breaker, clock: ManualClock) -> None:
    clock.advance(COOLDOWN)
    assert [bool(opened.admit()) for _ in range(10)] == [True] + [False] * 9
    clock.advance(COOLDOWN * 100)
    assert not opened.admit()
    assert opened.is_open


def test_a_probe_that_succeeds_closes_it_for_all(opened: Breaker, clock: ManualClock) -> None:
    clock.advance(COOLDOWN)
    opened.succeeded(admitted(opened))
    assert not opened.is_open
    assert all(opened.admit() for _ in range(5))
    opened.failed(admitted(opened))
    assert not opened.is_open


def test_a_probe_that_fails_opens_it_for_another_cooldown(opened: Breaker, clock: ManualClock) -> None:
    clock.advance(COOLDOWN)
    opened.failed(admitted(opened))
    clock.advance(COOLDOWN - 0.001)
    assert not opened.admit()
    clock.advance(0.001)
    assert opened.admit()


def test_a_probe_needs_no_more_failures_to_open_it_again(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failed(admitted(breaker), at_once=True)
    clock.advance(COOLDOWN)
    breaker.failed(admitted(breaker))
    assert not breaker.admit()
    clock.advance(COOLDOWN)
    assert breaker.admit()


def test_an_abandoned_probe_lets_the_next_call_probe(opened: Breaker, clock: ManualClock) -> None:
    clock.advance(COOLDOWN)
    opened.abandoned(admitted(opened))
    assert opened.is_open
    assert opened.admit()
    assert not opened.admit()


def test_an_abandoned_call_counts_neither_way(breaker: Breaker) -> None:
    breaker.failed(admitted(breaker))
    breaker.failed(admitted(breaker))
    breaker.abandoned(admitted(breaker))
    assert not breaker.is_open
    breaker.failed(admitted(breaker))
    assert breaker.is_open


def test_a_straggler_is_not_taken_for_the_probe(breaker: Breaker, clock: ManualClock) -> None:
    stragglers = [admitted(breaker) for _ in range(2)]
    for _ in range(3):
        breaker.failed(admitted(breaker))
    clock.advance(COOLDOWN)
    probe = admitted(breaker)
    breaker.abandoned(stragglers[0])
    assert not breaker.admit(), "the probe is still out"
    breaker.failed(stragglers[1], at_once=True)
    assert not breaker.admit()
    breaker.succeeded(probe)
    assert breaker.admit()


def test_a_stragglers_failure_does_not_start_the_cooldown_anew(breaker: Breaker, clock: ManualClock) -> None:
    straggler = admitted(breaker)
    breaker.failed(admitted(breaker), at_once=True)
    clock.advance(COOLDOWN - 0.001)
    breaker.failed(straggler)
    clock.advance(0.001)
    assert breaker.admit()


def test_the_gauge_follows(breaker: Breaker, clock: ManualClock) -> None:
    breaker.succeeded(admitted(breaker))
    assert gauge() == 0
    breaker.failed(admitted(breaker), at_once=True)
    assert gauge() == 1
    clock.advance(COOLDOWN)
    breaker.succeeded(admitted(breaker))
    assert gauge() == 0
