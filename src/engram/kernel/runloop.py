"""The one loop that every background role runs: work while there is some, else wait.

A failure that may pass (`retryable`) is logged and waited out; anything else
ends the loop, and with it the process, loudly.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from engram.kernel.errors import EngramError
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

RunOnce = Callable[[], Awaitable[int]]


async def run_loop(
    name: str,
    run_once: RunOnce,
    *,
    idle_seconds: float,
    stop: asyncio.Event,
    wake: asyncio.Event | None = None,
) -> None:
    """Call `run_once` until `stop`; it answers how much it did, and 0 means wait.

    `wake` ends a wait early, except after a failure. Several loops may share
    one: whoever clears it looks afterwards.
    """
    while not stop.is_set():
        if wake is not None:
            wake.clear()
        try:
            if not await run_once():
                await _wait(idle_seconds, stop, wake)
        except EngramError as error:
            if not error.retryable:
                raise
            log.warning("%s.failed", name, extra=fields(error=str(error), code=error.code))
            await _wait(idle_seconds, stop)


def cut_off(run_once: RunOnce, stop: asyncio.Event) -> RunOnce:
    """`run_once`, ended in the middle by `stop`: for work that loses nothing by that and may take long."""

    async def run() -> int:
        work = asyncio.ensure_future(run_once())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        finally:
            stopped.cancel()
            work.cancel()
        await asyncio.wait((work,))
        return 0

    return run


async def run_together(
    *loops: Coroutine[Any, Any, None], stop: asyncio.Event, patience_seconds: float
) -> None:
    """Run loops until `stop`, then for so long at most; the failure of one ends all.

    Raises `TimeoutError` when they did not end in time, having cancelled them.
    """
    try:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)
            await stop.wait()
            limit.reschedule(asyncio.get_running_loop().time() + patience_seconds)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    except TimeoutError:
        raise TimeoutError(f"not stopped within {patience_seconds:g} s; what it held must time out") from None


async def _wait(seconds: float, *events: asyncio.Event | None) -> None:
    """Until one of the events, or so long."""
    waits = [asyncio.create_task(event.wait()) for event in events if event is not None]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; call it inside the running loop.

    A second SIGINT (somebody presses Ctrl-C again) ends the process at once. A
    second SIGTERM changes nothing: a supervisor and its own supervisor may both
    send one.
    """
    stop = asyncio.Event()
    running = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        running.remove_signal_handler(signal.SIGINT)

    running.add_signal_handler(signal.SIGTERM, stop.set)
    running.add_signal_handler(signal.SIGINT, interrupted)
    return stop
