"""How long to wait before the next try. Pure functions; chance comes in as an argument."""

from __future__ import annotations

import random
from collections.abc import Callable

Uniform = Callable[[float, float], float]


def exponential_with_jitter(
    retry_count: int,
    base_seconds: float,
    max_seconds: float,
    jitter_factor: float,
    *,
    uniform: Uniform = random.uniform,
) -> int:
    """Whole seconds before retry `retry_count` of an outbox delivery; never less than one.

    The exponential part is capped first and jittered after, so a capped delay
    still spreads: many rows parked by one outage do not all return at once.

    >>> exponential_with_jitter(1, 60, 3600, 0.3, uniform=lambda low, high: 0.0)
    120
    >>> exponential_with_jitter(9, 60, 3600, 0.3, uniform=lambda low, high: high)
    4680
    """
    capped = _doubled(base_seconds, retry_count, max_seconds)
    return max(1, int(capped * (1 + uniform(-jitter_factor, jitter_factor))))


def exponential_capped_ms(attempt: int, base_backoff_ms: int, max_backoff_ms: int) -> int:
    """Milliseconds before an ingest task or event that failed `attempt` times runs again.

    >>> [exponential_capped_ms(n, 1000, 600_000) for n in (1, 2, 3, 20)]
    [1000, 2000, 4000, 600000]
    """
    return int(_doubled(base_backoff_ms, max(attempt, 1) - 1, max_backoff_ms))


def _doubled(base: float, times: int, ceiling: float) -> float:
    """`min(base * 2**times, ceiling)` without building huge integers."""
    if base <= 0:
        return 0
    value = base
    for _ in range(max(times, 0)):
        value *= 2
        if value >= ceiling:
            return ceiling
    return min(value, ceiling)
