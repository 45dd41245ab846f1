"""What a sandbox driver is: the part that makes folders and runs commands in them.

A driver knows nothing of owners, rows or time to live. Everything is by the
sandbox's id, and everything may be asked twice: to make what is there, or to
destroy what is gone, is no error. `tests/sandboxes/driver_contract.py` is what
any driver must pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

Stream = Literal["stdout", "stderr"]
# Why a command was ended before it ended by itself.
EndedBy = Literal["time", "cpu", "disk", "output", "stop"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may use; `disk_bytes` is the sandbox's, whoever wrote it."""

    memory_bytes: int = 512 << 20
    cpu_seconds: float = 300.0
    processes: int = 64
    output_bytes: int = 1 << 20
    disk_bytes: int = 512 << 20
    file_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Command:
    argv: Sequence[str]
    timeout_seconds: float
    stdin: bytes = b""
    cwd: str = "."
    env: Mapping[str, str] = field(default_factory=dict)
    profile: str = "default"


@dataclass(frozen=True, slots=True)
class Output:
    """Some of what the command wrote, as it comes."""

    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a command. `truncated`: it wrote more than was passed on."""

    exit_code: int
    ended_by: EndedBy | None = None
    truncated: bool = False


Event = Output | Ended


class Driver(Protocol):
    @property
    def profiles(self) -> Sequence[str]:
        """What a sandbox may be made as; the first is the default."""
        ...

    async def why_not(self) -> str | None:
        """Why this driver cannot work here, for people; None: it can."""
        ...

    async def create(self, sandbox_id: str) -> None:
        """Make it; to make it again changes nothing."""
        ...

    async def has(self, sandbox_id: str) -> bool:
        """Whether it is here, whole."""
        ...

    def exec(self, sandbox_id: str, command: Command) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Run a command. Leaving the block ends it and everything it started."""
        ...

    async def put_file(self, sandbox_id: str, path: str, content: AsyncIterator[bytes]) -> int:
        """Write a file, whole or not at all; its size."""
        ...

    async def get_file(self, sandbox_id: str, path: str) -> tuple[int, AsyncIterator[bytes]]:
        """A file's size and its bytes."""
        ...

    async def delete_file(self, sandbox_id: str, path: str) -> None:
        """Remove a file."""
        ...

    async def stop(self, sandbox_id: str) -> None:
        """End what runs in it, in whatever process that was started; nothing runs in it again."""
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """End what runs in it and remove it."""
        ...

    async def known(self) -> list[str]:
        """The ids of all that are here, whole or not."""
        ...

    async def close(self) -> None:
        """End what this driver has running."""
        ...
