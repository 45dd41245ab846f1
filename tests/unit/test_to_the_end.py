"""Work that is awaited to its end, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from engram.kernel.unfinished import to_the_end

pytestmark = pytest.mark.anyio


async def test_its_result_and_its_error_are_the_callers() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async def fail() -> None:
        raise ValueError("no")

    assert await to_the_end(answer()) == 42
    with pytest.raises(ValueError, match="no"):
        await to_the_end(fail())


@pytest.mark.parametrize("fails", [False, True])
async def test_a_caller_is_cancelled_only_when_it_is_done(fails: bool) -> None:
    begun, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go.wait()
        done.set()
        if fails:
            raise ValueError("too late to matter")

    caller = asyncio.create_task(to_the_end(work()))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()
