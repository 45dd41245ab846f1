"""Small real files of every kind, made by hand, so that no writing library is needed."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from html import escape

_XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_RELATIONSHIPS = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_DRAW = "http://schemas.openxmlformats.org/drawingml/2006/main"
_SLIDE = "http://schemas.openxmlformats.org/presentationml/2006/main"
_TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
_VENDOR = "application/vnd.openxmlformats-officedocument"


def pdf(pages: Sequence[Sequence[str]], *, owner_key: bytes | None = None) -> bytes:
    """A page is its lines; the first is set larger, as a heading. `owner_key` puts a lock on it."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    kids = []
    for lines in pages:
        content = _page_content(lines)
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(content), content))
        kids.append(len(objects) + 1)
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents %d 0 R"
            b"/Resources<</Font<</F1 3 0 R>>>>>>" % len(objects)
        )
    objects[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (
        len(kids),
        b" ".join(b"%d 0 R" % kid for kid in kids),
    )
    return _pdf_file(objects, owner_key)


def _page_content(lines: Sequence[str]) -> bytes:
    parts = [b"BT /F1 22 Tf 72 720 Td"]
    for number, line in enumerate(lines):
        shown = line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)").encode("latin-1")
        parts.append(b"(%s) Tj" % shown)
        parts.append(b"/F1 11 Tf 0 -%d Td" % (36 if number == 0 else 16))
    return b"\n".join([*parts, b"ET"])


def _pdf_file(objects: Sequence[bytes], owner_key: bytes | None) -> bytes:
    out = bytearray(b"%PDF-1.4\n")
    extra = b""
    body = list(objects)
    if owner_key is not None:
        # A password that nobody has: the entries are well formed and fit no known one.
        seal = hashlib.sha256(owner_key).hexdigest().encode()
        body.append(b"<</Filter/Standard/V 1/R 2/P -4/O<%s>/U<%s>>>" % (seal, seal[::-1]))
        extra = b"/Encrypt %d 0 R/ID[<%s><%s>]" % (len(body), seal[:32], seal[:32])
    places = []
    for number, content in enumerate(body, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(body) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (len(body) + 1, extra, start)
    return bytes(out)


def zipped(members: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def _package(kind: str, main: str, parts: Mapping[str, tuple[str, str]]) -> bytes:
    """An Office file: its content types, what its main part is, and the parts with their types."""
    types = "".join(
        f'<Override PartName="/{name}" ContentType="{media}"/>' for name, (media, _) in parts.items() if media
    )
    return zipped(
        {
            "[Content_Types].xml": f'{_XML}<Types xmlns="{_TYPES}">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Default Extension="xml" ContentType="application/xml"/>{types}</Types>',
            "_rels/.rels": f'{_XML}<Relationships xmlns="{_RELATIONSHIPS}"><Relationship Id="rId1"'
            f' Type="{_OFFICE}/officeDocument" Target="{main}"/></Relationships>',
            **{name: content for name, (_, content) in parts.items()},
        }
    )


def docx(blocks: Sequence[tuple[str, str]], table: Sequence[Sequence[str]] = (), prolog: str = "") -> bytes:
    """`blocks` are (style, text): a style such as Heading1, or none for a paragraph."""
    body = "".join(
        f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr>{_run(text)}</w:p>'
        if style
        else f"<w:p>{_run(text)}</w:p>"
        for style, text in blocks
    )
    rows = "".join(
        "<w:tr>" + "".join(f"<w:tc><w:p>{_run(cell)}</w:p></w:tc>" for cell in row) + "</w:tr>"
        for row in table
    )
    grid = f"<w:tbl>{rows}</w:tbl>" if rows else ""
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="Heading{n}"><w:name w:val="heading {n}"/></w:style>'
        for n in range(1, 4)
    )
    word = f"{_VENDOR}.wordprocessingml"
    return _package(
        "docx",
        "word/document.xml",
        {
            "word/document.xml": (
                f"{word}.document.main+xml",
                f'{_XML}{prolog}<w:document xmlns:w="{_WORD}"><w:body>{body}{grid}</w:body></w:document>',
            ),
            "word/styles.xml": (
                f"{word}.styles+xml",
                f'{_XML}<w:styles xmlns:w="{_WORD}">{styles}</w:styles>',
            ),
            "word/_rels/document.xml.rels": (
                "",
                f'{_XML}<Relationships xmlns="{_RELATIONSHIPS}"><Relationship Id="rId1"'
                f' Type="{_OFFICE}/styles" Target="styles.xml"/></Relationships>',
            ),
        },
    )


def _run(text: str) -> str:
    shown = text if text.startswith("&") else escape(text)
    return f'<w:r><w:t xml:space="preserve">{shown}</w:t></w:r>'


def xlsx(sheets: Mapping[str, Sequence[Sequence[str]]]) -> bytes:
    sheet = f"{_VENDOR}.spreadsheetml"
    listed = "".join(
        f'<sheet name="{escape(name)}" sheetId="{n}" r:id="rId{n}"/>' for n, name in enumerate(sheets, 1)
    )
    related = "".join(
        f'<Relationship Id="rId{n}" Type="{_OFFICE}/worksheet" Target="worksheets/sheet{n}.xml"/>'
        for n in range(1, len(sheets) + 1)
    )
    parts = {
        "xl/workbook.xml": (
            f"{sheet}.sheet.main+xml",
            f'{_XML}<workbook xmlns="{_SHEET}" xmlns:r="{_OFFICE}"><sheets>{listed}</sheets></workbook>',
        ),
        "xl/_rels/workbook.xml.rels": (
            "",
            f'{_XML}<Relationships xmlns="{_RELATIONSHIPS}">{related}</Relationships>',
        ),
    }
    for n, rows in enumerate(sheets.values(), 1):
        parts[f"xl/worksheets/sheet{n}.xml"] = (
            f"{sheet}.worksheet+xml",
            f'{_XML}<worksheet xmlns="{_SHEET}"><sheetData>{_cells(rows)}</sheetData></worksheet>',
        )
    return _package("xlsx", "xl/workbook.xml", parts)


def _cells(rows: Sequence[Sequence[str]]) -> str:
    return "".join(
        f'<row r="{r}">'
        + "".join(
            f'<c r="{chr(64 + c)}{r}" t="inlineStr"><is><t>{escape(value)}</t></is></c>'
            for c, value in enumerate(row, 1)
        )
        + "</row>"
        for r, row in enumerate(rows, 1)
    )


def pptx(slides: Sequence[tuple[str, str]]) -> bytes:
    """`slides` are (title, text)."""
    show = f"{_VENDOR}.presentationml"
    listed = "".join(f'<p:sldId id="{255 + n}" r:id="rId{n}"/>' for n in range(1, len(slides) + 1))
    related = "".join(
        f'<Relationship Id="rId{n}" Type="{_OFFICE}/slide" Target="slides/slide{n}.xml"/>'
        for n in range(1, len(slides) + 1)
    )
    parts = {
        "ppt/presentation.xml": (
            f"{show}.presentation.main+xml",
            f'{_XML}<p:presentation xmlns:p="{_SLIDE}" xmlns:r="{_OFFICE}">'
            f"<p:sldIdLst>{listed}</p:sldIdLst></p:presentation>",
        ),
        "ppt/_rels/presentation.xml.rels": (
            "",
            f'{_XML}<Relationships xmlns="{_RELATIONSHIPS}">{related}</Relationships>',
        ),
    }
    for n, (title, text) in enumerate(slides, 1):
        parts[f"ppt/slides/slide{n}.xml"] = (
            f"{show}.slide+xml",
            f'{_XML}<p:sld xmlns:p="{_SLIDE}" xmlns:a="{_DRAW}"><p:cSld><p:spTree>'
            f"{_shape(1, 'title', title)}{_shape(2, 'body', text)}</p:spTree></p:cSld></p:sld>",
        )
    return _package("pptx", "ppt/presentation.xml", parts)


def _shape(number: int, kind: str, text: str) -> str:
    return (
        f'<p:sp><p:nvSpPr><p:cNvPr id="{number}" name="{kind} {number}"/><p:cNvSpPr/>'
        f'<p:nvPr><p:ph type="{kind}"/></p:nvPr></p:nvSpPr><p:spPr/>'
        f"<p:txBody><a:bodyPr/><a:p><a:r><a:t>{escape(text)}</a:t></a:r></a:p></p:txBody></p:sp>"
    )
