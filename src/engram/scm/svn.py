"""Subversion: `svn log --xml`, parsed as it comes.

Revisions never change their order and are never taken away, so the watermark is
the last one, `{"last_rev": …}`, and moves with every page. A revision may lack
its author, its date and its message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from typing import Any
from xml.parsers import expat

from engram.kernel.errors import SourceError, SourceRefused
from engram.scm.programs import Program, ProgramFailed
from engram.scm.source import (
    MAX_MESSAGE_CHARS,
    MAX_NAME_CHARS,
    MAX_PATH_CHARS,
    MAX_PATHS,
    Batch,
    Facts,
    Marks,
    Move,
    Page,
    bulk_reason,
    text,
)
from engram.scm.store import Repo, svn_key
from engram.scm.tries import Tries, three_tries

PAGE = 500
# svn's own numbers: authentication failed, no more credentials, authorisation failed, access refused.
_REFUSED = ("E170001", "E215004", "E220004", "E175013")
# Nothing is there: bad URL or path.
_UNUSABLE = ("E180001", "E160013", "E125002", "E205011", "E200009", "E170000")


class SvnSource:
    def __init__(self, repo: Repo, *, silent_seconds: float, tries: Tries) -> None:
        self._repo = repo
        self._tries = tries
        self._svn = Program(["svn"], {}, silent_seconds)

    async def pages(self, marks: Marks) -> AsyncGenerator[Page, None]:
        key = svn_key(self._repo.repo_id)
        mark: dict[str, int] | None = marks.at(key)
        head = await three_tries(self._head, self._tries)
        while (last := int((mark or {}).get("last_rev", 0))) < head:
            try:
                async with aclosing(self._pages_between(last + 1, head)) as pages:
                    async for rows, reached in pages:
                        moved = {"last_rev": reached}
                        yield Page("revisions", rows, move=Move(key, mark, moved))
                        mark = moved
                        self._tries.succeeded()
            except SourceError as error:
                await self._tries.after(error)

    async def again(self, source_type: str, source_id: str) -> Facts:
        rev = int(source_id.removeprefix("r"))
        async with aclosing(self._revisions(rev, rev)) as found:
            return [revision async for revision in found]

    async def patch(self, source_type: str, source_id: str) -> AsyncGenerator[bytes, None]:
        rev = int(source_id.removeprefix("r"))
        arguments = (
            "diff",
            "--non-interactive",
            "--internal-diff",
            "--git",
            "-c",
            str(rev),
            "--",
            self._at(rev),
        )
        try:
            async with aclosing(self._svn.stream(*arguments)) as pieces:
                async for piece in pieces:
                    yield piece
        except ProgramFailed as failed:
            raise self._explained(failed) from failed

    async def close(self) -> None:
        """Nothing is held between two calls."""

    async def _pages_between(self, first: int, last: int) -> AsyncGenerator[tuple[Facts, int], None]:
        """Rows, and the revision up to which nothing is missing."""
        batch = Batch(PAGE)
        async with aclosing(self._revisions(first, last)) as found:
            async for revision in found:
                if batch.is_full_with(revision):
                    yield batch.rows, revision["rev_num"]
                    batch = Batch(PAGE)
        yield batch.rows, last

    async def _revisions(self, first: int, last: int) -> AsyncGenerator[dict[str, Any], None]:
        asked = (
            "log",
            "--xml",
            "--verbose",
            "--non-interactive",
            "-r",
            f"{first}:{last}",
            "--",
            self._at(last),
        )
        parser = LogParser()
        try:
            async with aclosing(self._svn.stream(*asked)) as pieces:
                async for piece in pieces:
                    for revision in parser.feed(piece):
                        yield revision
        except ProgramFailed as failed:
            raise self._explained(failed) from failed
        parser.close()

    async def _head(self) -> int:
        try:
            asked = (
                "info",
                "--non-interactive",
                "--show-item",
                "revision",
                "-r",
                "HEAD",
                "--",
                f"{self._repo.url}@",
            )
            return int(await self._svn.output(*asked, most=1 << 16))
        except ProgramFailed as failed:
            raise self._explained(failed) from failed
        except ValueError as error:
            raise SourceError(f"svn gave no revision number for {self._repo.url}") from error

    def _at(self, revision: int) -> str:
        """The URL as it was then; a name that holds an @ is not taken for one."""
        return f"{self._repo.url}@{revision}"

    def _explained(self, failed: ProgramFailed) -> SourceError:
        lines = [line for line in failed.complaint.splitlines() if line.strip()]
        message = f"svn could not read {self._repo.url}: {lines[-1] if lines else f'status {failed.status}'}"
        if any(number in failed.complaint for number in _REFUSED):
            hint = (
                f"let this user's svn keep a password that may read it: run `svn info {self._repo.url}` once"
            )
            return SourceRefused(message, hint=hint)
        if any(number in failed.complaint for number in _UNUSABLE):
            return SourceError(message, retryable=False, hint="see whether `svn info` can read it")
        return SourceError(message)


class LogParser:
    """`svn log --xml`, entry by entry. Entities and document types are refused: svn writes none."""

    def __init__(self) -> None:
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.StartDoctypeDeclHandler = _refuse
        self._parser.EntityDeclHandler = _refuse
        self._entry: dict[str, Any] = {}
        self._words: list[str] = []
        self._room = 0
        self._path: dict[str, Any] = {}
        self._found: Facts = []

    def feed(self, piece: bytes) -> Facts:
        self._parse(piece, last=False)
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        self._parse(b"", last=True)

    def _parse(self, piece: bytes, *, last: bool) -> None:
        try:
            self._parser.Parse(piece, last)
        except expat.ExpatError as error:
            raise SourceError(f"svn wrote XML that cannot be read: {error}") from error

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._words, self._room = [], MAX_MESSAGE_CHARS
        if name == "logentry":
            self._entry = {"rev_num": int(attributes["revision"]), "paths": [], "files": 0}
        elif name == "path":
            self._path = {"action": attributes.get("action", "")}
            if "copyfrom-path" in attributes:
                self._path["from"] = text(attributes["copyfrom-path"], MAX_PATH_CHARS)

    def _text(self, words: str) -> None:
        """No more of a text is held than is kept."""
        if self._room > 0:
            self._words.append(words[: self._room])
            self._room -= len(words)

    def _end(self, name: str) -> None:
        said = "".join(self._words)
        if name == "author":
            self._entry["author_name"] = text(said, MAX_NAME_CHARS)
        elif name == "date":
            self._entry["committed_at"] = _date(said)
        elif name == "msg":
            self._entry["message"] = text(said)
        elif name == "path":
            self._entry["files"] += 1
            if self._entry["files"] <= MAX_PATHS:
                self._entry["paths"].append({**self._path, "path": text(said, MAX_PATH_CHARS)})
        elif name == "logentry":
            entry = {"author_name": None, "committed_at": None, "message": "", **self._entry}
            self._found.append({**entry, "bulk_reason": bulk_reason(entry["files"], None)})
        self._words = []


def _date(said: str) -> str | None:
    try:
        return datetime.fromisoformat(said).isoformat()
    except ValueError:
        return None


def _refuse(*_: object) -> None:
    raise SourceError("svn wrote XML with a document type or an entity", retryable=False)
