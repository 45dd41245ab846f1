"""Sandboxes on this host, by sandlock: Landlock and seccomp, no root and no daemon needed.

Commands are started by a helper process (`sandlock_helper`), never by this one:
it has none of our environment, descriptors or memory, and where we are root it
is somebody else. It is started when first needed and again when it has died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engram.kernel.errors import (
    ArtifactTooLarge,
    EngramError,
    InputError,
    SandboxUnavailable,
    StateConflict,
)
from engram.kernel.logs import fields
from engram.kernel.unfinished import to_the_end
from engram.sandboxes.driver import Command, Ended, EndedBy, Event, Limits, Output, Stream
from engram.sandboxes.folders import Folders, not_here, probe_name, told
from engram.sandboxes.profiles import link_python, profiles, reachable
from engram.sandboxes.room import Disks

log = logging.getLogger(__name__)

START_SECONDS = 20.0
# Past its own time a supervisor has this long to end its command and say so.
PATIENCE_SECONDS = 15.0
CHUNK_BYTES = 1 << 16
# So many times the limit of output is thrown away; whoever writes more is ended.
OVERFLOW = 16
QUEUED = 16
HELPER = Path(__file__).with_name("sandlock_helper.py")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Helper:
    process: subprocess.Popen[bytes]
    control: socket.socket
    landlock: int
    needed: int


class SandlockDriver:
    """`uid` None: commands run as whoever runs this."""

    def __init__(self, root: Path, *, limits: Limits, uid: int | None = None) -> None:
        self._limits = limits
        self._uid = uid
        self._folders = Folders(root, uid)
        self._programs = root / ".programs"
        self._profiles = profiles(self._programs, uid)
        self._helper: _Helper | None = None
        self._starting = asyncio.Lock()
        self._works = False
        self._disks = Disks()

    @property
    def profiles(self) -> Sequence[str]:
        return tuple(self._profiles)

    async def why_not(self) -> str | None:
        """The answer `None` is kept: a kernel does not lose what it can. Any other is looked at anew."""
        if self._works:
            return None
        try:
            reason = await self._tried()
        except (EngramError, OSError) as error:
            return str(error)
        self._works = reason is None
        return reason

    async def create(self, sandbox_id: str) -> None:
        try:
            await asyncio.to_thread(self._folders.make, sandbox_id)
        except OSError as error:
            raise SandboxUnavailable(
                f"the sandbox's folder cannot be made: {error}",
                hint="ENGRAM_SANDBOX_DIR says where sandboxes are",
            ) from error

    async def has(self, sandbox_id: str) -> bool:
        return await asyncio.to_thread(self._folders.has, sandbox_id)

    async def stop(self, sandbox_id: str) -> None:
        await asyncio.to_thread(self._folders.stop, sandbox_id)

    async def destroy(self, sandbox_id: str) -> None:
        await asyncio.to_thread(self._folders.remove, sandbox_id)

    async def known(self) -> list[str]:
        def look() -> list[str]:
            self._folders.remove_leftovers()
            return self._folders.ids()

        return await asyncio.to_thread(look)

    async def put_file(self, sandbox_id: str, path: str, content: AsyncIterator[bytes]) -> int:
        room = await self._disks.room(sandbox_id, lambda: self._free(sandbox_id))
        most, size = self._limits.file_bytes, 0
        with self._folders.writing(sandbox_id, path) as fd:
            async for part in content:
                size += len(part)
                if size > most:
                    raise ArtifactTooLarge(f"a file may have at most {most} bytes here")
                async with room.taking(len(part)):
                    await to_the_end(asyncio.to_thread(_write, fd, part, path))
        return size

    async def get_file(self, sandbox_id: str, path: str) -> tuple[int, AsyncIterator[bytes]]:
        file = await asyncio.to_thread(self._folders.read, sandbox_id, path)
        size = os.fstat(file.fileno()).st_size

        async def parts() -> AsyncIterator[bytes]:
            with file:
                left = size
                while left and (part := await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))):
                    left -= len(part)
                    yield part

        return size, parts()

    async def delete_file(self, sandbox_id: str, path: str) -> None:
        await asyncio.to_thread(self._folders.delete, sandbox_id, path)

    @asynccontextmanager
    async def exec(self, sandbox_id: str, command: Command) -> AsyncIterator[AsyncIterator[Event]]:
        if not self._folders.exists(sandbox_id):
            raise not_here(sandbox_id)
        run = _Run(await self._running_helper(), self._order(sandbox_id, command), command.stdin)
        try:
            yield run.events(self._limits.output_bytes, command.timeout_seconds + PATIENCE_SECONDS)
        finally:
            await to_the_end(run.close())

    async def close(self) -> None:
        """The helper ends when its socket does, and what it runs with it."""
        if self._helper is not None:
            helper, self._helper = self._helper, None
            helper.control.close()
            await asyncio.to_thread(_ended, helper.process)

    def _order(self, sandbox_id: str, command: Command) -> dict[str, Any]:
        work, profile = str(self._folders.work(sandbox_id)), self._profiles[command.profile]
        own = {"PATH": ":".join(profile.path), "HOME": work, "TMPDIR": work, "LANG": "C.UTF-8"}
        return {
            "argv": list(command.argv),
            "work": work,
            "alive": str(self._folders.alive(sandbox_id)),
            "cwd": os.path.normpath(os.path.join(work, command.cwd)),
            "env": {**own, **command.env},
            "readable": list(profile.readable),
            "timeout_seconds": command.timeout_seconds,
            "memory_bytes": self._limits.memory_bytes,
            "cpu_seconds": self._limits.cpu_seconds,
            "processes": self._limits.processes,
            "disk_bytes": self._limits.disk_bytes,
        }

    async def _free(self, sandbox_id: str) -> int:
        """What may still be written to its disk."""
        if not await self.has(sandbox_id):
            raise not_here(sandbox_id)
        order = {"work": str(self._folders.work(sandbox_id)), "measure": True}
        run = _Run(await self._running_helper(), order, b"")
        try:
            async with _patient(PATIENCE_SECONDS):
                free = self._limits.disk_bytes - int((await run.outcome())["used"])
        finally:
            await to_the_end(run.close())
        if free <= 0:
            raise _full()
        return free

    async def _tried(self) -> str | None:
        """Run a command, and see."""
        await asyncio.to_thread(self._folders.prepare)
        if not reachable(self._folders.root, self._uid):
            return (
                f"{self._folders.root} cannot be reached by the user {self._uid}, as whom commands run;"
                " set ENGRAM_SANDBOX_DIR to a folder that others may pass through"
            )
        await asyncio.to_thread(link_python, self._programs, self._uid)
        helper = await self._running_helper()
        if helper.landlock < helper.needed:
            return (
                f"this kernel has Landlock {max(helper.landlock, 0)}, and {helper.needed} is needed;"
                " use a newer kernel, with Landlock switched on (lsm=landlock,...)"
            )
        probe = probe_name()
        await self.create(probe)
        try:
            async with self.exec(probe, Command(["true"], timeout_seconds=10)) as events:
                ended = [event async for event in events][-1]
        finally:
            await self.destroy(probe)
        return None if ended == Ended(0) else f"a command that does nothing did not end well: {ended}"

    async def _running_helper(self) -> _Helper:
        async with self._starting:
            if self._helper is not None and self._helper.process.poll() is not None:
                log.warning("sandboxes.helper_died", extra=fields(code=self._helper.process.returncode))
                self._helper.control.close()
                self._helper = None
            if self._helper is None:
                self._helper = await asyncio.to_thread(_start, self._uid)
            return self._helper


class _Run:
    """One command at the helper: its pipes, and the line to its supervisor."""

    def __init__(self, helper: _Helper, order: dict[str, Any], stdin: bytes) -> None:
        self._order, self._input = order, stdin
        self._pipes, self._line = _handed_over(helper)
        self._tasks: list[asyncio.Task[Any]] = []
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(QUEUED)
        self._left = self._overflow = 0
        self._truncated = self._flooded = False

    async def events(self, output_bytes: int, seconds: float) -> AsyncIterator[Event]:
        """So many seconds may be waited for the command, not for whoever follows it."""
        self._left, self._overflow = output_bytes, output_bytes * OVERFLOW
        outcome = self._begun(self.outcome())
        self._begun(self._feed())
        self._begun(self._read_both())
        loop = asyncio.get_running_loop()
        while True:
            # Never around a yield: it would cancel whatever the follower is at.
            async with _patient(seconds):
                began = loop.time()
                event = await self._events.get()
                seconds -= loop.time() - began
            if event is None:
                break
            yield event
        async with _patient(seconds):
            found = await outcome
        yield self._ended(found)

    async def outcome(self) -> dict[str, Any]:
        """Give the order, and hear what became of it."""
        loop = asyncio.get_running_loop()
        order = json.dumps(self._order).encode()
        told = bytearray()
        try:
            await loop.sock_sendall(self._line, len(order).to_bytes(8, "big") + order)
            while part := await loop.sock_recv(self._line, CHUNK_BYTES):
                told += part
            found: dict[str, Any] = json.loads(told)
        except (OSError, ValueError) as error:
            raise SandboxUnavailable("the command's supervisor died; the command may have run") from error
        if "error" in found:
            raise SandboxUnavailable(f"the command could not be run: {found['error']}")
        return found

    async def close(self) -> None:
        """Hang up: a command that still runs is ended by its supervisor."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._line.close()
        for fd in self._pipes.values():
            os.close(fd)

    def _begun(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def _read_both(self) -> None:
        await asyncio.gather(self._read("stdout"), self._read("stderr"))
        await self._events.put(None)

    async def _read(self, stream: Stream) -> None:
        fd, loop = self._pipes[stream], asyncio.get_running_loop()
        while True:
            try:
                part = os.read(fd, CHUNK_BYTES)
            except BlockingIOError:
                await _ready(fd, loop.add_reader, loop.remove_reader)
                continue
            if not part:
                return
            await self._pass_on(stream, part)

    async def _pass_on(self, stream: Stream, part: bytes) -> None:
        taken = part[: self._left]
        self._left -= len(taken)
        if taken:
            await self._events.put(Output(stream, taken))
        if len(taken) < len(part):
            self._truncated = True
            self._overflow -= len(part) - len(taken)
        if self._overflow < 0 and not self._flooded:
            self._flooded = True
            self._line.shutdown(socket.SHUT_WR)

    async def _feed(self) -> None:
        fd, left = self._pipes["stdin"], memoryview(self._input)
        loop = asyncio.get_running_loop()
        with suppress(BrokenPipeError):
            while left:
                try:
                    left = left[os.write(fd, left[:CHUNK_BYTES]) :]
                except BlockingIOError:
                    await _ready(fd, loop.add_writer, loop.remove_writer)
        os.close(self._pipes.pop("stdin"))

    def _ended(self, found: dict[str, Any]) -> Ended:
        if refused := found.get("refused"):
            raise _refused(refused)
        ended_by: EndedBy | None = "output" if self._flooded else found["ended_by"]
        return Ended(found["exit_code"], ended_by, self._truncated)


def _handed_over(helper: _Helper) -> tuple[dict[str, int], socket.socket]:
    """Give the helper one end of each pipe and of the line; ours come back, never blocking."""
    stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    line, their_line = socket.socketpair()
    theirs = [stdin[0], stdout[1], stderr[1]]
    ours = {"stdin": stdin[1], "stdout": stdout[0], "stderr": stderr[0]}
    try:
        socket.send_fds(helper.control, [b"x"], [*theirs, their_line.fileno()])
    except OSError as error:
        line.close()
        for fd in ours.values():
            os.close(fd)
        raise SandboxUnavailable("the process that starts commands does not answer") from error
    finally:
        their_line.close()
        for fd in theirs:
            os.close(fd)
    line.setblocking(False)
    for fd in ours.values():
        os.set_blocking(fd, False)
    return ours, line


@asynccontextmanager
async def _patient(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise SandboxUnavailable(
            "the command's supervisor does not answer; the command may have run"
        ) from error


async def _ready(fd: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    ready = asyncio.get_running_loop().create_future()

    def now() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, now)
    try:
        await ready
    finally:
        remove(fd)


def _start(uid: int | None) -> _Helper:
    """A helper that is up: it has said what this kernel can."""
    control, theirs = socket.socketpair()
    control.settimeout(START_SECONDS)
    with theirs:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", str(HELPER), str(uid or 0)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # sandlock will not be imported without one, and not every user has it elsewhere.
            env={"HOME": "/"},
            start_new_session=True,
        )
    try:
        said = json.loads(control.recv(CHUNK_BYTES))
    except (OSError, ValueError) as error:
        process.kill()
        told = process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        control.close()
        raise SandboxUnavailable(f"the process that starts commands does not start: {told}") from error
    if process.stderr:
        process.stderr.close()
    return _Helper(process, control, said["landlock"], said["needed"])


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _write(fd: int, part: bytes, path: str) -> None:
    left = memoryview(part)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError as error:
        raise told(error, path) from error


def _refused(why: str) -> EngramError:
    """What the supervisor would not begin."""
    error: EngramError
    if why == "cwd":
        error = InputError("there is no such folder in the sandbox", fields={"cwd": "must be a folder"})
    else:
        error = _full() if why == "disk" else StateConflict("the sandbox runs no commands any more")
    error.effectless = True
    return error


def _full() -> StateConflict:
    return StateConflict("the sandbox's disk is full", hint="delete some of its files, or the sandbox")
