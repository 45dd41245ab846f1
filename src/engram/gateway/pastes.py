"""Finds what was pasted into a text: diffs, stack traces, logs, long code. Pure, and linear in its input.

`pieces` takes a text apart. A pasted block that is long (more than `MAX_LINES`
lines or `MAX_CHARS` characters) is a `Blob`; everything else stays as it is
written, short blocks included. Blocks are recognised by their fence, or by what
their lines look like: a unified diff by its hunks' own counts, a trace or a log
when at least half of its lines could be nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engram.kernel.content import payload_sha

MAX_LINES = 12
MAX_CHARS = 1_200
_LOOKED_AT = 300  # characters of a line that say what it is

BlobKind = Literal["diff", "trace", "log", "code", "text"]

_FENCE = re.compile(r"(?P<indent>[ \t]{0,8})(?P<mark>`{3,16}(?!`)|~{3,16}(?!~))(?P<info>[^`]*)$")
_HUNK = re.compile(r"@@ -\d{1,9}(?:,(?P<old>\d{1,9}))? \+\d{1,9}(?:,(?P<new>\d{1,9}))? @@")
_DIFF_START = re.compile(r"diff --?\S|Index: \S|@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@")
_DIFF_HEADER = re.compile(
    r"diff --?\S|index [0-9a-f]|Index: |={20,}|--- \S|\+\+\+ \S|(?:old|new|deleted file|new file) mode "
    r"|(?:dis)?similarity index|(?:rename|copy) (?:from|to) |Binary files "
)
_TRACE = re.compile(
    r"Traceback \(most recent call last\)|\s+File \".*\", line \d|\s*[~^][\s~^]*$|\s+at \S|Caused by: "
    r"|\s+\.\.\. \d+ more|goroutine \d+ \[|panic: |thread '.*' panicked|\s*#\d+\s+0x|\s*\d+: 0x"
    r"|[A-Za-z_][\w.$]*(?:Error|Exception|Interrupt|Warning)(?::|\s*$)"
)
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL|SEVERE)"
_LOG = re.compile(
    r"\s{0,4}[\[(]?(?:\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\d\d:\d\d:\d\d\b|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
    rf"|{_LEVEL}\b[\]):]?(?:[\s:|-]|$)|[IWEF]\d{{4}} \d\d:\d\d|\d{{10}}\.\d{{3}}|(?:time|ts|level)=\S"
    r"|npm ERR!|[\w./-]{1,200}\.\w{1,8}:\d+(?::\d+)?:\s|\{\"(?:time|ts|timestamp|level|severity|msg)\":)"
)


@dataclass(frozen=True, slots=True)
class Blob:
    """A block that is kept elsewhere: exactly the bytes that were pasted."""

    kind: BlobKind
    content: str
    lines: int
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, kind: BlobKind, content: str) -> Blob:
        lines = content.count("\n") + (not content.endswith("\n"))
        return cls(kind, content, lines, len(content.encode()), payload_sha(content))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text, in order. `shown` is what stands in its place unless it has a `blob`.

    `whole` must not be cut in two; `chars` is its length in the source.
    """

    shown: str
    chars: int
    whole: bool = False
    blob: Blob | None = None


def pieces(text: str) -> list[Piece]:
    """The text as plain pieces, short blocks and blobs."""
    lines = text.split("\n")
    lines = [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    found: list[Piece] = []
    plain: list[str] = []
    at = 0
    while at < len(lines):
        end, piece = _block(lines, at)
        if piece is None:
            plain += lines[at:end]
        else:
            found += [*_plain(plain), piece]
            plain = []
        at = end
    return found + _plain(plain)


def blobs(text: str) -> list[Blob]:
    return [piece.blob for piece in pieces(text) if piece.blob]


def _block(lines: Sequence[str], at: int) -> tuple[int, Piece | None]:
    """Where the block at this line ends, and what becomes of it; None leaves it in the text."""
    if fence := _FENCE.match(_start(lines[at])):
        return _fenced(lines, at, fence)
    end, kind = _pasted(lines, at)
    source = "".join(lines[at:end])
    # A paragraph of prose may begin like a log; three lines that do are none.
    if kind is None or end - at < 3 or not _is_long(end - at, len(source)):
        return end, None
    return end, Piece("", len(source), blob=Blob.of(kind, source))


def _fenced(lines: Sequence[str], at: int, fence: re.Match[str]) -> tuple[int, Piece]:
    mark, indent = fence["mark"], len(fence["indent"])
    closed = next((n for n in range(at + 1, len(lines)) if _closes(lines[n], mark)), None)
    last = len(lines) if closed is None else closed
    end = last if closed is None else last + 1
    source = "".join(lines[at:end])
    inside = "".join(_dedented(line, indent) for line in lines[at + 1 : last])
    if _is_long(last - at - 1, len(inside)):
        kind = _named(fence["info"]) or _kind_of(lines, at + 1, last) or "code"
        return end, Piece("", len(source), blob=Blob.of(kind, inside))
    shown = source if closed is not None else f"{source.rstrip()}\n{fence['indent']}{mark}\n"
    return end, Piece(_unix(shown), len(source), whole=True)


def _pasted(lines: Sequence[str], at: int) -> tuple[int, BlobKind | None]:
    """The end of the diff, trace or log that starts at this line; at least one line on."""
    if (end := _diff_end(lines, at)) > at:
        return end, "diff"
    return _told_end(lines, at)


def _diff_end(lines: Sequence[str], at: int) -> int:
    """Just past the diff that starts here; `at` itself if none does."""
    if not _starts_diff(lines, at):
        return at
    end = at
    while at < len(lines):
        if hunk := _HUNK.match(_start(lines[at])):
            at = end = _hunk_end(lines, at + 1, int(hunk["old"] or 1), int(hunk["new"] or 1))
        elif _DIFF_HEADER.match(lines[at][:_LOOKED_AT]):
            at = end = at + 1
        elif not lines[at].strip():
            at += 1
        else:
            break
    return end


def _starts_diff(lines: Sequence[str], at: int) -> bool:
    if _DIFF_START.match(lines[at][:_LOOKED_AT]):
        return True
    return lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")


def _hunk_end(lines: Sequence[str], at: int, old: int, new: int) -> int:
    """By the hunk's own counts, so that a list after the diff is not taken for it."""
    for n in range(at, len(lines)):
        sign = lines[n][:1]
        if sign != "\\" and old <= 0 and new <= 0:
            return n
        if sign not in (" ", "+", "-", "\\", "\n", "\r"):
            return n
        old -= sign in (" ", "-", "\n", "\r")
        new -= sign in (" ", "+", "\n", "\r")
    return len(lines)


def _told_end(lines: Sequence[str], at: int) -> tuple[int, BlobKind | None]:
    """The end of a trace or log. Indented and empty lines may stand between its own."""
    traces = logs = others = 0
    end = n = at
    while n < len(lines):
        line = lines[n][:_LOOKED_AT]
        if _TRACE.match(line):
            traces += 1
        elif _LOG.match(line):
            logs += 1
        elif n > at and line[:1] in (" ", "\t") and line.strip():
            others += 1
        elif n > at and not line.strip():
            n += 1
            continue
        else:
            break
        n += 1
        end = n
    if traces + logs < max(others, 1):
        return max(end, at + 1), None
    return end, "trace" if traces >= logs else "log"


def _kind_of(lines: Sequence[str], at: int, end: int) -> BlobKind | None:
    """What a fenced block holds, by its beginning."""
    head = [line for line in lines[at : min(end, at + 2 * MAX_LINES)] if line.strip()]
    return _pasted(head, 0)[1] if head else None


def _named(info: str) -> BlobKind | None:
    match info.split()[:1]:
        case ["diff" | "patch"]:
            return "diff"
        case ["log" | "logs"]:
            return "log"
    return None


def _plain(lines: list[str]) -> list[Piece]:
    text = "".join(lines)
    return [Piece(_unix(text), len(text))] if text else []


def _closes(line: str, mark: str) -> bool:
    return line.lstrip(" \t").startswith(mark) and not line.strip().strip(mark[0])


def _dedented(line: str, indent: int) -> str:
    """Without the indentation that its fence has, as Markdown reads it."""
    space = len(line[:indent]) - len(line[:indent].lstrip(" \t"))
    return line[space:]


def _start(line: str) -> str:
    return line[:_LOOKED_AT].rstrip("\r\n")


def _is_long(lines: int, chars: int) -> bool:
    return lines > MAX_LINES or chars > MAX_CHARS


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")
