"""Work that goes on when its caller is gone: a cancelled request must not leave it half done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Unfinished:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; if the caller is cancelled meanwhile, it goes on by itself."""
        return await asyncio.shield(self.spawned(work))

    def spawned(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, seconds: float) -> None:
        """Wait for what is left, for so long; for shutdown."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, and only then be cancelled: it uses what the caller is about to take away."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled():
        task.exception()  # seen; that the caller is to end is more than how this did
        raise cancelled
    return task.result()


class Later:
    """Work that begins after a while, unless it was cancelled: until then a timer, which costs next to nothing."""

    def __init__(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._work())

    def cancel(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
