"""A circuit breaker: after some failures in a row a dead server costs nothing.

closed     calls go out; `failures` failures in a row open it
open       no call goes out until `cooldown` seconds have passed
half-open  one call goes out as a probe: success closes it, failure opens it again

A call carries the ticket it was admitted with, so that a straggler from before
the outage is not taken for the probe.
"""

from __future__ import annotations

from dataclasses import dataclass

from engram.kernel.clock import SYSTEM_CLOCK, Clock
from engram.kernel.metrics import BREAKER_OPEN


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    probe: bool


class Breaker:
    def __init__(self, *, failures: int, cooldown: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._limit = failures
        self._cooldown = cooldown
        self._clock = clock
        self._failed = 0
        self._opened_at: float | None = None
        self._probe: Ticket | None = None

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    def admit(self) -> Ticket | None:
        """May a call go out now? A ticket must be handed back by one of the three answers below."""
        if self._opened_at is None:
            return Ticket(probe=False)
        cooled = self._clock.monotonic() - self._opened_at >= self._cooldown
        if not cooled or self._probe is not None:
            return None
        self._probe = Ticket(probe=True)
        return self._probe

    def succeeded(self, ticket: Ticket) -> None:
        """Whoever got an answer, the server is there."""
        self._failed = 0
        self._probe = None
        self._opened_at = None
        BREAKER_OPEN.set(0)

    def failed(self, ticket: Ticket, *, at_once: bool = False) -> None:
        """`at_once`: one failure is enough, as when the server refuses our key."""
        if self.is_open and ticket is not self._probe:
            return  # a straggler tells nothing new
        self._failed += 1
        if at_once or ticket is self._probe or self._failed >= self._limit:
            self._opened_at = self._clock.monotonic()
            BREAKER_OPEN.set(1)
        self._probe = None

    def abandoned(self, ticket: Ticket) -> None:
        """The call was cancelled: it says nothing, but a probe must not be waited for."""
        if ticket is self._probe:
            self._probe = None
