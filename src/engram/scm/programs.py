"""Somebody else's program, run without a shell, its output streamed, its silence bounded.

A program that says nothing for too long is ended, with everything it started.
What it says on standard error is kept, cut short, for whoever explains why it
failed.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from engram.kernel.content import storable
from engram.kernel.errors import SourceError

CHUNK = 1 << 18
MAX_COMPLAINT = 4_096
ENDING_SECONDS = 5.0
# A person's configuration may put them into an address that git then complains about.
_CREDENTIALS = re.compile(r"://[^\s/@']+@")


class ProgramFailed(Exception):
    """It ended with a status other than 0."""

    def __init__(self, program: str, status: int, complaint: str) -> None:
        super().__init__(f"{program} ended with status {status}: {complaint}")
        self.status = status
        self.complaint = complaint


@dataclass(frozen=True, slots=True)
class Program:
    """A program with what every call of it has in common. A variable that is None is taken away."""

    command: Sequence[str]
    environment: Mapping[str, str | None]
    silent_seconds: float

    async def stream(self, *arguments: str, stdin: bytes = b"") -> AsyncGenerator[bytes, None]:
        """Its standard output, in pieces; `ProgramFailed` at the end if it failed."""
        child = await self._start(arguments)
        watch = _Watch(child, self.command[0], self.silent_seconds)
        try:
            watch.begin(stdin)
            while piece := await watch.read():
                yield piece
            await watch.finish()
        finally:
            await watch.end()

    async def output(self, *arguments: str, stdin: bytes = b"", most: int = 1 << 28) -> bytes:
        """All of it, if that is not more than `most`."""
        parts, size = [], 0
        async with aclosing(self.stream(*arguments, stdin=stdin)) as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > most:
                    raise SourceError(f"{self.command[0]} said more than {most} bytes", retryable=False)
                parts.append(piece)
        return b"".join(parts)

    async def _start(self, arguments: Sequence[str]) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._variables(),
                start_new_session=True,
                limit=CHUNK,
            )
        except FileNotFoundError as error:
            raise SourceError(
                f"{self.command[0]} is not installed", retryable=False, hint=f"install {self.command[0]}"
            ) from error

    def _variables(self) -> dict[str, str]:
        ours = {**os.environ, "LC_ALL": "C.UTF-8", "LANGUAGE": "", **self.environment}
        return {name: value for name, value in ours.items() if value is not None}


class _Watch:
    """One running child: feeds it, reads it, and ends it when it is silent for too long."""

    def __init__(self, child: asyncio.subprocess.Process, name: str, silent_seconds: float) -> None:
        self._child = child
        self._name = name
        self._silent = silent_seconds
        self._heard_at = 0.0
        self._complaint = bytearray()
        self._side_tasks: list[asyncio.Task[None]] = []

    def begin(self, stdin: bytes) -> None:
        self._heard()
        self._side_tasks = [asyncio.create_task(self._feed(stdin)), asyncio.create_task(self._listen())]

    async def read(self) -> bytes:
        assert self._child.stdout is not None  # noqa: S101 - a pipe was asked for
        reading = asyncio.ensure_future(self._child.stdout.read(CHUNK))
        try:
            await self._patiently(reading)
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        self._heard()
        return reading.result()

    async def finish(self) -> None:
        ending = asyncio.ensure_future(self._child.wait())
        try:
            await self._patiently(ending)
        finally:
            ending.cancel()
        await self._side_tasks[1]
        if self._child.returncode:
            said = _CREDENTIALS.sub("://***@", self._complaint.decode("utf-8", "replace").strip())
            raise ProgramFailed(self._name, self._child.returncode, storable(said))

    async def end(self) -> None:
        if self._child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            await self._see_it_end()
        for task in self._side_tasks:
            task.cancel()
        await asyncio.gather(*self._side_tasks, return_exceptions=True)
        # The pipes are closed with the transport, now rather than when it is collected.
        self._child._transport.close()  # type: ignore[attr-defined]

    async def _see_it_end(self) -> None:
        """asyncio tells of an end only when all output was read; something that it left behind may hold that."""
        assert self._child.stdout is not None  # noqa: S101 - a pipe was asked for
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                while await self._child.stdout.read(CHUNK):
                    pass
                await self._child.wait()

    async def _patiently(self, waiting: asyncio.Future[bytes] | asyncio.Future[int]) -> None:
        now = asyncio.get_running_loop().time
        while not waiting.done():
            left = self._heard_at + self._silent - now()
            if left <= 0:
                raise SourceError(f"{self._name} said nothing for {self._silent:g} s")
            await asyncio.wait({waiting}, timeout=left)

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    async def _feed(self, stdin: bytes) -> None:
        pipe = self._child.stdin
        assert pipe is not None  # noqa: S101 - a pipe was asked for
        with suppress(BrokenPipeError, ConnectionResetError):
            pipe.write(stdin)
            await pipe.drain()
        pipe.close()

    async def _listen(self) -> None:
        """Progress on standard error counts as a sign of life; its end is what went wrong."""
        assert self._child.stderr is not None  # noqa: S101 - a pipe was asked for
        while said := await self._child.stderr.read(CHUNK):
            self._heard()
            self._complaint += said
            del self._complaint[:-MAX_COMPLAINT]
