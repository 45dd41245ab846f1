"""The one loop: work while there is some, wait, survive what may pass, die of the rest."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from engram.kernel.errors import ConstraintViolated, DatabaseUnavailable
from engram.kernel.runloop import run_loop, stop_on_signals

pytestmark = pytest.mark.anyio

FOREVER = 3600.0


class Script:
    """A `run_once` that plays what it is given, and stops the loop at the end."""

    def __init__(self, *acts: int | Exception) -> None:
        self.acts = list(acts)
        self.calls = 0
        self.stop = asyncio.Event()

    async def __call__(self) -> int:
        self.calls += 1
        act = self.acts.pop(0)
        if not self.acts:
            self.stop.set()
        if isinstance(act, Exception):
            raise act
        return act


async def test_it_works_without_waiting_while_there_is_work() -> None:
    script = Script(3, 1, 2, 0)
    async with asyncio.timeout(5):
        await run_loop("demo", script, idle_seconds=FOREVER, stop=script.stop)
    assert script.calls == 4


async def test_idle_it_looks_again_after_its_pause() -> None:
    script = Script(0, 0, 0)
    async with asyncio.timeout(5):
        await run_loop("demo", script, idle_seconds=0.001, stop=script.stop)
    assert script.calls == 3


async def test_a_stop_ends_the_pause_at_once() -> None:
    stop, idle = asyncio.Event(), asyncio.Event()

    async def nothing_to_do() -> int:
        idle.set()
        return 0

    loop = asyncio.create_task(run_loop("demo", nothing_to_do, idle_seconds=FOREVER, stop=stop))
    await idle.wait()
    stop.set()
    async with asyncio.timeout(5):
        await loop


async def test_it_does_nothing_when_it_is_stopped_already() -> None:
    script = Script(1)
    script.stop.set()
    await run_loop("demo", script, idle_seconds=FOREVER, stop=script.stop)
    assert script.calls == 0


async def test_work_in_hand_is_finished_before_it_stops() -> None:
    stop, begun, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    finished = []

    async def slow() -> int:
        begun.set()
        await go_on.wait()
        finished.append(True)
        return 1

    loop = asyncio.create_task(run_loop("demo", slow, idle_seconds=FOREVER, stop=stop))
    await begun.wait()
    stop.set()
    go_on.set()
    await loop
    assert finished == [True]


async def test_a_retryable_failure_is_logged_waited_out_and_survived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script(DatabaseUnavailable("the server is away"), 1, 0)
    with caplog.at_level(logging.WARNING, logger="engram.kernel.runloop"):
        await run_loop("demo", script, idle_seconds=0.001, stop=script.stop)
    assert script.calls == 3
    (record,) = caplog.records
    assert record.getMessage() == "demo.failed"
    assert record.fields == {"error": "the server is away", "code": "DATABASE_UNAVAILABLE"}  # type: ignore[attr-defined]


async def test_a_retryable_failure_waits_rather_than_spins() -> None:
    stop, failed = asyncio.Event(), asyncio.Event()
    calls = 0

    async def away() -> int:
        nonlocal calls
        calls += 1
        failed.set()
        raise DatabaseUnavailable("away")

    loop = asyncio.create_task(run_loop("demo", away, idle_seconds=FOREVER, stop=stop))
    await failed.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    stop.set()
    await loop
    assert calls == 1


@pytest.mark.parametrize("error", [ConstraintViolated("a rule was broken"), ZeroDivisionError("a bug")])
async def test_any_other_failure_ends_it(error: Exception) -> None:
    script = Script(error, 1, 1)
    with pytest.raises(type(error)):
        await run_loop("demo", script, idle_seconds=0.001, stop=script.stop)
    assert script.calls == 1


async def test_it_can_be_cancelled() -> None:
    begun = asyncio.Event()

    async def hang() -> int:
        begun.set()
        await asyncio.Event().wait()
        return 0

    loop = asyncio.create_task(run_loop("demo", hang, idle_seconds=FOREVER, stop=asyncio.Event()))
    await begun.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_ask_it_to_stop(number: signal.Signals) -> None:
    stop = stop_on_signals()
    try:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            await stop.wait()
    finally:
        for handled in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(handled)
