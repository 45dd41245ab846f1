"""How much may still be put on a sandbox's disk, while several put something there at once.

What is free is measured when each begins; what has been written since, by
whichever of them, is subtracted. When that leaves too little it is measured
anew, for something may have been deleted or given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from engram.kernel.errors import ArtifactTooLarge

Measure = Callable[[], Awaitable[int]]


@dataclass(slots=True, weakref_slot=True)
class _Disk:
    """One to which somebody writes: how many bytes so far. None is written while it is measured."""

    written: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Disks:
    """The disks to which somebody writes at this moment."""

    def __init__(self) -> None:
        self._disks: WeakValueDictionary[str, _Disk] = WeakValueDictionary()

    async def room(self, sandbox_id: str, measure: Measure) -> Room:
        """For one who puts a file there; `measure` tells what is free, or that nothing is."""
        disk = self._disks.setdefault(sandbox_id, _Disk())
        async with disk.lock:
            return Room(disk, measure, await measure())


class Room:
    def __init__(self, disk: _Disk, measure: Measure, free: int) -> None:
        self._disk = disk
        self._measure = measure
        self._full_at = disk.written + free

    @asynccontextmanager
    async def taking(self, size: int) -> AsyncIterator[None]:
        """Around the writing of so many bytes; refused where there is no room for them."""
        async with self._disk.lock:
            if not self._fits(size):
                self._full_at = self._disk.written + await self._measure()
            if not self._fits(size):
                raise ArtifactTooLarge(
                    "there is no room for it on the sandbox's disk",
                    hint="delete some of its files, or put less there at once",
                )
            self._disk.written += size
            yield

    def _fits(self, size: int) -> bool:
        return self._disk.written + size <= self._full_at
