"""Three tries in a row, then stop: the one place that decides how often a source is asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from engram.kernel.backoff import exponential_capped_ms
from engram.kernel.errors import SourceError
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")

TRIES = 3
# A source that asks for more patience than this is asked again by the next sync.
LONGEST_WAIT_SECONDS = 120.0


@dataclass
class Tries:
    """`pause_ms`: the first pause and the longest."""

    pause_ms: tuple[int, int] = (500, 5_000)
    failed: int = 0

    def succeeded(self) -> None:
        self.failed = 0

    async def after(self, error: SourceError) -> None:
        """Wait before the next try, or raise: it was the last, or another would end the same way."""
        self.failed += 1
        wait = error.retry_after
        if wait is None:
            wait = exponential_capped_ms(self.failed, *self.pause_ms) / 1000
        if not error.retryable or self.failed >= TRIES or wait > LONGEST_WAIT_SECONDS:
            raise error
        log.warning("scm.try_failed", extra=fields(error=str(error), tries=self.failed, wait_seconds=wait))
        await asyncio.sleep(wait)


async def three_tries(work: Callable[[], Awaitable[T]], tries: Tries) -> T:
    while True:
        try:
            done = await work()
        except SourceError as error:
            await tries.after(error)
        else:
            tries.succeeded()
            return done
