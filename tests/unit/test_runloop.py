"""The one loop: work while there is some, wait, survive what may pass, die of the rest."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from engram.kernel.errors import ConstraintViolated, DatabaseUnavailable
from engram.kernel.runloop import cut_off, run_loop, run_together, stop_on_signals

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


async def test_work_that_may_be_cut_off_is_and_its_failures_and_counts_are_kept() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1

    async def failing() -> int:
        raise DatabaseUnavailable("away")

    async def two() -> int:
        return 2

    assert await cut_off(two, stop)() == 2
    with pytest.raises(DatabaseUnavailable):
        await cut_off(failing, stop)()
    asyncio.get_running_loop().call_soon(stop.set)
    async with asyncio.timeout(5):
        assert await cut_off(endless, stop)() == 0
    assert ended.is_set()


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


class Looks:
    """A `run_once` that finds nothing, and says how often it has looked."""

    def __init__(self, *failures: Exception) -> None:
        self.calls, self.failures = 0, list(failures)

    async def __call__(self) -> int:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return 0

    async def until(self, calls: int) -> None:
        async with asyncio.timeout(5):
            while self.calls < calls:
                await asyncio.sleep(0)


async def test_a_wake_up_ends_the_pause_at_once() -> None:
    stop, wake, looks = asyncio.Event(), asyncio.Event(), Looks()
    loop = asyncio.create_task(run_loop("demo", looks, idle_seconds=FOREVER, stop=stop, wake=wake))
    for calls in range(1, 4):
        await looks.until(calls)
        wake.set()
    await looks.until(4)
    stop.set()
    await loop


async def test_a_wake_up_while_it_works_is_not_lost() -> None:
    stop, wake = asyncio.Event(), asyncio.Event()
    calls = 0

    async def woken_meanwhile() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            wake.set()
        else:
            stop.set()
        return 0

    async with asyncio.timeout(5):
        await run_loop("demo", woken_meanwhile, idle_seconds=FOREVER, stop=stop, wake=wake)
    assert calls == 2


async def test_wake_ups_that_never_come_are_made_up_for_by_looking() -> None:
    stop, looks = asyncio.Event(), Looks()
    loop = asyncio.create_task(run_loop("demo", looks, idle_seconds=0.001, stop=stop, wake=asyncio.Event()))
    await looks.until(3)
    stop.set()
    await loop


async def test_after_a_failure_nobody_is_woken_early() -> None:
    stop, wake, looks = asyncio.Event(), asyncio.Event(), Looks(DatabaseUnavailable("away"))
    loop = asyncio.create_task(run_loop("demo", looks, idle_seconds=FOREVER, stop=stop, wake=wake))
    await looks.until(1)
    wake.set()
    for _ in range(10):
        await asyncio.sleep(0)
    stop.set()
    await loop
    assert looks.calls == 1


async def test_loops_that_share_a_wake_up_all_look_in_the_end() -> None:
    stop, wake, first, second = asyncio.Event(), asyncio.Event(), Looks(), Looks()
    both = [
        asyncio.create_task(run_loop("demo", looks, idle_seconds=FOREVER, stop=stop, wake=wake))
        for looks in (first, second)
    ]
    await first.until(1)
    await second.until(1)
    await asyncio.sleep(0)
    wake.set()
    await first.until(2)
    await second.until(2)
    stop.set()
    await asyncio.gather(*both)


async def test_loops_run_together_until_the_stop() -> None:
    stop, first, second = asyncio.Event(), Looks(), Looks()
    loops = [run_loop("demo", looks, idle_seconds=0.001, stop=stop) for looks in (first, second)]
    together = asyncio.create_task(run_together(*loops, stop=stop, patience_seconds=5))
    await first.until(2)
    await second.until(2)
    stop.set()
    await together


async def test_the_failure_of_one_ends_all_and_is_what_is_raised() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fail() -> None:
        raise ConstraintViolated("a rule was broken")

    with pytest.raises(ConstraintViolated):
        await run_together(hang(), fail(), stop=stop, patience_seconds=5)
    assert ended.is_set()


async def test_what_does_not_stop_in_time_is_cancelled() -> None:
    stop = asyncio.Event()
    stop.set()

    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="not stopped within"):
        await run_together(hang(), stop=stop, patience_seconds=0.01)


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


async def test_a_second_term_changes_nothing_and_a_second_interrupt_ends_it() -> None:
    running = asyncio.get_running_loop()
    stop = stop_on_signals()
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(5):
            while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                await asyncio.sleep(0)
        assert stop.is_set()
    finally:
        running.remove_signal_handler(signal.SIGTERM)
