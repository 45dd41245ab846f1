"""Memory cards: one fact or lesson in a layout that is always the same, without what was pasted into it.

    # Title

    - Kind: PITFALL
    - Module: payments/ledger
    - Tags: retries, kafka

    What one should know, in a few sentences.

    ## Details, ## Steps, ## Evidence      (those that there are)

A card says what was learned; 200 to 600 words (or characters of Chinese and
Japanese) say most things. A long diff, trace, log or code block belongs beside
it: its bytes go to the artifact store, and one line says what it was, how
large, its hash and where it is. A text that is longer than its part of the
card is cut, and a line says how much is missing and where the whole is.
Nothing is left out silently; where nothing can be kept, nothing is left out.

The same arguments make the same card, so that storing it twice stores it once,
provided that the same block is kept in the same place. Making one is pure:

    draft = draft_card("FACT", "Deploys", "We deploy on Tuesdays ...", details=pasted)
    where = {blob.sha256: await keep(blob) for blob in draft.blobs}
    card = draft.finish(where)

and `build_card` does the three steps for scripts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, NamedTuple

from engram.gateway.inputs import refuse
from engram.gateway.pastes import Blob, Piece, blobs, pieces
from engram.kernel.content import labelled_sha, why_unstorable
from engram.kernel.errors import InputError
from engram.logbook.artifacts import Artifact, ArtifactStore
from engram.logbook.uri import build_attachment_evidence_uri, split_evidence_refs
from engram.search.tokens import tokenize

KINDS = ("FACT", "PROCEDURE", "PITFALL", "DECISION", "REVIEW_GUIDE", "REFLECTION")
RECOMMENDED = (200, 600)

# What goes in. More is a document, not a card.
MAX_INPUT_CHARS = 4 << 20
MAX_INPUT_LINES = 100_000
MAX_TITLE = 120
MAX_MODULE = 100
MAX_TAGS = 10
MAX_TAG = 32
MAX_STEPS = 50
MAX_EVIDENCE = 50

# What comes out, in characters: together they stay within what a shared space takes by default.
MAX_CARD = 4_000
SUMMARY_ROOM = 700
DETAILS_ROOM = 1_200
STEPS_ROOM = 800
EVIDENCE_ROOM = 500
# The longest lines that stand for a block and for the rest of a text.
POINTER_ROOM = 240
CUT_ROOM = 320

_LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*")
_TAG = re.compile(rf"[^\s,\x00-\x1f\x7f-\x9f]{{1,{MAX_TAG}}}")
_HINT = "upload it with evidence_upload, and give the card its URI as evidence"

Keep = Callable[[Blob], str]
Record = Callable[[Blob, Artifact], int]


@dataclass(frozen=True, slots=True)
class Moved:
    """A block that is not in the card but at `where`: a `memory://` URI or an artifact key."""

    kind: str
    lines: int
    size_bytes: int
    sha256: str
    where: str


@dataclass(frozen=True, slots=True)
class Card:
    """What to store: arguments of `memory_store`, and what was moved out of the text."""

    payload_md: str
    kind: str
    meta_json: dict[str, Any]
    evidence_refs: list[str]
    trimmed: list[Moved]


@dataclass(frozen=True, slots=True)
class _Text:
    """A free text of a card. `cut` is the whole of it, if `shown` is only its beginning."""

    shown: tuple[Piece, ...]
    left_out: int = 0
    cut: Blob | None = None

    @property
    def blobs(self) -> list[Blob]:
        found = [piece.blob for piece in self.shown if piece.blob]
        return [*found, self.cut] if self.cut else found

    def rendered(self, where: Mapping[str, str]) -> str:
        lines = [_pointer(piece.blob, where) if piece.blob else piece.shown for piece in self.shown]
        if self.cut:
            lines += ["\n\n", _rest(self.left_out, self.cut, where)]
        return "".join(lines).strip("\n").rstrip()


@dataclass(frozen=True, slots=True)
class CardDraft:
    """A card but for the places of its `blobs`, which the caller keeps before `finish`."""

    kind: str
    title: str
    module: str | None
    tags: tuple[str, ...]
    evidence: tuple[str, ...]
    sections: tuple[tuple[str | None, _Text], ...]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Each content once, in order of appearance."""
        found = {blob.sha256: blob for _, text in self.sections for blob in text.blobs}
        return tuple(found.values())

    def finish(self, where: Mapping[str, str]) -> Card:
        """The card; `where` has a `memory://` URI or an artifact key for the hash of every blob."""
        moved = [Moved(b.kind, b.lines, b.size_bytes, b.sha256, where[b.sha256]) for b in self.blobs]
        return Card(
            payload_md="\n\n".join(self._parts(where)) + "\n",
            kind=self.kind,
            meta_json=self._meta(),
            evidence_refs=list(dict.fromkeys([*self.evidence, *(block.where for block in moved)])),
            trimmed=moved,
        )

    def _parts(self, where: Mapping[str, str]) -> Iterable[str]:
        yield f"# {self.title}"
        about = [("Kind", self.kind), ("Module", self.module), ("Tags", ", ".join(self.tags))]
        yield "\n".join(f"- {name}: {value}" for name, value in about if value)
        for heading, text in self.sections:
            if heading:
                yield f"## {heading}"
            yield text.rendered(where)
        if self.evidence:
            yield "## Evidence"
            yield _listed(self.evidence)

    def _meta(self) -> dict[str, Any]:
        about = {"title": self.title, "module": self.module, "tags": list(self.tags)}
        return {name: value for name, value in about.items() if value}


class Problem(NamedTuple):
    name: str
    said: str


def draft_card(
    kind: str,
    title: str,
    summary: str,
    *,
    module: str | None = None,
    details: str | None = None,
    steps: Sequence[str] | None = None,
    evidence: Sequence[str] = (),
    tags: Sequence[str] = (),
    movable: bool = True,
) -> CardDraft:
    """Pure. `movable` False leaves everything in the text: there is nowhere else for it."""
    steps = steps or ()
    _require_size({"summary": [summary], "details": [details or ""], "steps": steps})
    texts = {"summary": summary, "details": details or "", "steps": _numbered(steps)}
    refuse(dict(_problems(kind, title, module, tags, steps, evidence, texts)))
    split_evidence_refs(list(evidence))
    rooms = (
        ("summary", None, SUMMARY_ROOM),
        ("details", "Details", DETAILS_ROOM),
        ("steps", "Steps", STEPS_ROOM),
    )
    fit = _fitted if movable else _as_it_is
    return CardDraft(
        kind=kind.strip().upper(),
        title=title.strip(),
        module=module.strip() if module else None,
        tags=tuple(dict.fromkeys(tags)),
        evidence=tuple(dict.fromkeys(evidence)),
        sections=tuple(
            (heading, fit(texts[name], room)) for name, heading, room in rooms if texts[name].strip()
        ),
    )


def build_card(
    kind: str,
    title: str,
    summary: str,
    *,
    module: str | None = None,
    details: str | None = None,
    steps: Sequence[str] | None = None,
    evidence: Sequence[str] = (),
    tags: Sequence[str] = (),
    artifacts: ArtifactStore | None = None,
    record: Record | None = None,
) -> Card:
    """A card whose long blocks are in `artifacts`; without one they stay in the text.

    `record` makes an attachment of an artifact and answers its id. It should answer the same
    id for the same content, or a repeated card is a different one.
    """
    draft = draft_card(
        kind,
        title,
        summary,
        module=module,
        details=details,
        steps=steps,
        evidence=evidence,
        tags=tags,
        movable=artifacts is not None,
    )
    if artifacts is None:
        return draft.finish({})
    keep = keep_in(artifacts, record)
    return draft.finish({blob.sha256: keep(blob) for blob in draft.blobs})


def keep_in(artifacts: ArtifactStore, record: Record | None = None) -> Keep:
    """Puts a blob into the store; answers its attachment's URI, or its key where none is recorded."""

    def keep(blob: Blob) -> str:
        with artifacts.keeping(blob.content.encode()) as artifact:
            if record is None:
                return artifact.key
            return build_attachment_evidence_uri(record(blob, artifact), artifact.sha256)

    return keep


def split_summary(text: str) -> tuple[str, str | None]:
    """The first paragraph and the rest. A text that begins with a block has no summary of its own."""
    first, _, rest = text.strip().partition("\n\n")
    if any(piece.blob or piece.whole for piece in pieces(first)):
        return text, None
    return first, rest or None


def check_card(payload_md: str, kind: str) -> list[Problem]:
    """What keeps a text from being a good card; empty if nothing does. Never raises."""
    if problem := _too_much([payload_md]) or why_unstorable(payload_md):
        return [Problem("not_a_card", problem)]
    return list(_shortcomings(payload_md, kind.strip().upper()))


def _shortcomings(payload_md: str, kind: str) -> Iterable[Problem]:
    lines = [line for line in payload_md.splitlines() if line.strip()]
    if kind not in KINDS:
        yield Problem("unknown_kind", f"the kinds are {', '.join(KINDS)}")
    if not lines or not re.match(r"# +\S", lines[0]):
        yield Problem("no_title", "the first line is '# ' and the title")
    if f"- Kind: {kind}" not in lines[1:2]:
        yield Problem("no_kind", f"the line after the title is '- Kind: {kind}'")
    if not any(not line.startswith(("#", "- ")) for line in lines[1:]):
        yield Problem("no_summary", "nothing says what was learned")
    if kind == "PROCEDURE" and "## Steps" not in lines:
        yield Problem("no_steps", "a procedure has '## Steps'")
    words = len(tokenize(payload_md))
    least, most = RECOMMENDED
    if not least <= words <= most:
        name = "too_short" if words < least else "too_long"
        yield Problem(name, f"about {words} words; {least} to {most} are best")
    for block in blobs(payload_md):
        yield Problem("pasted", f"a {block.kind} of {block.lines} lines belongs into the evidence")


def _problems(
    kind: str,
    title: str,
    module: str | None,
    tags: Sequence[str],
    steps: Sequence[str],
    evidence: Sequence[str],
    texts: Mapping[str, str],
) -> Iterable[tuple[str, str]]:
    if kind.strip().upper() not in KINDS:
        yield "kind", f"must be one of {', '.join(KINDS)}"
    if not 1 <= len(title.strip()) <= MAX_TITLE or not _LINE.fullmatch(title):
        yield "title", f"must be one line of 1 to {MAX_TITLE} characters"
    if module is not None and (not 1 <= len(module.strip()) <= MAX_MODULE or not _LINE.fullmatch(module)):
        yield "module", f"must be one line of 1 to {MAX_MODULE} characters"
    if len(tags) > MAX_TAGS or not all(_TAG.fullmatch(tag) for tag in tags):
        yield "tags", f"must be at most {MAX_TAGS} words of 1 to {MAX_TAG} characters, without commas"
    if not texts["summary"].strip():
        yield "summary", "must not be empty"
    if not all(step.strip() for step in steps):
        yield "steps", "must not be empty"
    if len(evidence) > MAX_EVIDENCE:
        yield "evidence", f"must be at most {MAX_EVIDENCE} references"
    for name, text in {"title": title, "module": module or "", "tags": " ".join(tags), **texts}.items():
        if problem := why_unstorable(text):
            yield name, problem


def _require_size(given: Mapping[str, Sequence[str]]) -> None:
    for name, texts in given.items():
        if problem := _too_much(texts):
            raise InputError(f"{name} {problem}: this is no card", hint=_HINT, fields={name: problem})


def _too_much(texts: Sequence[str]) -> str | None:
    if len(texts) > MAX_STEPS:
        return f"has more than {MAX_STEPS} entries"
    if sum(map(len, texts)) > MAX_INPUT_CHARS:
        return f"has more than {MAX_INPUT_CHARS} characters"
    if sum(text.count("\n") for text in texts) > MAX_INPUT_LINES:
        return f"has more than {MAX_INPUT_LINES} lines"
    return None


def _numbered(steps: Sequence[str]) -> str:
    """Steps as one Markdown list; what a step's first line cannot hold starts below its number."""
    return "".join(_step(f"{n}. ", step.strip("\n")) for n, step in enumerate(steps, start=1))


def _step(number: str, step: str) -> str:
    hanging = indent(step, " " * len(number), lambda line: True)
    if step.lstrip().startswith(("```", "~~~")):
        return f"{number.rstrip()}\n{hanging}\n"
    return f"{number}{hanging[len(number) :]}\n"


def _as_it_is(text: str, room: int) -> _Text:
    return _Text((Piece(text, len(text)),))


def _fitted(text: str, room: int) -> _Text:
    """As much of a text as there is room for, its blocks counted as the lines that stand for them."""
    text = text.strip("\r\n")
    found = pieces(text)
    if sum(map(_size, found)) <= room:
        return _Text(tuple(found))
    room -= CUT_ROOM
    shown: list[Piece] = []
    for piece in found:
        if _size(piece) > room:
            shown += _beginning(piece, room)
            break
        shown.append(piece)
        room -= _size(piece)
    return _Text(tuple(shown), len(text) - sum(piece.chars for piece in shown), Blob.of("text", text))


def _beginning(piece: Piece, room: int) -> list[Piece]:
    """Up to the last space or line end, if one is near; a block is not cut in two."""
    if piece.blob or piece.whole or room <= 0:
        return []
    head = piece.shown[:room]
    end = max(head.rfind(" "), head.rfind("\n"))
    head = head[: end + 1] if end > room // 2 else head
    return [Piece(head, len(head))]


def _size(piece: Piece) -> int:
    return POINTER_ROOM if piece.blob else len(piece.shown)


def _pointer(blob: Blob, where: Mapping[str, str]) -> str:
    return f"> [{blob.kind}] {_measured(blob)}: {where[blob.sha256]}\n\n"


def _rest(left_out: int, whole: Blob, where: Mapping[str, str]) -> str:
    return f"> [cut] {left_out} characters left out; the whole is {_measured(whole)}: {where[whole.sha256]}"


def _measured(blob: Blob) -> str:
    return f"{blob.lines} lines, {blob.size_bytes} bytes, {labelled_sha(blob.sha256)}"


def _listed(evidence: Sequence[str]) -> str:
    """As many references as there is room for; all of them are in the card's `evidence_refs`."""
    lines: list[str] = []
    room = EVIDENCE_ROOM
    for ref in evidence:
        room -= len(ref) + 3
        if room < 0:
            break
        lines.append(f"- {ref}")
    more = len(evidence) - len(lines)
    return "\n".join([*lines, f"- and {more} more, in evidence_refs"] if more else lines)
