"""What a file is, by what is in it.

The name decides only between kinds of text, which look alike: `notes.md` and
`notes.txt` may hold the same bytes. Nothing here reads more than the beginning;
a file that only begins like a PDF is refused by the parser.
"""

from __future__ import annotations

import codecs
import re
from pathlib import PurePosixPath

from engram.kernel.errors import DocumentRefused

PDF = "application/pdf"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
PPTX = "application/vnd.openxmlformats-officedocument.presentationml.presentation"
XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
HTML = "text/html"
MARKDOWN = "text/markdown"
TEXT = "text/plain"
CSV = "text/csv"

READABLE = (PDF, DOCX, PPTX, XLSX, HTML, MARKDOWN, TEXT, CSV)
# As much as `detect` wants to see.
HEAD_BYTES = 8192

_HINT = "PDF, DOCX, PPTX, XLSX, HTML, Markdown, text and CSV can be read"
_OFFICE = {b"word/": DOCX, b"ppt/": PPTX, b"xl/": XLSX}
_OFFICE_NAMES = {".docx": DOCX, ".pptx": PPTX, ".xlsx": XLSX}
_TEXT_NAMES = {
    ".md": MARKDOWN, ".markdown": MARKDOWN, ".mdx": MARKDOWN, ".csv": CSV, ".tsv": CSV,
    ".html": HTML, ".htm": HTML, ".xhtml": HTML, ".txt": TEXT, ".text": TEXT, ".log": TEXT,
}  # fmt: skip
_PDF = b"%PDF-"
_ZIP = b"PK\x03\x04"
_COMPOUND = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
# Kinds that are text to the eye and not to a reader.
_UNREADABLE = (b"{\\rtf", b"%!PS")
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Possessive: what stands before the first tag is never tried in another way, which could take for ever.
_PAGE = re.compile(
    rb"^(?>\s+|<!--.*?-->|<\?xml[^>]*\?>)*+<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
_HEADING = re.compile(rb"^(?:#{1,6} \S|```|[=-]{3,}\s*$)", re.MULTILINE)
# Bytes of no text in any encoding but UTF-16.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_MOST_CONTROL = 0.01


def detect(head: bytes, filename: str) -> str:
    """The media type; raises `DocumentRefused` for what cannot be read.

    >>> detect(b"%PDF-1.7", "notes.txt")
    'application/pdf'
    >>> detect(b"# Leases", "notes.md")
    'text/markdown'
    """
    if not head.strip():
        raise DocumentRefused("the file is empty", hint=_HINT)
    suffix = PurePosixPath(filename.lower()).suffix
    if _begins_a_pdf(head):
        return PDF
    if head.startswith(_ZIP):
        return _office(head, suffix)
    if head.startswith(_COMPOUND):
        raise DocumentRefused(
            "the file is protected by a password, or from an Office before 2007",
            hint="save it without a password as DOCX, PPTX, XLSX or PDF",
        )
    return _text(head, suffix)


def _begins_a_pdf(head: bytes) -> bool:
    """Something may stand before it; but a text may also tell of PDFs."""
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(_PDF):
        return True
    return _PDF in head[:1024] and not _readable(head)


def _office(head: bytes, suffix: str) -> str:
    for folder, media_type in _OFFICE.items():
        if folder in head:
            return media_type
    if suffix in _OFFICE_NAMES and b"[Content_Types].xml" in head:
        return _OFFICE_NAMES[suffix]
    raise DocumentRefused("the file is an archive, not a document", hint=f"{_HINT}; unpack it first")


def _text(head: bytes, suffix: str) -> str:
    if head.startswith(_UNREADABLE) or not (head.startswith(_WIDE) or _readable(head)):
        raise DocumentRefused("the file is of no kind that can be read", hint=_HINT)
    if _PAGE.match(head.removeprefix(codecs.BOM_UTF8)):
        return HTML
    if suffix in _TEXT_NAMES:
        return _TEXT_NAMES[suffix]
    return MARKDOWN if not suffix and _HEADING.search(head) else TEXT


def _readable(head: bytes) -> bool:
    return b"\0" not in head and len(_CONTROL.findall(head)) <= _MOST_CONTROL * len(head)
