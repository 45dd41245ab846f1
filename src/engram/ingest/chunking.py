"""A document in passages: pieces small enough to answer with, cut where the document itself divides.

A passage never crosses a heading or a page. Within a section it is filled
with whole paragraphs, else whole sentences, table rows or lines of code, else
words; a run without any of these is cut where it must be. Each passage after
the first of a section begins with the end of the one before, and each of a
table with the table's first row, so that no sentence loses its neighbours. The
same blocks always give the same passages.

Sizes are counted in UTF-8 bytes: a Chinese character weighs three letters,
which is about what it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engram.kernel.errors import DocumentRefused

MAX_BYTES = 1_500
# More than the largest text makes of whole paragraphs: these are headings over nothing.
MAX_PASSAGES = 100_000
OVERLAP_BYTES = 200
HEADING_SEPARATOR = " › "
# A longer heading is a paragraph that somebody made bold.
_MAX_HEADING_CHARS = 200
_DEEPEST = 6
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
# To the end of a sentence, with the space after it. A run of dots is looked at once, from its first.
_SENTENCES = re.compile(
    r".+?(?:(?<![.!?…])[.!?…]++[\"'”’)\]]*+\s+|[。！？；]+[”’」』）]*\s*|\n+|\Z)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """kind: heading, text, table (a line for each row) or code; level: a heading's, from 1."""

    kind: str
    level: int
    text: str
    page: int | None


@dataclass(frozen=True, slots=True)
class Passage:
    """`heading` is the path of headings; the first `overlap` characters repeat what is elsewhere."""

    ordinal: int
    heading: str
    page: int | None
    content: str
    overlap: int


def passages(blocks: Iterable[Block]) -> list[Passage]:
    """Raises `DocumentRefused` for one that has too many."""
    found: list[Passage] = []
    for heading, page, body in _sections(blocks):
        for content, overlap in _filled(body):
            if len(found) == MAX_PASSAGES:
                raise DocumentRefused(
                    f"the document has more than {MAX_PASSAGES:,} passages", hint="split it"
                )
            found.append(Passage(len(found), heading, page, content, overlap))
    return found


def _sections(blocks: Iterable[Block]) -> Iterator[tuple[str, int | None, list[Block]]]:
    """Runs of blocks under one heading and on one page. A heading over nothing is its own text."""
    path: list[tuple[int, str]] = []
    body: list[Block] = []
    lonely: Block | None = None
    for block in blocks:
        if not block.text.strip():
            continue
        if block.kind == "heading" and len(block.text) <= _MAX_HEADING_CHARS:
            level = min(block.level, _DEEPEST)
            yield from _section(path, body)
            if lonely is not None and level <= path[-1][0]:
                yield from _section(path, [lonely])
            path = [*(above for above in path if above[0] < level), (level, _one_line(block.text))]
            body, lonely = [], block
            continue
        if body and body[-1].page != block.page:
            yield from _section(path, body)
            body = []
        body.append(block)
        lonely = None
    yield from _section(path, body)
    if lonely is not None:
        yield from _section(path, [lonely])


def _section(
    path: Sequence[tuple[int, str]], body: list[Block]
) -> Iterator[tuple[str, int | None, list[Block]]]:
    if body:
        heading = HEADING_SEPARATOR.join(text for _, text in path)
        yield heading, body[0].page, body


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _filled(body: Sequence[Block]) -> Iterator[tuple[str, int]]:
    """Contents with their overlaps, each as full as it may be."""
    before, fresh, size = "", "", 0
    for unit, head in _units(body):
        weight = len(unit.encode())
        if fresh.strip() and size + weight > MAX_BYTES:
            yield _passage(before, fresh)
            before = head or _tail(fresh)
            fresh, size = "", len(before.encode())
            if size + weight > MAX_BYTES:
                before, size = "", 0
        fresh += unit
        size += weight
    if fresh.strip():
        yield _passage(before, fresh)


def _passage(before: str, fresh: str) -> tuple[str, int]:
    if not before:
        return fresh.strip("\n").rstrip(), 0
    return (before + fresh).rstrip(), len(before)


def _units(body: Sequence[Block]) -> Iterator[tuple[str, str]]:
    """What is not cut any further, and the line to repeat where a passage begins with it."""
    for number, block in enumerate(body):
        end = "\n\n" if number + 1 < len(body) else ""
        head = ""
        pieces = list(_pieces(block))
        for at, piece in enumerate(pieces):
            yield piece + (end if at + 1 == len(pieces) else ""), head
            if block.kind == "table" and at == 0 and len(piece.encode()) <= OVERLAP_BYTES:
                head = piece


def _pieces(block: Block) -> Iterator[str]:
    text = block.text.strip("\n") if block.kind == "code" else block.text.strip()
    lined = block.kind in ("table", "code")
    whole = not lined and len(text.encode()) <= MAX_BYTES - OVERLAP_BYTES - 2
    pattern = _LINES if lined else _SENTENCES
    for unit in [text] if whole else pattern.findall(text):
        yield from _cut(unit)


def _cut(unit: str) -> Iterator[str]:
    """In pieces that fit beside an overlap and a blank line, at spaces where there are any."""
    most = MAX_BYTES - OVERLAP_BYTES - 2
    start = 0
    while start < len(unit):
        # A window, because looking at all that is left each time would take for ever.
        fits = unit[start : start + most].encode()[:most].decode("utf-8", "ignore")
        end = len(fits)
        if start + end < len(unit) and (space := fits.rfind(" ", end // 2)) > 0:
            end = space + 1
        yield unit[start : start + end]
        start += end


def _tail(text: str) -> str:
    """The last sentences that fit the overlap; else the last words, or as much as fits."""
    kept = ""
    for sentence in reversed(_SENTENCES.findall(text)):
        if len((sentence + kept).encode()) > OVERLAP_BYTES:
            break
        kept = sentence + kept
    return (kept or _last_words(text)).lstrip()


def _last_words(text: str) -> str:
    end = text.encode()[-OVERLAP_BYTES:].decode("utf-8", "ignore")
    space = end.rstrip().find(" ")
    return end[space + 1 :]
