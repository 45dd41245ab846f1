"""Evidence: files that memories rest on, kept by content and read by those who may read their space.

Uploading puts the bytes into the artifact store first and the row after it: a
crash in between leaves bytes that nothing refers to, never a reference to
nothing. A file's name is kept beside it and is never used as a path.

Reading verifies the whole file, also when only a part of it is wanted. What the
caller may not read does not exist for them.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from engram.gateway.callers import Caller
from engram.gateway.inputs import number_problem, refuse, text_problem
from engram.gateway.notebook import require_item
from engram.gateway.placement import Placed, Placement
from engram.gateway.spaces import parse_space, team_space
from engram.kernel.content import MAX_ID
from engram.kernel.errors import ArtifactCorrupt, InputError, NotFound
from engram.kernel.failpoints import failpoint
from engram.logbook import facts, items
from engram.logbook.artifacts import Artifact, ArtifactStore
from engram.logbook.items import Attachment
from engram.logbook.uri import (
    ATTACHMENT_FORM,
    PATCH_FORM,
    build_attachment_evidence_uri,
    parse_attachment_evidence_uri,
    parse_evidence_uri,
)
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

DEFAULT_KIND = "file"
MAX_KIND_CHARS = 64
MAX_NAME_CHARS = 255
MAX_READ_BYTES = 1 << 20
DEFAULT_READ_BYTES = 1 << 16


Encoding = Literal["utf-8", "base64"]


@dataclass(frozen=True, slots=True)
class UploadRequest:
    caller: Caller
    correlation_id: str
    content: str
    encoding: Encoding = "utf-8"
    kind: str = DEFAULT_KIND
    name: str | None = None
    target_space: str | None = None
    item_id: int | None = None


@dataclass(frozen=True, slots=True)
class UploadReply:
    """`uri` is what memory_store takes in evidence_refs. `deduplicated`: you had these bytes here already."""

    ok: bool
    attachment_id: int
    uri: str
    sha256: str
    size_bytes: int
    space: str
    diverted: bool
    deduplicated: bool
    correlation_id: str
    message: str


@dataclass(frozen=True, slots=True)
class ReadRequest:
    caller: Caller
    correlation_id: str
    uri: str
    offset: int = 0
    max_bytes: int = DEFAULT_READ_BYTES


@dataclass(frozen=True, slots=True)
class ReadReply:
    """`content` from `offset` on, as text where it is UTF-8; `next_offset` continues, null at the end."""

    ok: bool
    uri: str
    content: str
    encoding: Encoding
    offset: int
    next_offset: int | None
    truncated: bool
    size_bytes: int
    sha256: str
    kind: str
    name: str | None
    space: str
    correlation_id: str
    message: str


class Evidence:
    def __init__(
        self, db: AsyncExecutor, artifacts: ArtifactStore, placement: Placement, *, max_bytes: int
    ) -> None:
        self._db = db
        self._artifacts = artifacts
        self._placement = placement
        self._max_bytes = max_bytes

    async def upload(self, request: UploadRequest) -> UploadReply:
        content = _bytes_of(request)
        if request.item_id is not None:
            await require_item(self._db, request.caller, request.item_id)
        placed = await self._placement.place(request.caller, request.target_space)
        with ExitStack() as keeping:
            kept = self._artifacts.keeping(content, max_bytes=self._max_bytes)
            artifact = await asyncio.to_thread(keeping.enter_context, kept)
            failpoint("evidence.after_bytes")
            attached = await self._db.run(items.attach(_attachment(request, placed, artifact)))
        said = "was kept already" if not attached.fresh else "kept"
        return UploadReply(
            ok=True,
            attachment_id=attached.attachment_id,
            uri=build_attachment_evidence_uri(attached.attachment_id, artifact.sha256),
            sha256=artifact.sha256,
            size_bytes=artifact.size,
            space=placed.space,
            diverted=placed.rule is not None,
            deduplicated=not attached.fresh,
            correlation_id=request.correlation_id,
            message=f"{said} {placed.told(placed.space)}",
        )

    async def read(self, request: ReadRequest) -> ReadReply:
        found = await self._readable(request)
        refuse(
            {
                "offset": number_problem(request.offset, 0, found["size_bytes"]),
                "max_bytes": number_problem(request.max_bytes, 1, MAX_READ_BYTES),
            }
        )
        try:
            part = await asyncio.to_thread(
                _part, self._artifacts, found["artifact_key"], request.offset, request.max_bytes
            )
        except NotFound as missing:
            raise ArtifactCorrupt(
                f"the bytes of {request.uri} are not in the artifact store",
                hint="put the same content there again, or see whether every gateway has the same"
                " ENGRAM_ARTIFACTS_DIR",
            ) from missing
        return _reply(request, found, part)

    async def _readable(self, request: ReadRequest) -> Row:
        if parts := parse_attachment_evidence_uri(request.uri):
            found = await self._db.run(items.get_attachment.query(parts["attachment_id"]))
        elif parts := parse_evidence_uri(request.uri):
            found = _as_attachment(await self._db.run(facts.patch.query(request.uri)), parts)
        else:
            problem = f"must be {ATTACHMENT_FORM} or {PATCH_FORM}"
            raise InputError(f"uri {problem}", fields={"uri": problem})
        if found is None or found["sha256"] != parts["sha256"] or not _visible(request.caller, found):
            raise NotFound(f"there is no evidence {request.uri}")
        return found


def _bytes_of(request: UploadRequest) -> bytes:
    refuse(
        {
            "content": None if request.content else "must not be empty",
            "kind": text_problem(request.kind, MAX_KIND_CHARS),
            "name": None if request.name is None else text_problem(request.name, MAX_NAME_CHARS),
            "item_id": None if request.item_id is None else number_problem(request.item_id, 1, MAX_ID),
        }
    )
    try:
        if request.encoding == "base64":
            return base64.b64decode("".join(request.content.split()), validate=True)
        return request.content.encode()
    except UnicodeEncodeError:
        problem = "must not contain lone surrogates"
    except ValueError:
        problem = "is not base64"
    raise InputError(f"content {problem}", fields={"content": problem})


def _attachment(request: UploadRequest, placed: Placed, artifact: Artifact) -> Attachment:
    return Attachment(
        kind=request.kind,
        artifact_key=artifact.key,
        sha256=artifact.sha256,
        size_bytes=artifact.size,
        item_id=request.item_id,
        owner=request.caller.actor,
        meta_json={} if request.name is None else {"name": request.name},
        target_space=placed.space,
    )


def _visible(caller: Caller, attachment: Row) -> bool:
    space = parse_space(attachment["target_space"])
    return space is not None and caller.may_read(space)


def _as_attachment(patch: Row | None, parts: Row) -> Row | None:
    """A patch of source control, which whoever may read its project may read."""
    if patch is None:
        return None
    return {
        "artifact_key": patch["artifact_key"],
        "sha256": patch["sha256"],
        "size_bytes": patch["size_bytes"],
        "kind": patch["form"],
        "meta_json": {"name": f"{parts['source_type']}-{parts['source_id']}.{patch['form']}"},
        "target_space": str(team_space(patch["project_key"])),
    }


def _part(store: ArtifactStore, key: str, offset: int, size: int) -> bytes:
    """A part of an artifact. All of it is read, for only the whole can be verified."""
    part, at = bytearray(), 0
    with store.open(key) as reader:
        for chunk in reader:
            part += chunk[max(0, offset - at) : max(0, offset + size - at)]
            at += len(chunk)
    return bytes(part)


def _reply(request: ReadRequest, found: Row, part: bytes) -> ReadReply:
    size = found["size_bytes"]
    content, encoding, used = _told(part, last=request.offset + len(part) >= size)
    end = request.offset + used
    truncated = end < size
    return ReadReply(
        ok=True,
        uri=request.uri,
        content=content,
        encoding=encoding,
        offset=request.offset,
        next_offset=end if truncated else None,
        truncated=truncated,
        size_bytes=size,
        sha256=found["sha256"],
        kind=found["kind"],
        name=found["meta_json"].get("name"),
        space=found["target_space"],
        correlation_id=request.correlation_id,
        message=f"bytes {request.offset} to {end} of {size}",
    )


def _told(part: bytes, *, last: bool) -> tuple[str, Encoding, int]:
    """The part as text, and how many of its bytes that is: a character cut in two waits for the next page."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(part, final=last)
    except UnicodeDecodeError:
        text = ""
    used = len(part) - len(decoder.getstate()[0])
    if text or not part:
        return text, "utf-8", used
    return base64.b64encode(part).decode(), "base64", len(part)
