"""Processes: is this pid really that server, and does it live?

A pid alone says nothing: it may be stale, recycled by another program, or a
zombie that still answers `kill(pid, 0)`. A server is recognised by its
executable and its working folder (both servers work in their data folder),
and is the same process only while its start time is the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engram.embedded.accounts import Account
from engram.embedded.folders import open_private

_PROC = Path("/proc")
_DEAD = frozenset("ZXx")
_children: set[int] = set()


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The live process with this pid, if there is one."""
        state, started = _state(pid)
        return cls(pid, started) if state and state not in _DEAD else None

    def alive(self) -> bool:
        reap()
        return Process.of(self.pid) == self

    def is_server(self, program: str, folder: Path) -> bool:
        try:
            executable = os.readlink(_PROC / str(self.pid) / "exe").removesuffix(" (deleted)")
            return os.path.basename(executable) == program and os.path.samefile(
                _PROC / str(self.pid) / "cwd", folder
            )
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def launch(command: Sequence[str], *, folder: Path, log: Path, account: Account) -> Process:
    """Start a server that outlives us: own session, own log, none of our files or environment."""
    out = open_private(log, os.O_WRONLY | os.O_APPEND)
    try:
        child = subprocess.Popen(  # noqa: S603
            [*account.prefix, *command],
            cwd=folder,
            env=server_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            umask=0o077,
            **account.options(),
        )
    finally:
        os.close(out)
    # It is meant to go on without us: `reap` waits for it, and Popen must not complain that nobody did.
    child.returncode = 0
    _children.add(child.pid)
    return Process(child.pid, _state(child.pid)[1])


def server_environment() -> dict[str, str]:
    """A server gets no secret of ours, and no PG* variable that would change what it does."""
    kept = ("PATH", "LD_LIBRARY_PATH", "TZ")
    return {"LC_ALL": "C", **{name: os.environ[name] for name in kept if name in os.environ}}


def reap() -> None:
    """Bury the servers that this process started and that have ended since."""
    for pid in tuple(_children):
        try:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            ended = True
        if ended:
            _children.discard(pid)


def servers_in(program: str, folder: Path) -> Iterator[Process]:
    """Every live process of `program` that works in `folder`, whoever started it.

    Its callers end what they find, so the name the kernel keeps must agree too.
    """
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _name(int(entry.name)) == program:
            process = Process.of(int(entry.name))
            if process and process.is_server(program, folder):
                yield process


def _name(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str]:
    """The state letter and the start time; empty when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return "", ""
    # The name, in parentheses, may contain spaces and parentheses itself.
    after_name = text.rpartition(")")[2].split()
    return after_name[0], after_name[19]


os.register_at_fork(after_in_child=_children.clear)
