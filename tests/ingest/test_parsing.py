"""Real files of each kind through the real child; hostile ones; a child that dies."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import resource
import signal
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.ingest import media, parser_child
from engram.ingest.chunking import Block
from engram.ingest.media import detect
from engram.ingest.parsing import Limits, Parsers, _Child
from engram.kernel.errors import DocumentRefused, ParserDied
from ingest import samples

pytestmark = pytest.mark.anyio

LEASES = "Only the holder of a live lease can settle a row."
HTML = (
    f"<!doctype html><html><head><title>T</title><script>var hidden = 1</script></head><body>"
    f"<h1>Leases</h1><p>{LEASES}</p><table><tr><th>Item</th></tr><tr><td>Tea</td></tr></table></body></html>"
)
GOOD = {
    media.PDF: samples.pdf([["Outages", "An outage is not an attempt."], ["Leases", LEASES]]),
    media.DOCX: samples.docx([("Heading1", "Leases"), ("", LEASES)], [["Item", "Cost"], ["Tea", "3"]]),
    media.PPTX: samples.pptx([("Outages", "An outage is not an attempt."), ("Leases", LEASES)]),
    media.XLSX: samples.xlsx({"Leases": [["Rule", "Since"], [LEASES, "2024"]]}),
    media.HTML: HTML.encode(),
    media.MARKDOWN: f"# Leases\n\n{LEASES}\n\n```\n# no heading\n```\n".encode(),
    media.TEXT: f"Leases\n\n{LEASES}\n".encode(),
    media.CSV: f"Rule,Since\n{LEASES},2024\n".encode(),
}
NAMES = {media.MARKDOWN: "a.md", media.CSV: "a.csv"}
# Once this is written, the child has begun to read.
MORE_THAN_A_PIPE = b"word " * 200_000
PAGES = {media.PDF: 2, media.PPTX: 2}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def parsers() -> AsyncIterator[Parsers]:
    found = Parsers()
    yield found
    await found.shut()


async def read(parsers: Parsers, content: bytes, media_type: str) -> list[Block]:
    return await parsers.parse([content[:100], content[100:]], media_type)


@pytest.mark.parametrize("media_type", GOOD)
async def test_every_kind_is_recognised_and_read(parsers: Parsers, media_type: str) -> None:
    content = GOOD[media_type]
    assert detect(content[: media.HEAD_BYTES], NAMES.get(media_type, "upload.bin")) == media_type
    blocks = await read(parsers, content, media_type)
    told = next(block for block in blocks if LEASES in block.text)
    assert told.page == PAGES.get(media_type)
    if media_type not in (media.TEXT, media.CSV):
        heading = next(block for block in blocks if block.kind == "heading" and block.text == "Leases")
        assert blocks.index(heading) < blocks.index(told)
    assert not any("hidden" in block.text for block in blocks)


async def test_a_child_serves_many_documents_and_is_replaced_in_time() -> None:
    parsers = Parsers(at_once=1, documents_per_child=10)
    try:
        for _ in range(25):
            assert await read(parsers, GOOD[media.MARKDOWN], media.MARKDOWN)
            with pytest.raises(DocumentRefused):
                await read(parsers, b"%PDF-1.4 nonsense", media.PDF)
        assert parsers.started == 5
    finally:
        await parsers.shut()


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-16", "# Größe\n\nfünf"),
        ("gb18030", "续租约要早，不能太晚。"),
        ("utf-8-sig", "naïve"),
        ("cp1252", "naïve café"),
    ],
)
async def test_text_in_other_encodings(parsers: Parsers, encoding: str, text: str) -> None:
    blocks = await read(parsers, text.encode(encoding), media.TEXT)
    assert text.split()[-1] in blocks[-1].text


@pytest.mark.parametrize(
    "text",
    [
        "Die Prüfung läuft in Zürich.",
        "Größe: fünf Füße, größer als üblich; Maßstäbe für Übungen. Weiß „Österreich“ es?",
        "Año nuevo, corazón y canción: ¿qué pasó mañana? «¡Ésta!»",
        "L'été, où l'élève préféré a mangé des crêpes à côté du château. « Ça alors ! » Noël à Besançon.",
        "ATENÇÃO: A PRODUÇÃO NÃO ESTÁ EM SITUAÇÃO DE EXCEÇÃO. INFORMAÇÃO, EDUCAÇÃO, AÇÕES.",
        "Smörgåsbord på Åland: räksmörgås, köttbullar och blåbär från Västerås.",
        "curly “quotes” and a dash – naïve café",
    ],
)
def test_latin_text_is_not_taken_for_chinese(text: str) -> None:
    for copies in (1, 50):
        content = f"{text}\n" * copies
        assert parser_child._decoded(content.encode("cp1252")) == content


@pytest.mark.parametrize(
    "text",
    [
        "续租约要早，不能太晚。",
        "数据库是真相；流只说明有工作要做。任务由行决定是否运行，而不是由消息决定。",
        "用Redis的Stream做队列，worker按lease续租；超过60秒没有心跳就算lapsed，由另一个worker接手。",
        "## 安装\n\npip install engram\n\n先运行 `engram up`，再打开 http://127.0.0.1:8000/ 看看。",
        "English first, a long paragraph of it, and only then 一句中文。",
        "第3章 API（v2）：GET /tasks/{id} 返回JSON",
        "繁體中文的文件也可以用這種編碼保存，雖然並不常見。",
        "北京",
        "生僻字：𠮷野家、龘、犇、骉。今天天气很好，我们去公园散步。",
    ],
)
def test_chinese_text_is_read_as_chinese(text: str) -> None:
    for copies in (1, 50):
        content = f"{text}\n" * copies
        assert parser_child._decoded(content.encode("gb18030")) == content


def entities() -> Iterator[str]:
    yield '<!ENTITY a0 "lol">'
    for n in range(1, 10):
        yield f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">'


HOSTILE = {
    "a password": (samples.pdf([["Secret", "text"]], owner_key=b"k"), media.PDF, "password"),
    "a cut PDF": (GOOD[media.PDF][:300], media.PDF, "damaged"),
    "a PDF without text": (samples.pdf([[]]), media.PDF, "no text"),
    "a cut DOCX": (GOOD[media.DOCX][:400], media.DOCX, "damaged"),
    "another archive": (samples.zipped({"a.txt": "x"}), media.DOCX, "damaged"),
    "a slide show called DOCX": (GOOD[media.PPTX], media.DOCX, "damaged"),
    "blank": (b" \n\t\n", media.TEXT, "no text"),
    "a bomb": (samples.docx([("", "a" * 50_000_000)]), media.DOCX, "unpacks"),
    "many members": (samples.zipped({f"{n}": "" for n in range(20_001)}), media.XLSX, "unpacks"),
    "entities": (
        samples.docx([("", "&a9;")], prolog=f"<!DOCTYPE w [{''.join(entities())}]>"),
        media.DOCX,
        "no text",
    ),
    "a file of ours": (
        samples.docx([("", "&x;")], prolog='<!DOCTYPE w [<!ENTITY x SYSTEM "file:///etc/passwd">]>'),
        media.DOCX,
        "no text",
    ),
}


@pytest.mark.parametrize("which", HOSTILE)
async def test_what_cannot_be_read_is_refused_in_words(parsers: Parsers, which: str) -> None:
    content, media_type, why = HOSTILE[which]
    with pytest.raises(DocumentRefused, match=why):
        await read(parsers, content, media_type)


async def test_names_in_an_archive_are_never_paths(parsers: Parsers, tmp_path: Path) -> None:
    target = tmp_path / "planted"
    evil = samples.zipped({f"../../../../../../..{target}": "planted", "word/document.xml": "<w/>"})
    with pytest.raises(DocumentRefused):
        await read(parsers, evil, media.DOCX)
    assert not target.exists()


async def test_deep_nesting_does_no_harm(parsers: Parsers) -> None:
    for content, media_type in (
        (b"> " * 20_000 + b"deep", media.MARKDOWN),
        (b"<div>" * 50_000 + b"deep", media.HTML),
    ):
        with contextlib.suppress(DocumentRefused):
            await read(parsers, content, media_type)
    assert await read(parsers, GOOD[media.MARKDOWN], media.MARKDOWN)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(pages=1), "pages"),
        (Limits(text_bytes=100), "more text"),
        (Limits(wall_seconds=0.01), "longer than"),
        (Limits(unpacked_bytes=100), None),
    ],
)
async def test_limits(limits: Limits, why: str | None) -> None:
    parsers = Parsers(limits=limits)
    try:
        content = GOOD[media.PDF] if why else GOOD[media.DOCX]
        with pytest.raises(DocumentRefused, match=why or "unpacks"):
            await read(parsers, content, media.PDF if why else media.DOCX)
    finally:
        await parsers.shut()


@pytest.mark.parametrize(("at_once", "children"), [(1, 6), (2, 2)])
async def test_a_child_reads_for_one_owner_only(at_once: int, children: int) -> None:
    parsers = Parsers(at_once=at_once)
    try:
        for owner in ("ada", "bob", "ada", "ada", "bob", "ada", "bob"):
            assert await parsers.parse([GOOD[media.MARKDOWN]], media.MARKDOWN, owner=owner)
            assert all(child.owner in ("ada", "bob") for child in parsers._idle)
            assert len(parsers._idle) <= at_once
        assert parsers.started == children
        wanted = [parsers.parse([GOOD[media.MARKDOWN]], media.MARKDOWN, owner=f"user {n}") for n in range(8)]
        assert all(await asyncio.gather(*wanted))
        assert len(parsers._idle) <= at_once
        assert parsers._living == len(parsers._idle)
    finally:
        await parsers.shut()
    assert parsers._living == 0


async def test_a_child_that_was_not_heard_out_is_not_used_again() -> None:
    parsers = Parsers(at_once=1, limits=Limits(text_bytes=1000))
    try:
        with pytest.raises(DocumentRefused, match="more text"):
            await read(parsers, b"word " * 100_000, media.TEXT)
        assert (await read(parsers, b"short", media.TEXT))[0].text == "short"
        assert parsers.started == 2
    finally:
        await parsers.shut()


async def test_a_child_with_much_left_to_say_can_be_ended() -> None:
    child = await _Child.start(Limits(), "ada")
    await child._ask([b"word " * 100_000], media.TEXT)
    while child._process._transport.get_pipe_transport(1).is_reading():  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    async with asyncio.timeout(20):
        await child.kill()
    assert child._process.returncode == -signal.SIGKILL


async def test_processor_time_is_limited_for_each_document_anew() -> None:
    long = b"<html>" + b"<head " * 60_000
    parsers = Parsers(at_once=1, limits=Limits(cpu_seconds=0))
    try:
        assert await read(parsers, GOOD[media.MARKDOWN], media.MARKDOWN)
        with pytest.raises(DocumentRefused, match="processor time"):
            await read(parsers, long, media.HTML)
        assert await read(parsers, GOOD[media.MARKDOWN], media.MARKDOWN)
    finally:
        await parsers.shut()


async def test_a_killed_child_costs_this_document_a_try_and_nobody_else_anything() -> None:
    parsers = Parsers(at_once=1)
    others = children()

    def killing() -> Iterator[bytes]:
        yield MORE_THAN_A_PIPE
        (child,) = children() - others
        os.kill(child, signal.SIGKILL)
        yield b"more" * 100_000

    try:
        with pytest.raises(ParserDied, match="SIGKILL") as died:
            await parsers.parse(killing(), media.MARKDOWN)
        assert died.value.retryable
        assert await read(parsers, GOOD[media.MARKDOWN], media.MARKDOWN)
        assert parsers.started == 2
    finally:
        await parsers.shut()


def children() -> set[int]:
    """The parsers that this process runs."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in own if b"parser_child" in Path(f"/proc/{pid}/cmdline").read_bytes()}


async def test_a_cancelled_reading_ends_its_child() -> None:
    parsers = Parsers(at_once=1)
    others = children()
    begun = asyncio.Event()

    def slow() -> Iterator[bytes]:
        while True:
            yield MORE_THAN_A_PIPE
            begun.set()

    reading = asyncio.create_task(parsers.parse(slow(), media.TEXT))
    await begun.wait()
    (pid,) = children() - others
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not Path(f"/proc/{pid}").exists()


async def test_the_child_has_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRES_DSN", "postgresql://secret@db/engram")
    fresh = Parsers()
    others = children()
    seen: dict[str, Any] = {}

    def looking() -> Iterator[bytes]:
        yield MORE_THAN_A_PIPE
        (pid,) = children() - others
        seen["environment"] = Path(f"/proc/{pid}/environ").read_bytes()
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        seen["files"] = [link for link in links if not link.startswith(("pipe:", "/dev/null", "anon_inode:"))]
        seen["limits"] = Path(f"/proc/{pid}/limits").read_text()
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
        seen["walls"] = [re.findall(r"(NoNewPrivs|Seccomp):\t(\d)", status) for status in threads]

    try:
        await fresh.parse([GOOD[media.PDF]], media.PDF)
        await fresh.parse(looking(), media.MARKDOWN)
    finally:
        await fresh.shut()
    assert b"POSTGRES" not in seen["environment"]
    assert not [link for link in seen["files"] if not link.startswith("socket:")], json.dumps(seen["files"])
    assert str(1 << 30) in str(seen["limits"])
    assert len(seen["walls"]) > 1, "its libraries have threads of their own"
    assert all(walls == [("NoNewPrivs", "1"), ("Seccomp", "2")] for walls in seen["walls"]), seen["walls"]


async def test_the_first_pdf_on_a_machine_is_read_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads PDFs is unpacked where nobody else can put it, and is not left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fresh = Parsers(at_once=1, documents_per_child=2)
    try:
        for _ in range(3):
            assert await read(fresh, GOOD[media.PDF], media.PDF)
    finally:
        await fresh.shut()
    assert fresh.started == 2
    assert list(tmp_path.iterdir()) == []


async def test_where_pdfs_cannot_be_read_none_is_called_damaged(tmp_path: Path) -> None:
    """No room for a temporary file, as the child sees it: other kinds are read all the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    fresh = Parsers(at_once=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert await read(fresh, GOOD[media.DOCX], media.DOCX)
        with pytest.raises(ParserDied, match="load what reads PDFs") as told:
            await read(fresh, GOOD[media.PDF], media.PDF)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await fresh.shut()
    assert "TMPDIR" in str(told.value.hint)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"", "a.txt"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.png"),
        (b"\x7fELF\x02\x01\x01\0\0\0", "a.md"),
        (b"PK\x03\x04 some other archive", "a.docx"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a.doc"),
        (b"{\\rtf1 hello}", "a.rtf"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "a.gz"),
    ],
)
def test_what_is_of_no_known_kind_is_refused(head: bytes, name: str) -> None:
    with pytest.raises(DocumentRefused) as refused:
        detect(head, name)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("head", "name", "found"),
    [
        (b"%PDF-1.7 ...", "innocent.txt", media.PDF),
        (b"\xef\xbb\xbf<!DOCTYPE HTML><html>", "page.txt", media.HTML),
        ("续租约".encode(), "notes", media.TEXT),
        (b"# Title\n\ntext", "README", media.MARKDOWN),
        (b"a,b\n1,2\n", "t.CSV", media.CSV),
        ("# x".encode("utf-16"), "x.md", media.MARKDOWN),
        (b"int main() {}", "main.c", media.TEXT),
        (b"# How a PDF works\n\nIt begins with `%PDF-1.7`.\n", "how-pdf-works.md", media.MARKDOWN),
        (b"A PDF begins with %PDF- and a number.", "notes", media.TEXT),
        (b"\xef\xbb\xbf\r\n%PDF-1.4\n1 0 obj", "a.pdf", media.PDF),
        (b"HTTP/1.1 200 OK\r\n\r\n%PDF-1.5\n" + bytes(range(256)) * 4, "a.pdf", media.PDF),
    ],
)
def test_content_decides_and_the_name_only_between_texts(head: bytes, name: str, found: str) -> None:
    assert detect(head, name) == found


@pytest.mark.parametrize(
    "before", [b"<!---->", b"<!-- a -->\n", b" \n", b"<?xml version='1.0'?>", b"<!--", b"<?xml "]
)
def test_what_stands_before_the_first_tag_takes_no_time(before: bytes) -> None:
    for count in (25, 10_000):
        began = time.thread_time()
        assert detect(before * count + b"x", "page") == media.TEXT
        assert time.thread_time() - began < 2
    if not before.startswith((b"<!--", b"<?xml ")) or before.endswith(b">"):
        assert detect(before * 1_000 + b"<HTML>", "page") == media.HTML


MARKDOWN = """---
title: Rules
---
Intro, two
lines.

- one
- two
  - nested

Underlined
==========
a | b
--- | ---
1 | 2

# Head `x` [link](http://a) ##
#tag, no heading

```py
# in code
```
* * *
last
"""


async def test_markdown_loses_nothing(parsers: Parsers) -> None:
    blocks = await read(parsers, MARKDOWN.encode(), media.MARKDOWN)
    assert [(block.kind, block.level, block.text) for block in blocks] == [
        ("code", 0, "title: Rules"),
        ("text", 0, "Intro, two\nlines."),
        ("text", 0, "- one\n- two\n  - nested"),
        ("heading", 1, "Underlined"),
        ("table", 0, "a | b\n1 | 2"),
        ("heading", 1, "Head x link"),
        ("text", 0, "#tag, no heading"),
        ("code", 0, "# in code"),
        ("text", 0, "last"),
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([*"#-=|`~>*x ", "\n", "\n\n", "word", "续租", "a | b\n", "---\n", "```\n"]),
        max_size=60,
    )
)
def test_every_word_of_any_markdown_is_in_a_block(parts: list[str]) -> None:
    text = "".join(parts)
    found = "".join(block[2] for block in parser_child._Markdown(text.splitlines()).blocks())
    for word in ("word", "续租"):
        assert found.count(word) == text.count(word)


@pytest.mark.parametrize("lines", ["# {}", "a | b\n{}x", "{}", "> {}", "{}\n==="])
def test_no_markdown_takes_long(lines: str) -> None:
    began = time.thread_time()
    for run in ("[", "[x](", "](", "-", "|-", "- ", "#", "`", "\\", "|", "*", "\n", "\n```", "[a]"):
        text = lines.format(run * (200_000 // len(run)))
        list(parser_child._Markdown(text.splitlines(), escaped=True).blocks())
    assert time.thread_time() - began < 20


async def test_html_keeps_nested_lists_and_quotes_and_no_markup_of_its_head(parsers: Parsers) -> None:
    page = (
        "<html><head><title>T</title><meta name=description content=hidden></head><body><h1>Top</h1>"
        "<ul><li>x<ol><li>inner</li></ol></li></ul><blockquote>quoted</blockquote><p>1 * 2_3 # 4</p></body></html>"
    )
    text = "\n".join(block.text for block in await read(parsers, page.encode(), media.HTML))
    for word in ("inner", "quoted", "1 * 2_3 # 4"):
        assert word in text
    assert "hidden" not in text


async def told(parsers: Parsers, page: str) -> str:
    return "\n".join(block.text for block in await read(parsers, page.encode(), media.HTML))


async def test_html_keeps_what_is_in_forms_and_menus(parsers: Parsers) -> None:
    page = (
        "<html><body><header><nav><ul><li><a href=/a>Menu entry</a></li></ul></nav></header><h1>Top</h1>"
        "<form action=/x><label>Your name</label><p>Everything of this page is in its form.</p>"
        "<select><option>first choice</option></select></form><p>after</p>"
        f"{'<p>And much else, of which they are not worth mentioning.</p>' * 100}</body></html>"
    )
    text = await told(parsers, page)
    for words in ("Menu entry", "Your name", "is in its form", "first choice", "after"):
        assert words in text


@pytest.mark.parametrize("depth", [10, 63, 70, 500, 20_000])
async def test_html_keeps_what_is_nested_deep(parsers: Parsers, depth: int) -> None:
    page = (
        "<html><head><title>T</title><style>p {color: red}</style></head><body><h1>Top &amp; first</h1>"
        f"<p>before</p>{'<div>' * depth}<h2>Deep <b>down</b></h2><p>It is 5 &lt; 6<br>in here.</p>"
        f"<script>var hidden = '</p>'</script><!-- a <p>hidden</p> note -->{'</div>' * depth}<p>after</p></body></html>"
    )
    blocks = await read(parsers, page.encode(), media.HTML)
    assert [(block.kind, block.level) for block in blocks if block.kind == "heading"] == [
        ("heading", 1),
        ("heading", 2),
    ]
    text = "\n".join(block.text for block in blocks)
    for words in ("Top & first", "before", "It is 5 < 6", "in here.", "after"):
        assert words in text
    assert "Deep down" in text.replace("**", "")
    assert "hidden" not in text
    assert "color" not in text


async def test_html_that_is_whole_keeps_its_structure_whatever_it_hides(parsers: Parsers) -> None:
    links = "".join(f"<li><a href='/a/long/path/to/{n}'>link {n}</a></li>" for n in range(30))
    page = (
        f"<html><body><h1>Top</h1><ul>{links}</ul><table><tr><th>a</th></tr><tr><td>b</td></tr></table>"
        f"<div hidden>{'secret ' * 200}</div><div class='flex hidden'>shown</div>"
        f"<div style='Display : none'>{'secret ' * 200}</div><noscript>{'secret ' * 200}</noscript>"
        f"<svg><text>{'secret ' * 200}</text></svg><p>a &lt; b</p></body></html>"
    )
    blocks = await read(parsers, page.encode(), media.HTML)
    assert "table" in [block.kind for block in blocks]
    assert "secret" not in "".join(block.text for block in blocks)


@pytest.mark.parametrize(
    "run",
    [
        "<a ",
        "<a b='",
        '<a b="c" ',
        "<!--",
        "<!",
        "<?",
        "</",
        "</a",
        "<",
        "<b",
        "<script>",
        "<div hidden>",
        "&#",
    ],
)
def test_no_page_takes_long_to_look_at(run: str) -> None:
    began = time.thread_time()
    parser_child._Page(f"<p>x</p>{run * (400_000 // len(run))}").blocks()
    assert time.thread_time() - began < 10


def far_down(row: int) -> bytes:
    """A workbook of three sheets, of which the second has a cell in that row and the third has none."""
    book = samples.xlsx({"Near": [["first", "cell"]], "Far": [["a"], ["stray"]], "Empty": []})
    with zipfile.ZipFile(io.BytesIO(book)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    moved = members["xl/worksheets/sheet2.xml"].replace(b'"2"', b'"%d"' % row).replace(b"A2", b"A%d" % row)
    return samples.zipped({**members, "xl/worksheets/sheet2.xml": moved})


async def test_a_sheet_with_a_cell_far_down_is_read_or_the_workbook_refused(parsers: Parsers) -> None:
    text = "".join(block.text for block in await read(parsers, far_down(1000), media.XLSX))
    assert "stray" in text
    assert "first" in text
    with pytest.raises(DocumentRefused, match="delete its empty rows"):
        await read(parsers, far_down(1_048_576), media.XLSX)
