"""Reads documents in a process of its own: files are hostile, and parsers have faults.

Started by `parsing.py` behind the walls of `confined.py`: no environment, no
descriptors but its pipes, no network, no files. It imports nothing of engram: what
it says is checked by the parent like any stranger's word. It serves one document
after another, because starting takes much longer than reading a page.

On both pipes a message is its length in four bytes, then its content. In come
a JSON object about the document and the file's bytes in pieces, ended by an
empty one. Out go lists of blocks, `[kind, level, text, page]`, and last an
object: `{"done": true}`, or `{"refused": why}` with one of the words that
`parsing.REFUSALS` explains.
"""

from __future__ import annotations

import codecs
import html
import io
import json
import os
import re
import resource
import secrets
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO
from xml.etree import ElementTree

Block = tuple[str, int, str, int | None]

_BATCH_CHARS = 200_000
_ZIP_TYPES = "application/vnd.openxmlformats-officedocument."
_WORKBOOK = f"{_ZIP_TYPES}spreadsheetml.sheet"
_PLAIN = {"text/plain", "text/markdown", "text/csv", "text/html"}
_MAX_MEMBERS = 20_000
_MAX_RATIO = 200
# As much of a page's text as its headings and paragraphs must have to be believed.
_MOST_OF = 0.95
# Of the characters of a Chinese text: as many at least are common ones, as few stand alone in a word of letters.
_COMMON, _AMONG_LETTERS = 0.3, 0.5
_HEAD = re.compile(r"<head\b.*?</head\s*>|<title\b.*?</title\s*>|<meta\b[^>]*>", re.IGNORECASE | re.DOTALL)
_HEADING = re.compile(r"(?P<marks>#{1,6})(?:[ \t]+|$)")
_FENCE = re.compile(r"(?P<fence>`{3,}|~{3,})")
_RULE = re.compile(r"(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,}")
_LISTED = re.compile(r"\s*(?:[-*+>]|\d+[.)])\s")
_DELIMITER = re.compile(r"(?=[^-]*-)[\s|:-]++")
_CELLS = re.compile(r"(?<!\\)\|")
_LINK = re.compile(r"\[([^\[\]]*)\]\([^)\[]*\)")
# A quote that is never closed is none.
_TAG = re.compile(r"""<(?P<end>/?)(?P<name>[A-Za-z][^\s/>]*+)(?P<rest>(?:[^"'>]|"[^"]*+"|'[^']*+')*+)>""")
_QUOTED = re.compile(r""""[^"]*+"|'[^']*+'""")
_TARGET = re.compile(r"\]\([^()\s]*\)")
_CELL_WITH_SOMETHING = re.compile(rb"<(?:[\w.-]+:)?(?:v|is)[\s>]")
_FOREIGN = re.compile(r"(?P<before>[A-Za-z])?(?P<run>[^\x00-\x7f]+)(?P<after>[A-Za-z])?")
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


EMPTY_PDF = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
)
_ready: set[str] = set()


class Refused(Exception):
    """`args[0]` is a key of `parsing.REFUSALS`."""


class Unprepared(Exception):
    """PDFs cannot be read here at all, whatever is in this one."""


def prepare(folder: str) -> None:
    """Have the library of PDFs loaded, which is unpacked to a file and loaded from there.

    In a folder that others may write to, as the library itself would do it, anybody
    could put another in its place.
    """
    os.environ["TMPDIR"] = folder
    with suppress(Refused):
        _extracted(EMPTY_PDF, "application/pdf", None)
        _ready.add("application/pdf")


def main() -> None:
    wire_in, wire_out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not end up between our messages.
    os.dup2(2, 1)
    while (asked := _receive(wire_in)) is not None:
        _serve(json.loads(asked), wire_in, wire_out)


def _serve(asked: dict[str, Any], wire_in: BinaryIO, wire_out: BinaryIO) -> None:
    try:
        _limit_cpu(int(asked["cpu_seconds"]))
        content = _content(wire_in)
        blocks = _blocks(content, str(asked["media_type"]), asked)
        del content
        _tell(blocks, wire_out)
        last: dict[str, Any] = {"done": True}
    except Refused as error:
        last = {"refused": error.args[0]}
    except MemoryError:
        last = {"refused": "memory"}
    except Unprepared:
        last = {"refused": "unprepared"}
    _send(wire_out, last)
    wire_out.flush()


def _limit_cpu(seconds: int) -> None:
    """Counted from now: the process may have served others before."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + seconds + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (until, hard))


def _content(wire_in: BinaryIO) -> bytes:
    pieces = []
    while piece := _receive(wire_in):
        pieces.append(piece)
    return b"".join(pieces)


def _blocks(content: bytes, media_type: str, limits: dict[str, Any]) -> list[Block]:
    if media_type.startswith(_ZIP_TYPES):
        _require_harmless_zip(content, int(limits["unpacked_bytes"]))
    if media_type == "text/plain":
        blocks = list(_paragraphs(_decoded(content)))
    elif media_type == "text/markdown":
        blocks = list(_Markdown(_decoded(content).splitlines()).blocks())
    elif media_type == "application/pdf":
        blocks = list(_pdf(content, int(limits["pages"])))
    else:
        blocks = list(_converted(content, media_type))
    if not any(text.strip() for _, _, text, _ in blocks):
        raise Refused("empty" if media_type != "application/pdf" else "no_text")
    return blocks


def _paragraphs(text: str) -> Iterator[Block]:
    for paragraph in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n").replace("\r", "\n")):
        if paragraph.strip():
            yield "text", 0, paragraph, None


def _converted(content: bytes, media_type: str) -> Iterator[Block]:
    """What the library makes Markdown of. Its tree of the same document loses text; this does not."""
    if media_type in _PLAIN:
        text = _decoded(content)
        if media_type == "text/html":
            # Else it would come back as a paragraph of names and values.
            text = _HEAD.sub("", text)
        content = text.encode()
    mark = f"slide-{secrets.token_hex(8)}-"
    found = _extracted(content, media_type, f"\n\n{mark}{{page_num}}\n\n")
    if media_type == _WORKBOOK:
        _require_every_sheet(content, {table.page_number for table in found.tables})
    blocks = _Markdown(found.content.splitlines(), escaped=True, page_mark=mark).blocks()
    return _whole_page(list(blocks), text) if media_type == "text/html" else blocks


def _whole_page(told: list[Block], text: str) -> Iterator[Block]:
    """Of a page of which the library lost something, its paragraphs: it gives up where tags are nested deep."""
    shown = _Page(text).blocks()
    return iter(told if _letters(told) >= _MOST_OF * _letters(shown) else shown)


def _letters(blocks: Iterable[Block]) -> int:
    """How many, but for where links lead."""
    return sum(sum(map(str.isalnum, _TARGET.sub("]", text))) for _, _, text, _ in blocks)


def _require_every_sheet(content: bytes, told: set[int]) -> None:
    """The library leaves out a sheet with a cell so far down that what is above it fills no memory."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        there = set(archive.namelist())
        for number, name in enumerate(_sheets(archive), 1):
            if number not in told and name in there and _says_something(archive, name):
                raise Refused("sheet")


def _sheets(archive: zipfile.ZipFile) -> list[str]:
    """The names of a workbook's sheets in the archive, in its order."""
    try:
        book = ElementTree.fromstring(archive.read("xl/workbook.xml"))  # noqa: S314
        links = ElementTree.fromstring(archive.read("xl/_rels/workbook.xml.rels"))  # noqa: S314
    except (KeyError, ElementTree.ParseError):
        return []
    targets = {link.get("Id"): link.get("Target", "") for link in links}
    named = (
        value for sheet in book.findall(".//{*}sheet") for key, value in sheet.items() if key.endswith("}id")
    )
    paths = (targets.get(value, "") for value in named)
    return [path[1:] if path.startswith("/") else f"xl/{path}" for path in paths]


def _says_something(archive: zipfile.ZipFile, name: str) -> bool:
    before = b""
    with archive.open(name) as sheet:
        while piece := sheet.read(1 << 20):
            if _CELL_WITH_SOMETHING.search(before + piece):
                return True
            before = piece[-100:]
    return False


def _pdf(content: bytes, most_pages: int) -> Iterator[Block]:
    """Headings and paragraphs with their pages; of a page of which these lack something, its plain text."""
    if "application/pdf" not in _ready:
        raise Unprepared
    found = _extracted(content, "application/pdf", None)
    plain = {int(page["page_number"]): str(page["content"] or "") for page in found.pages or ()}
    if len(plain) > most_pages:
        raise Refused("pages")
    of_page: dict[int, list[Block]] = {}
    for node in (found.document or {}).get("nodes", ()):
        block = _of_node(node)
        if block is not None:
            of_page.setdefault(block[3] or 1, []).append(block)
    for number in sorted({*plain, *of_page}):
        told = of_page.get(number, [])
        if sum(_weight(block[2]) for block in told) >= _MOST_OF * _weight(plain.get(number, "")):
            yield from told
        else:
            yield from ((kind, level, text, number) for kind, level, text, _ in _paragraphs(plain[number]))


def _weight(text: str) -> int:
    return sum(len(word) for word in text.split())


def _of_node(node: dict[str, Any]) -> Block | None:
    """A node of the document's tree; groups only repeat their headings."""
    content = node.get("content") or {}
    kind = content.get("node_type")
    text = _grid(content["grid"]) if kind == "table" else str(content.get("text") or "")
    if kind in ("group", "page_break", "image") or not text.strip():
        return None
    page = node.get("page")
    if kind in ("title", "heading"):
        return "heading", max(1, int(content.get("level") or 1)), text, page
    return kind if kind in ("table", "code") else "text", 0, text, page


def _require_harmless_zip(content: bytes, most: int) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError):
        raise Refused("corrupt") from None
    unpacked = sum(member.file_size for member in members)
    ratio = unpacked / max(1, len(content))
    if len(members) > _MAX_MEMBERS or unpacked > most or (unpacked > 1 << 24 and ratio > _MAX_RATIO):
        raise Refused("bomb")
    if any(member.flag_bits & 1 for member in members):
        raise Refused("encrypted")


def _decoded(content: bytes) -> str:
    """By its mark if it has one; else UTF-8, else what Chinese files are in if it reads so, else Latin."""
    for mark, encoding in _BOMS:
        if content.startswith(mark):
            return content.decode(encoding, "replace").replace("\0", "")
    for encoding in ("utf-8", "gb18030"):
        try:
            text = content.decode(encoding).replace("\0", "")
        except UnicodeDecodeError:
            continue
        if encoding == "utf-8" or _is_chinese(text):
            return text
    return content.decode("cp1252", "replace").replace("\0", "")


def _is_chinese(text: str) -> bool:
    """Or Latin letters taken for it: with its neighbour each makes a rare character, alone in a word."""
    count = common = among_letters = 0
    for found in _FOREIGN.finditer(text):
        run = found["run"]
        count += len(run)
        # The first half of the standard has what is common, by its first bytes.
        common += sum(lead <= 0xD7 for lead in run.encode("gb2312", "ignore")[::2])
        among_letters += len(run) == 1 and bool(found["before"] or found["after"])
    return common >= _COMMON * count and among_letters <= _AMONG_LETTERS * count


def _extracted(content: bytes, media_type: str, page_mark: str | None) -> Any:
    import kreuzberg

    pages = kreuzberg.PageConfig(
        extract_pages=page_mark is None, insert_page_markers=page_mark is not None, marker_format=page_mark
    )
    config = kreuzberg.ExtractionConfig(  # type: ignore[call-arg]  # its stub lacks disable_ocr
        use_cache=False,
        enable_quality_processing=False,
        disable_ocr=True,
        include_document_structure=page_mark is None,
        output_format="markdown",
        pages=pages,
        # Else what is in forms and menus would be left out.
        html_options={"preprocessing": {"enabled": True, "remove_forms": False, "remove_navigation": False}},
        concurrency=kreuzberg.ConcurrencyConfig(max_threads=1),
    )
    try:
        return kreuzberg.extract_bytes_sync(content, media_type, config)
    except (kreuzberg.KreuzbergError, ValueError, RuntimeError, OSError):
        # The library says why in words only; the lock of a PDF can be seen.
        raise Refused("encrypted" if _locked(content, media_type) else "corrupt") from None


def _locked(content: bytes, media_type: str) -> bool:
    return media_type == "application/pdf" and b"/Encrypt" in content


def _grid(grid: dict[str, Any]) -> str:
    """A line for each row, its cells divided by bars."""
    lines: dict[int, list[str]] = {}
    for cell in grid.get("cells", ()):
        lines.setdefault(int(cell["row"]), []).append(" ".join(str(cell["content"]).split()))
    return "\n".join(" | ".join(cells) for _, cells in sorted(lines.items()) if any(cells))


class _Page:
    """A page's headings and paragraphs by its tags alone, however they are nested: what a browser would show.

    Everything is looked at once, whatever is not closed: Python's own parser of HTML is not that patient.
    """

    _UNSEEN = frozenset({"script", "style", "template", "noscript", "svg", "iframe", "title"})
    _RAW = frozenset({"script", "style"})
    _WITHIN = frozenset({
        "a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img", "ins",
        "kbd", "label", "mark", "q", "ruby", "rt", "rp", "s", "samp", "small", "span", "strike", "strong", "sub",
        "sup", "time", "tt", "u", "var", "wbr",
    })  # fmt: skip
    # Of others the end may be left out, so that nobody knows what a hidden one hides.
    _CLOSED = frozenset({
        "article", "aside", "dialog", "div", "footer", "form", "header", "main", "nav", "ol", "section", "span",
        "table", "ul",
    })  # fmt: skip
    _BREAK = "\0"

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: list[Block] = []
        self._said: list[str] = []
        self._level = 0
        self._unseen, self._depth = "", 0

    def blocks(self) -> list[Block]:
        at = 0
        while (begin := self._text.find("<", at)) >= 0:
            self._say(self._text[at:begin])
            at = self._passed(begin)
        self._say(self._text[at:])
        self._end_block()
        return self._found

    def _passed(self, begin: int) -> int:
        """Where what begins with this "<" is over."""
        if self._text.startswith("<!--", begin):
            return self._after("-->", begin + 4)
        tag = _TAG.match(self._text, begin)
        if tag is None:
            if re.match("[A-Za-z!?/]", self._text[begin + 1 : begin + 2]):
                return self._after(">", begin)
            self._say("<")
            return begin + 1
        name = tag["name"].lower()
        if tag["end"]:
            self._ended(name)
        else:
            self._begun(name, tag["rest"])
        if name in self._RAW and not tag["end"]:
            over = re.compile(f"</{name}", re.IGNORECASE).search(self._text, tag.end())
            return over.start() if over else len(self._text)
        return tag.end()

    def _after(self, mark: str, begin: int) -> int:
        end = self._text.find(mark, begin)
        return end + len(mark) if end >= 0 else len(self._text)

    def _begun(self, name: str, rest: str) -> None:
        if self._unseen:
            self._depth += name == self._unseen
        elif name in self._UNSEEN or (name in self._CLOSED and _hides(rest)):
            self._unseen, self._depth = ("", 0) if rest.endswith("/") else (name, 1)
        else:
            self._divide(name)
            if name in ("h1", "h2", "h3", "h4", "h5", "h6"):
                self._level = int(name[1])

    def _ended(self, name: str) -> None:
        if not self._unseen:
            self._divide(name)
        elif name == self._unseen:
            self._depth -= 1
            self._unseen = self._unseen if self._depth else ""

    def _divide(self, name: str) -> None:
        if name in ("br", "td", "th"):
            self._say(self._BREAK if name == "br" else " ")
        elif name not in self._WITHIN:
            self._end_block()

    def _say(self, text: str) -> None:
        if text and not self._unseen:
            self._said.append(text)

    def _end_block(self) -> None:
        said = "".join(self._said)
        lines = (" ".join(html.unescape(line).split()) for line in said.split(self._BREAK))
        text = "\n".join(line for line in lines if line)
        if text:
            self._found.append(("heading" if self._level else "text", self._level, text, None))
        self._said, self._level = [], 0


def _hides(rest: str) -> bool:
    """Whether an element with these attributes is not shown."""
    bare = _QUOTED.sub('""', rest).lower()
    return " hidden" in f" {' '.join(bare.split())}" or "display:none" in "".join(rest.lower().split())


class _Markdown:
    """Markdown line by line: headings, tables, code, and everything else as it stands.

    `escaped`: backslashes guard characters that a converter did not mean as Markdown.
    `page_mark` begins the lines that say which page comes next.
    """

    def __init__(self, lines: list[str], *, escaped: bool = False, page_mark: str | None = None) -> None:
        self._lines = lines
        self._escaped = escaped
        self._page_mark = page_mark
        self._page: int | None = None
        self._open: list[str] = []

    def blocks(self) -> Iterator[Block]:
        at = self._front_matter()
        if at:
            yield "code", 0, "\n".join(self._lines[1 : at - 1]), None
        while at < len(self._lines):
            begun = self._special(at)
            if begun is None:
                self._open.append(self._lines[at])
                at += 1
                continue
            yield from self._closed()
            block, at = begun
            if block is not None:
                yield block
        yield from self._closed()

    def _front_matter(self) -> int:
        """Where the document begins, after the names and values that may stand before it."""
        if self._escaped or not self._lines or self._lines[0].strip() != "---":
            return 0
        ends = (at for at, line in enumerate(self._lines[1:200], 1) if line.strip() in ("---", "..."))
        return next(ends, -1) + 1

    def _closed(self) -> Iterator[Block]:
        text, self._open = "\n".join(self._open), []
        if text.strip():
            yield "text", 0, self._meant(text), self._page

    def _special(self, at: int) -> tuple[Block | None, int] | None:
        """What begins at this line and where it is over; None for plain text."""
        line = self._lines[at]
        bare = line.strip()
        if not bare or self._turns_page(bare):
            return None, at + 1
        if heading := _HEADING.match(bare):
            return self._heading(len(heading["marks"]), bare[heading.end() :].rstrip("#")), at + 1
        if not self._open and (level := self._underlined(at)):
            return self._heading(level, bare), at + 2
        if _RULE.fullmatch(bare):
            return None, at + 1
        if fence := _FENCE.match(bare):
            return self._code(fence["fence"], at)
        return self._table(at) if self._is_table(at) else None

    def _turns_page(self, bare: str) -> bool:
        if not self._page_mark or not bare.startswith(self._page_mark):
            return False
        number = bare.removeprefix(self._page_mark)
        self._page = int(number) if number.isdigit() else self._page
        return True

    def _underlined(self, at: int) -> int:
        """The level of a heading that has a line drawn under it; 0 for none."""
        if at + 1 >= len(self._lines) or _LISTED.match(self._lines[at]):
            return 0
        under = self._lines[at + 1].strip()
        return {"=": 1, "-": 2}.get(under[:1], 0) if len(under) > 1 and len(set(under)) == 1 else 0

    def _heading(self, level: int, text: str) -> Block | None:
        named = _LINK.sub(r"\1", self._meant(text)).replace("**", "").replace("`", "").strip()
        return ("heading", level, named, self._page) if named else None

    def _code(self, fence: str, at: int) -> tuple[Block, int]:
        end = at + 1
        while end < len(self._lines) and not _closes(self._lines[end], fence):
            end += 1
        return ("code", 0, "\n".join(self._lines[at + 1 : end]), self._page), end + 1

    def _is_table(self, at: int) -> bool:
        if "|" not in self._lines[at] or at + 1 >= len(self._lines):
            return False
        under = self._lines[at + 1]
        return "|" in under and _DELIMITER.fullmatch(under) is not None

    def _table(self, at: int) -> tuple[Block, int]:
        end = at
        rows = []
        while end < len(self._lines) and "|" in self._lines[end] and self._lines[end].strip():
            if not (end == at + 1 and _DELIMITER.fullmatch(self._lines[end])):
                rows.append(self._row(self._lines[end]))
            end += 1
        return ("table", 0, "\n".join(row for row in rows if row), self._page), end

    def _row(self, line: str) -> str:
        cells = [self._meant(cell.strip()) for cell in _CELLS.split(line.strip().strip("|"))]
        return " | ".join(cells) if any(cells) else ""

    def _meant(self, text: str) -> str:
        return _ESCAPED.sub(r"\1", text) if self._escaped else text


def _closes(line: str, fence: str) -> bool:
    bare = line.strip()
    return len(bare) >= len(fence) and set(bare) == {fence[0]}


def _tell(blocks: list[Block], wire_out: BinaryIO) -> None:
    batch: list[Block] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += len(block[2])
        if size > _BATCH_CHARS:
            _send(wire_out, batch)
            batch, size = [], 0
    if batch:
        _send(wire_out, batch)


def _send(wire: BinaryIO, message: Any) -> None:
    body = json.dumps(message).encode()
    wire.write(struct.pack(">I", len(body)) + body)


def _receive(wire: BinaryIO) -> bytes | None:
    """None at the end of everything."""
    head = wire.read(4)
    if len(head) < 4:
        return None
    return wire.read(struct.unpack(">I", head)[0])
