"""Waiting for something to become true: always bounded, and never silent for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from engram.kernel.clock import SYSTEM_CLOCK

T = TypeVar("T")

_FIRST_WORD_AFTER = 2.0
_NEXT_WORD_AFTER = 5.0


def wait_for(
    condition: Callable[[], T],
    limit: float,
    *,
    on_wait: Callable[[float], None] | None = None,
) -> T:
    """The first truthy answer of `condition`, or its last one when `limit` seconds are over.

    `on_wait` is told the seconds waited so far, after two seconds and then every five.
    """
    begun = SYSTEM_CLOCK.monotonic()
    next_word, pause = _FIRST_WORD_AFTER, 0.005
    while not (answer := condition()):
        waited = SYSTEM_CLOCK.monotonic() - begun
        if waited >= limit:
            break
        if on_wait is not None and waited >= next_word:
            on_wait(waited)
            next_word = waited + _NEXT_WORD_AFTER
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return answer
