"""A document's text and structure, read in another process that may die of it.

`Parsers` keeps a few children (`parser_child.py`, behind the walls of `confined.py`) and lends each to one
document at a time. A child is replaced after some hundred documents, and at
once after anything that was not a clean answer. Starting one takes a tenth of
a second, reading a Markdown file of 20 KB a millisecond: that is why they
are kept.

What a child cannot read ends in `DocumentRefused`, with words for the person
who sent it; so does a document that needs more than a limit allows. A child
that dies for no known reason is `ParserDied`, which another try may outlive.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.ingest.chunking import Block
from engram.kernel.errors import DocumentRefused, ParserDied

REFUSALS = {
    "encrypted": "the document is protected by a password; save it without one",
    "corrupt": "the document is damaged, or not what it looks like",
    "empty": "the document has no text",
    "no_text": "the document has no text; a scan has to go through text recognition first",
    "bomb": "the document unpacks to far more than a document has",
    "pages": "the document has too many pages; split it",
    "sheet": "a sheet of the workbook is too large to be read: delete its empty rows",
    "memory": "reading the document needs more memory than a parser may have",
}
_WALLS = Path(__file__).with_name("confined.py")
_CHILD = Path(__file__).with_name("parser_child.py")
_KINDS = frozenset({"heading", "text", "table", "code"})
_SPAN = struct.Struct(">I")
_DOCUMENTS_PER_CHILD = 500
_ENDING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one document may use. The defaults read any document that people wrote."""

    memory_bytes: int = 1 << 30
    cpu_seconds: int = 60
    wall_seconds: float = 180.0
    unpacked_bytes: int = 512 << 20
    pages: int = 20_000
    text_bytes: int = 64 << 20


class Parsers:
    def __init__(
        self,
        *,
        at_once: int = 2,
        limits: Limits = Limits(),  # noqa: B008
        documents_per_child: int = _DOCUMENTS_PER_CHILD,
    ) -> None:
        self.started = 0
        self._limits = limits
        self._documents_per_child = documents_per_child
        self._at_once = at_once
        self._turns = asyncio.Semaphore(at_once)
        self._living = 0
        self._idle: list[_Child] = []

    async def parse(self, content: Iterable[bytes], media_type: str, *, owner: str = "") -> list[Block]:
        """A child reads for one owner only: what a document did to it is no other owner's trouble."""
        async with self._turns:
            child = await self._lent(owner)
            try:
                blocks = await self._within_limits(child, content, media_type)
            except DocumentRefused as error:
                await self._done(child, clean=child.answered)
                raise error
            except BaseException:
                await self._end(child)
                raise
            await self._done(child, clean=True)
            return blocks

    async def shut(self) -> None:
        while self._idle:
            await self._end(self._idle.pop())

    async def _lent(self, owner: str) -> _Child:
        for child in self._idle:
            if child.owner == owner:
                self._idle.remove(child)
                return child
        while self._living >= self._at_once and self._idle:
            await self._end(self._idle.pop(0))
        self.started += 1
        self._living += 1
        try:
            return await _Child.start(self._limits, owner)
        except BaseException:
            self._living -= 1
            raise

    async def _end(self, child: _Child) -> None:
        self._living -= 1
        await child.kill()

    async def _done(self, child: _Child, *, clean: bool) -> None:
        if clean and child.served < self._documents_per_child:
            self._idle.append(child)
        else:
            await self._end(child)

    async def _within_limits(self, child: _Child, content: Iterable[bytes], media_type: str) -> list[Block]:
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                return await child.read(content, media_type)
        except TimeoutError:
            raise DocumentRefused(
                f"reading the document took longer than {self._limits.wall_seconds:g} s", hint="split it"
            ) from None


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, limits: Limits, owner: str) -> None:
        self.owner = owner
        self.served = 0
        self.answered = False
        self._process = process
        self._limits = limits

    @classmethod
    async def start(cls, limits: Limits, owner: str) -> _Child:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(_WALLS), str(limits.memory_bytes), str(_CHILD),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"TMPDIR": tempfile.gettempdir()},
                cwd="/",
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ParserDied(f"the parser cannot be started: {error.strerror}") from error
        return cls(process, limits, owner)

    async def read(self, content: Iterable[bytes], media_type: str) -> list[Block]:
        self.served += 1
        self.answered = False
        try:
            await self._ask(content, media_type)
            return await self._blocks()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise await self._why_dead() from error

    async def _ask(self, content: Iterable[bytes], media_type: str) -> None:
        limits = self._limits
        asked = {
            "media_type": media_type,
            "cpu_seconds": limits.cpu_seconds,
            "unpacked_bytes": limits.unpacked_bytes,
            "pages": limits.pages,
        }
        await self._send(json.dumps(asked).encode())
        for piece in content:
            if piece:  # an empty one is the end
                await self._send(piece)
        await self._send(b"")

    async def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(_SPAN.pack(len(message)) + message)
        await self._process.stdin.drain()

    async def _blocks(self) -> list[Block]:
        blocks: list[Block] = []
        left = self._limits.text_bytes
        while True:
            message, size = await self._receive(left)
            left -= size
            if isinstance(message, list):
                blocks.extend(_block(entry) for entry in message)
                continue
            self.answered = True
            why = message.get("refused")
            if why == "unprepared":
                raise ParserDied(
                    "the parser cannot load what reads PDFs",
                    hint="it needs 8 MB in the folder for temporary files, and may not be forbidden to"
                    " run what is there: TMPDIR=... names another folder",
                )
            if why:
                raise DocumentRefused(REFUSALS.get(str(why), REFUSALS["corrupt"]))
            return blocks

    async def _receive(self, most: int) -> tuple[Any, int]:
        """The next message and its size; one that is larger than may be is not read."""
        assert self._process.stdout is not None  # noqa: S101
        (size,) = _SPAN.unpack(await self._process.stdout.readexactly(_SPAN.size))
        if size > most:
            raise DocumentRefused("the document has more text than may be kept", hint="split it")
        try:
            message = json.loads(await self._process.stdout.readexactly(size))
        except ValueError as error:
            raise _nonsense() from error
        if not isinstance(message, list | dict):
            raise _nonsense()
        return message, size

    async def _why_dead(self) -> DocumentRefused | ParserDied:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_SECONDS):
                await self._process.wait()
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return DocumentRefused(
                f"reading the document took more than {self._limits.cpu_seconds} s of processor time",
                hint="split it",
            )
        how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        return ParserDied(
            f"the parser died of this document ({how})", hint="it may have run out of its memory limit"
        )

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        # asyncio tells of the end of a process only when its output was read to the end,
        # and stops reading by itself when nobody takes what has come.
        assert self._process.stdout is not None  # noqa: S101
        while await self._process.stdout.read(1 << 16):
            pass
        await self._process.wait()
        # The pipes would otherwise be closed by the garbage collector, with a warning.
        self._process._transport.close()  # type: ignore[attr-defined]


def _block(entry: Any) -> Block:
    match entry:
        case [str(kind), int(level), str(text), int() | None as page] if kind in _KINDS:
            # Whatever it says, it can be kept: no NUL, no half characters, no page before the first.
            kept = text.replace("\0", "").encode("utf-8", "replace").decode()
            return Block(kind, level, kept, page if page and 0 < page < 1 << 31 else None)
    raise _nonsense()


def _nonsense() -> ParserDied:
    return ParserDied("the parser answered nonsense")
