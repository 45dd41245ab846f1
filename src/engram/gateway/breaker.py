"""A circuit breaker: after some failures in a row a dead server costs nothing.

closed     calls go out; `failures` failures in a row open it
open       no call goes out until `cooldown` seconds have passed
half-open  one call goes out as a probe: success closes it, failure opens it again
"""

from __future__ import annotations

from engram.kernel.clock import SYSTEM_CLOCK, Clock
from engram.kernel.metrics import BREAKER_OPEN


class Breaker:
    def __init__(self, *, failures: int, cooldown: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._limit = failures
        self._cooldown = cooldown
        self._clock = clock
        self._failed = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    def admit(self) -> bool:
        """May a call go out now? A True must be followed by one of the three answers below."""
        if self._opened_at is None:
            return True
        cooled = self._clock.monotonic() - self._opened_at >= self._cooldown
        if not cooled or self._probing:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        self._failed = 0
        self._probing = False
        self._opened_at = None
        BREAKER_OPEN.set(0)

    def failed(self, *, at_once: bool = False) -> None:
        """`at_once`: one failure is enough, as when the server refuses our key."""
        self._failed += 1
        if at_once or self._probing or self._failed >= self._limit:
            self._opened_at = self._clock.monotonic()
            BREAKER_OPEN.set(1)
        self._probing = False

    def abandoned(self) -> None:
        """The call was cancelled: it says nothing, but a probe must not be waited for."""
        self._probing = False
