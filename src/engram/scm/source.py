"""What a source of facts is: pages of rows, each with the watermark that stands for it.

A row is a plain dict in the shape that `store.sql` reads, made of text that
PostgreSQL can hold. A source reads; it never writes a row or moves a watermark.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Facts = list[dict[str, Any]]
Table = Literal["commits", "revisions", "mrs"]

# The name that evidence has for the rows of each table, and the column that identifies one.
SOURCE_TYPE: dict[Table, str] = {"commits": "git", "revisions": "svn", "mrs": "mr"}
_IDENTITY: dict[Table, str] = {"commits": "commit_sha", "revisions": "rev_num", "mrs": "mr_iid"}

MAX_MESSAGE_CHARS = 65_536
MAX_NAME_CHARS = 1_000
MAX_PATH_CHARS = 4_096
MAX_PATHS = 1_000
# Of all rows of a page together, so that a page of large changes is not a large page.
MAX_PATHS_OF_A_PAGE = 20_000
BULK_FILES = 300
BULK_LINES = 20_000
# What PostgreSQL and Python can both tell: from 1970 to the end of the year 9999.
LATEST_SECOND = 253_402_300_799


@dataclass(frozen=True, slots=True)
class Move:
    """A key of `logbook.kv`, from the value it must have (None: it must not be there) to the next."""

    key: str
    expected: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Page:
    """What is written together.

    `progress` is how far a pass has come that moves its watermark at the end only;
    `pass_is_over` removes it. `superseded` names commits that no ref reaches any
    more; with `all_others`, those that this pass did not see are superseded too.
    """

    table: Table
    rows: Facts = field(default_factory=list)
    move: Move | None = None
    progress: Any = None
    pass_is_over: bool = False
    pass_number: int = 0
    superseded: Sequence[str] = ()
    all_others: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """Where the last sync came to. `run_id` numbers a pass that begins now."""

    run_id: int
    values: dict[str, Any]

    def at(self, key: str) -> Any:
        return self.values.get(key)


class Source(Protocol):
    def pages(self, marks: Marks) -> AsyncGenerator[Page, None]:
        """Everything that is new since the marks. `SourceError`: it was tried three times."""

    async def again(self, source_type: str, source_id: str) -> Facts:
        """One fact once more; empty when it is gone."""

    def patch(self, source_type: str, source_id: str) -> AsyncGenerator[bytes, None]:
        """The diff of one fact, in pieces."""

    async def close(self) -> None: ...


def identity(table: Table, row: dict[str, Any]) -> str:
    """How evidence names a row within its repository."""
    name = str(row[_IDENTITY[table]])
    return f"r{name}" if table == "revisions" else name


@dataclass
class Batch:
    """Rows until they make a page: so many, or fewer if they name many paths."""

    most: int
    rows: Facts = field(default_factory=list)
    paths: int = 0

    def is_full_with(self, row: dict[str, Any]) -> bool:
        self.rows.append(row)
        self.paths += len(row["paths"])
        return len(self.rows) >= self.most or self.paths >= MAX_PATHS_OF_A_PAGE


def text(raw: bytes | str | None, most: int = MAX_MESSAGE_CHARS) -> str:
    """Somebody else's bytes as text that can be kept: broken parts replaced, cut at `most`."""
    if raw is None:
        return ""
    said = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return said[:most].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def second(raw: bytes | str) -> int | None:
    """Seconds since 1970; None for what is no number. A date beyond what can be told is its limit."""
    try:
        return min(max(int(raw), 0), LATEST_SECOND)
    except ValueError:
        return None


def bulk_reason(files: int | None, lines: int | None) -> str | None:
    """Why a change says little about any one thing, or None."""
    if (files or 0) > BULK_FILES:
        return f"{files} files"
    if (lines or 0) > BULK_LINES:
        return f"{lines} lines"
    return None
