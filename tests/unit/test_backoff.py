"""How long to wait: the specification's table, and what holds for any numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.gateway.outbox_worker import calculate_backoff_with_jitter
from engram.kernel.backoff import exponential_capped_ms, exponential_with_jitter

BASE, CEILING, JITTER = 60, 3600, 0.3

# retry_count, delay without jitter, least, most
TABLE = [
    (1, 120, 84, 156),
    (2, 240, 168, 312),
    (3, 480, 336, 624),
    (4, 960, 672, 1248),
    (5, 1920, 1344, 2496),
    (6, 3600, 2520, 4680),
    (7, 3600, 2520, 4680),
    (60, 3600, 2520, 4680),
]


@pytest.mark.parametrize(("retry", "plain", "least", "most"), TABLE)
def test_the_specifications_table(retry: int, plain: int, least: int, most: int) -> None:
    def delay(pick: float) -> int:
        return exponential_with_jitter(retry, BASE, CEILING, JITTER, uniform=lambda low, high: pick)

    assert delay(0.0) == plain
    # Truncation to whole seconds may take one off where the product is not exact.
    assert delay(-JITTER) in (least, least - 1)
    assert delay(JITTER) in (most, most - 1)


def test_chance_is_asked_for_the_whole_range_once() -> None:
    asked: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        asked.append((low, high))
        return 0.0

    exponential_with_jitter(3, BASE, CEILING, JITTER, uniform=uniform)
    assert asked == [(-JITTER, JITTER)]


@pytest.mark.parametrize(("retry", "plain", "least", "most"), TABLE)
def test_seeded_delays_stay_in_the_range_and_fill_it(retry: int, plain: int, least: int, most: int) -> None:
    chance = random.Random(retry)
    delays = [
        exponential_with_jitter(retry, BASE, CEILING, JITTER, uniform=chance.uniform) for _ in range(500)
    ]
    assert least - 1 <= min(delays) <= plain - 0.9 * (plain - least)
    assert plain + 0.9 * (most - plain) <= max(delays) <= most


def test_the_workers_name_for_it_keeps_the_specifications_signature() -> None:
    delays = {
        calculate_backoff_with_jitter(
            retry_count=1, base_seconds=BASE, max_seconds=CEILING, jitter_factor=JITTER
        )
        for _ in range(50)
    }
    assert all(83 <= delay <= 156 for delay in delays)
    assert len(delays) > 1
    assert all(isinstance(delay, int) for delay in delays)


@given(
    retry=st.integers(-5, 10_000),
    base=st.integers(0, 86_400),
    ceiling=st.integers(1, 604_800),
    jitter=st.floats(0, 1),
    pick=st.floats(-1, 1),
)
def test_a_delay_is_bounded_and_at_least_a_second(
    retry: int, base: int, ceiling: int, jitter: float, pick: float
) -> None:
    delay = exponential_with_jitter(retry, base, ceiling, jitter, uniform=lambda low, high: high * pick)
    assert isinstance(delay, int)
    assert 1 <= delay <= max(1, ceiling * (1 + jitter))


@given(retry=st.integers(0, 200), base=st.integers(1, 86_400), ceiling=st.integers(1, 604_800))
def test_without_jitter_it_is_the_formula_and_never_shrinks(retry: int, base: int, ceiling: int) -> None:
    def delay(count: int) -> int:
        return exponential_with_jitter(count, base, ceiling, 0.0, uniform=lambda low, high: 0.0)

    assert delay(retry) == min(base * 2**retry, ceiling)
    assert delay(retry) <= delay(retry + 1)


@pytest.mark.parametrize(
    ("attempt", "milliseconds"),
    [(1, 1000), (2, 2000), (3, 4000), (9, 256_000), (10, 512_000), (11, 600_000), (10**9, 600_000)],
)
def test_the_ingest_formula_with_its_defaults(attempt: int, milliseconds: int) -> None:
    assert exponential_capped_ms(attempt, 1000, 600_000) == milliseconds


@given(attempt=st.integers(1, 300), base=st.integers(0, 10**6), ceiling=st.integers(1, 10**8))
def test_the_ingest_formula(attempt: int, base: int, ceiling: int) -> None:
    assert exponential_capped_ms(attempt, base, ceiling) == min(base * 2 ** (attempt - 1), ceiling)


def test_a_task_that_has_not_failed_waits_like_one_that_failed_once() -> None:
    assert exponential_capped_ms(0, 1000, 600_000) == exponential_capped_ms(1, 1000, 600_000)
