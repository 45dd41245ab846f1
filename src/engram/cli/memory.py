"""Commands that talk to the running gateway, as an agent would."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer


def store(
    text: Annotated[str, typer.Argument(help="The memory, or - to read it from standard input.")],
    space: Annotated[str | None, typer.Option(help="private:<actor>, team:<project> or org:<name>.")] = None,
    kind: Annotated[str | None, typer.Option(help="FACT, PROCEDURE, PITFALL, DECISION, ...")] = None,
    actor: Annotated[str | None, typer.Option(help="Who is acting.")] = None,
) -> None:
    """Store a memory."""
    payload = sys.stdin.read() if text == "-" else text
    given = {"payload_md": payload, "target_space": space, "kind": kind, "actor_user_id": actor}
    reply = call_tool("memory_store", {k: v for k, v in given.items() if v is not None})
    print(json.dumps(reply, ensure_ascii=False, indent=2))
    if not reply["ok"] and reply["action"] != "deferred":
        raise typer.Exit(1)


def query(
    text: Annotated[str, typer.Argument(help="What you want to know.")],
    space: Annotated[list[str] | None, typer.Option(help="Where to look; may be repeated.")] = None,
    top_k: Annotated[int, typer.Option(help="How many results at most.")] = 10,
    actor: Annotated[str | None, typer.Option(help="Who is acting.")] = None,
) -> None:
    """Search memories."""
    given = {"query": text, "spaces": space or None, "top_k": top_k, "actor_user_id": actor}
    reply = call_tool("memory_query", {k: v for k, v in given.items() if v is not None})
    print(json.dumps(reply, ensure_ascii=False, indent=2))


def mcp_config(
    client: Annotated[str, typer.Argument(help="cursor, claude-code or vscode")],
) -> None:
    """Print what to paste into an MCP client."""
    from engram.kernel.errors import InputError
    from engram.kernel.settings import Settings

    settings = Settings.load()
    url = f"{settings.gateway_url}/mcp"
    known = mcp_configurations(url)
    if client not in known:
        raise InputError(f"unknown client {client!r}", hint=f"one of {', '.join(known)}")
    print(known[client])


def mcp_configurations(url: str) -> dict[str, str]:
    return {
        "cursor": json.dumps({"mcpServers": {"engram": {"url": url}}}, indent=2),
        "claude-code": f"claude mcp add --transport http engram {url}",
        "vscode": json.dumps({"servers": {"engram": {"type": "http", "url": url}}}, indent=2),
    }


def call_tool(name: str, arguments: dict[str, Any], base_url: str | None = None) -> dict[str, Any]:
    """One call of the bare form; an error reply becomes an `EngramError`."""
    import httpx2

    from engram.kernel.errors import EngramError
    from engram.kernel.settings import Settings

    if base_url is None:
        base_url = Settings.load().gateway_url
    try:
        with httpx2.Client(base_url=base_url, timeout=60, trust_env=False) as http:
            reply: dict[str, Any] = http.post("/mcp", json={"tool": name, "arguments": arguments}).json()
    except UnicodeEncodeError as error:
        raise EngramError("the text is not valid Unicode", hint="check the terminal's encoding") from error
    except (httpx2.HTTPError, ValueError) as error:
        raise EngramError(f"no gateway answers at {base_url}", hint="start one with `engram up`") from error
    if reply.get("success") is False:
        raise EngramError(reply["message"], hint=f"correlation id {reply['correlation_id']}")
    return reply
