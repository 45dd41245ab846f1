"""Evidence in and out."""

from __future__ import annotations

from pydantic import Field

from engram.api.tools.base import Arguments, Call, Tool, WriteArguments
from engram.gateway.evidence import (
    DEFAULT_KIND,
    DEFAULT_READ_BYTES,
    MAX_KIND_CHARS,
    MAX_NAME_CHARS,
    MAX_READ_BYTES,
    Encoding,
    ReadReply,
    ReadRequest,
    UploadReply,
    UploadRequest,
)
from engram.logbook.uri import ATTACHMENT_FORM, MAX_LENGTH, PATCH_FORM


class UploadArguments(WriteArguments):
    content: str = Field(description="The file itself: as text, or in base64 if it is no text.")
    encoding: Encoding = Field(default="utf-8", description="How content is written: utf-8 or base64.")
    kind: str = Field(
        default=DEFAULT_KIND,
        description="What it is, in a word: log, diff, screenshot, ...",
        max_length=MAX_KIND_CHARS,
    )
    name: str | None = Field(
        default=None, description="What the file was called, for people.", max_length=MAX_NAME_CHARS
    )
    target_space: str | None = Field(
        default=None,
        description="Who may read it: private:<actor> (the default), team:<project> or org:<name>.",
        max_length=200,
    )
    item_id: int | None = Field(default=None, ge=1, lt=1 << 63, description="The logbook item it belongs to.")


class ReadArguments(Arguments):
    uri: str = Field(
        description=f"{ATTACHMENT_FORM}, as evidence_upload gave it, or {PATCH_FORM}, as a memory names it.",
        max_length=MAX_LENGTH,
    )
    offset: int = Field(default=0, ge=0, lt=1 << 63, description="The first byte wanted.")
    max_bytes: int = Field(
        default=DEFAULT_READ_BYTES,
        ge=1,
        le=MAX_READ_BYTES,
        description=f"How much at once, at most {MAX_READ_BYTES} bytes.",
    )


async def evidence_upload(call: Call[UploadArguments]) -> UploadReply:
    """Keep a file that memories can rest on: a log, a diff, a trace. Put its uri into evidence_refs.

    Do this instead of pasting a long excerpt into a memory. Uploading the same
    bytes again gives the same uri. If policy closes the shared space, the file is
    kept in your private one, and diverted is true.
    """
    asked = call.asked
    return await call.services.evidence.upload(
        UploadRequest(
            caller=call.caller,
            correlation_id=call.correlation_id,
            content=asked.content,
            encoding=asked.encoding,
            kind=asked.kind,
            name=asked.name,
            target_space=asked.target_space,
            item_id=asked.item_id,
        )
    )


async def evidence_read(call: Call[ReadArguments]) -> ReadReply:
    """Read what a memory rests on, by its uri, whole or a part at a time.

    The bytes are verified against the hash in the uri. While truncated is true,
    call again with offset set to next_offset. encoding says whether content is
    text or base64.
    """
    asked = call.asked
    return await call.services.evidence.read(
        ReadRequest(call.caller, call.correlation_id, asked.uri, asked.offset, asked.max_bytes)
    )


TOOLS = (
    Tool(
        "evidence_upload",
        "Keep evidence",
        "/evidence/upload",
        "write",
        UploadArguments,
        UploadReply,
        evidence_upload,
    ),
    Tool("evidence_read", "Read evidence", "/evidence/read", "read", ReadArguments, ReadReply, evidence_read),
)
