"""Commands that keep and read evidence, by the running gateway."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from engram.cli.memory import call_tool

Actor = Annotated[str | None, typer.Option(help="Who is acting.")]
PART_BYTES = 1 << 20


def upload(
    path: Annotated[str, typer.Argument(help="The file, or - to read standard input.")],
    space: Annotated[str | None, typer.Option(help="private:<actor>, team:<project> or org:<name>.")] = None,
    kind: Annotated[str | None, typer.Option(help="What it is: log, diff, screenshot, ...")] = None,
    item: Annotated[int | None, typer.Option(help="The logbook item it belongs to.")] = None,
    actor: Actor = None,
) -> None:
    """Keep a file that memories can rest on."""
    content = _content(path)
    given = {
        **_encoded(content),
        "name": None if path == "-" else Path(path).name,
        "target_space": space,
        "kind": kind,
        "item_id": item,
        "actor_user_id": actor,
    }
    reply = call_tool("evidence_upload", {k: v for k, v in given.items() if v is not None})
    print(json.dumps(reply, ensure_ascii=False, indent=2))


def read(
    uri: Annotated[str, typer.Argument(help="The uri that evidence_upload gave.")],
    output: Annotated[Path | None, typer.Option(help="The file to write; whole or not at all.")] = None,
    actor: Actor = None,
) -> None:
    """Read evidence, verified, to standard output or into a file."""
    if output is None:
        for part in _parts(uri, actor):
            sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        return
    draft = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with draft.open("xb") as file:
            for part in _parts(uri, actor):
                file.write(part)
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)


def _content(path: str) -> bytes:
    """All of it, if the gateway would take that much."""
    from engram.kernel.errors import InputError
    from engram.kernel.settings import Settings

    most = Settings.load().max_body_bytes
    with open(sys.stdin.fileno() if path == "-" else path, "rb", closefd=path != "-") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(
            f"{path} is larger than {most} bytes", hint="ENGRAM_MAX_BODY_BYTES is the gateway's limit"
        )
    return content


def _encoded(content: bytes) -> dict[str, str]:
    if b"\x00" not in content:
        try:
            return {"content": content.decode(), "encoding": "utf-8"}
        except UnicodeDecodeError:
            pass
    return {"content": base64.b64encode(content).decode(), "encoding": "base64"}


def _parts(uri: str, actor: str | None) -> Iterator[bytes]:
    given: dict[str, Any] = {} if actor is None else {"actor_user_id": actor}
    offset: int | None = 0
    while offset is not None:
        asked = {"uri": uri, "offset": offset, "max_bytes": PART_BYTES, **given}
        reply = call_tool("evidence_read", asked)
        content = reply["content"]
        yield base64.b64decode(content) if reply["encoding"] == "base64" else content.encode()
        offset = reply["next_offset"]
