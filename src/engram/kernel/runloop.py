"""The one loop that every background role runs: work while there is some, else wait.

A failure that may pass (`retryable`) is logged and waited out; anything else
ends the loop, and with it the process, loudly.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from engram.kernel.errors import EngramError
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

RunOnce = Callable[[], Awaitable[int]]


async def run_loop(name: str, run_once: RunOnce, *, idle_seconds: float, stop: asyncio.Event) -> None:
    """Call `run_once` until `stop`; it answers how much it did, and 0 means wait."""
    while not stop.is_set():
        try:
            did = await run_once()
        except EngramError as error:
            if not error.retryable:
                raise
            log.warning("%s.failed", name, extra=fields(error=str(error), code=error.code))
            did = 0
        if not did:
            await _wait(stop, idle_seconds)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; call it inside the running loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
