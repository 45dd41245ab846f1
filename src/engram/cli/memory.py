"""Commands that talk to the running gateway, as an agent would."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from engram.kernel.settings import Settings


def store(
    text: Annotated[str, typer.Argument(help="The memory, or - to read it from standard input.")],
    space: Annotated[str | None, typer.Option(help="private:<actor>, team:<project> or org:<name>.")] = None,
    kind: Annotated[str | None, typer.Option(help="FACT, PROCEDURE, PITFALL, DECISION, ...")] = None,
    actor: Annotated[str | None, typer.Option(help="Who is acting.")] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Make a memory card; long blocks become evidence.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="The card's title.")] = None,
) -> None:
    """Store a memory."""
    payload = sys.stdin.read() if text == "-" else text
    given: dict[str, Any] = {"target_space": space, "actor_user_id": actor}
    if card or title:
        given |= _card(payload, title if card else None, kind, given)
    else:
        given |= {"payload_md": payload, "kind": kind}
    reply = call_tool("memory_store", {k: v for k, v in given.items() if v is not None})
    print(json.dumps(reply, ensure_ascii=False, indent=2))
    if not reply["ok"] and reply["action"] != "deferred":
        raise typer.Exit(1)


def _card(text: str, title: str | None, kind: str | None, placed: dict[str, Any]) -> dict[str, Any]:
    """A card of the text: its first paragraph sums up, its long blocks are uploaded as evidence."""
    from engram.gateway.cards import draft_card, split_summary
    from engram.kernel.errors import InputError

    if title is None:
        raise InputError("a card needs --card and --title", hint="say in a few words what it is about")
    summary, details = split_summary(text)
    draft = draft_card(kind or "FACT", title, summary, details=details)
    where = {}
    for blob in draft.blobs:
        given = {**placed, "content": blob.content, "kind": blob.kind}
        reply = call_tool("evidence_upload", {k: v for k, v in given.items() if v is not None})
        where[blob.sha256] = reply["uri"]
        print(f"{blob.kind} of {blob.lines} lines: {reply['message']}", file=sys.stderr)
    made = draft.finish(where)
    return {
        "payload_md": made.payload_md,
        "kind": made.kind,
        "meta_json": made.meta_json,
        "evidence_refs": made.evidence_refs,
    }


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


def forget(
    memory_id: Annotated[str | None, typer.Option(help="The memory server's id, as store said it.")] = None,
    outbox_id: Annotated[int | None, typer.Option(help="The outbox row, if it was deferred.")] = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept in the audit.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who is acting.")] = None,
) -> None:
    """Make a memory unreadable at once, and have its copy deleted."""
    given = {"memory_id": memory_id, "outbox_id": outbox_id, "reason": reason, "actor_user_id": actor}
    reply = call_tool("memory_forget", {k: v for k, v in given.items() if v is not None})
    print(json.dumps(reply, ensure_ascii=False, indent=2))


def mcp_config(
    client: Annotated[str, typer.Argument(help="cursor, claude-code or vscode")],
    stdio: Annotated[bool, typer.Option("--stdio", help="The client starts `engram mcp` itself.")] = False,
    token: Annotated[
        str | None, typer.Option(help="For a gateway that asks for one; or ENGRAM_TOKEN.")
    ] = None,
) -> None:
    """Print what to paste into an MCP client."""
    from engram.kernel.errors import InputError
    from engram.kernel.settings import Settings

    settings = Settings.load()
    token = token or settings.token
    if stdio:
        known = stdio_configurations([*_program(), "mcp"], _client_environment(settings, token))
    else:
        known = mcp_configurations(f"{settings.gateway_url}/mcp", token)
    if client not in known:
        raise InputError(f"unknown client {client!r}", hint=f"one of {', '.join(known)}")
    print(known[client])


def mcp_configurations(url: str, token: str | None = None) -> dict[str, str]:
    """For clients that talk to the running gateway."""
    import shlex

    authorization = f"Bearer {token}"
    more = {"headers": {"Authorization": authorization}} if token else {}
    options = ["--header", f"Authorization: {authorization}"] if token else []
    return {
        "cursor": json.dumps({"mcpServers": {"engram": {"url": url, **more}}}, indent=2),
        # Its options take all words up to the next option: they come after the address.
        "claude-code": shlex.join(["claude", "mcp", "add", "--transport", "http", "engram", url, *options]),
        "vscode": json.dumps({"servers": {"engram": {"type": "http", "url": url, **more}}}, indent=2),
    }


def stdio_configurations(command: list[str], environment: dict[str, str]) -> dict[str, str]:
    """For clients that start the command themselves."""
    import shlex

    program, *arguments = command
    server = {"command": program, "args": arguments, **({"env": environment} if environment else {})}
    options = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    return {
        "cursor": json.dumps({"mcpServers": {"engram": server}}, indent=2),
        # As above: another option must stand between `--env` and the name.
        "claude-code": shlex.join(
            ["claude", "mcp", "add", *options, "--transport", "stdio", "engram", "--", *command]
        ),
        "vscode": json.dumps({"servers": {"engram": {"type": "stdio", **server}}}, indent=2),
    }


def _program() -> list[str]:
    """This very program, by its absolute path: a client has a PATH of its own."""
    from pathlib import Path

    script = Path(sys.executable).with_name("engram")
    return [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "engram"]


def _client_environment(settings: Settings, token: str | None) -> dict[str, str]:
    """What `engram mcp` must be told when a client starts it without this shell's variables."""
    from engram.kernel.settings import Settings, default_data_dir, described

    usual = Settings(data_dir=default_data_dir({}))
    names = ("data_dir", "gateway_host", "gateway_port")
    found = {
        setting.env: str(getattr(settings, name))
        for name, setting in described()
        if name in names and getattr(settings, name) != getattr(usual, name)
    }
    return {**found, "ENGRAM_TOKEN": token} if token else found


def call_tool(name: str, arguments: dict[str, Any], base_url: str | None = None) -> dict[str, Any]:
    """One call of the bare form; an error reply becomes an `EngramError`."""
    import httpx2

    from engram.kernel.errors import EngramError
    from engram.kernel.settings import Settings

    headers = {}
    if base_url is None:
        settings = Settings.load()
        base_url, headers = settings.gateway_url, _authorization(settings.token)
    try:
        with httpx2.Client(base_url=base_url, timeout=60, trust_env=False, headers=headers) as http:
            reply: dict[str, Any] = http.post("/mcp", json={"tool": name, "arguments": arguments}).json()
    except UnicodeEncodeError as error:
        raise EngramError("the text is not valid Unicode", hint="check the terminal's encoding") from error
    except (httpx2.HTTPError, ValueError) as error:
        raise EngramError(f"no gateway answers at {base_url}", hint="start one with `engram up`") from error
    if reply.get("success") is False:
        raise EngramError(reply["message"], hint=f"correlation id {reply['correlation_id']}")
    return reply


def _authorization(token: str | None) -> dict[str, str]:
    """The header that says who we are, where there is a token."""
    from engram.kernel.errors import ConfigError
    from engram.kernel.logs import hide

    if token is None:
        return {}
    hide(token)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("ENGRAM_TOKEN: is not a token", hint="make one with `engram token create OWNER`")
    return {"Authorization": f"Bearer {token}"}
