"""Sandboxes by the running gateway: make one, run a command in it as if it were here, list, remove."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    import httpx2

Actor = Annotated[str | None, typer.Option(help="Who is acting.")]
SandboxId = Annotated[str, typer.Argument(metavar="ID", help="The sandbox, as create or ls said it.")]
ENDINGS = {
    "time": "it ran longer than --timeout",
    "cpu": "it used up its processor time",
    "disk": "the sandbox's disk is full",
    "output": "it wrote too much",
    "stop": "the sandbox was stopped, deleted, or expired",
}


def create(
    profile: Annotated[str, typer.Option(help="default, or shell: without engram's Python.")] = "default",
    ttl: Annotated[int | None, typer.Option(help="How many seconds it lives.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for every command; may be repeated.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="An idempotency key: the same again, the same sandbox.")
    ] = None,
    actor: Actor = None,
) -> None:
    """Make a sandbox and print its id."""
    asked = {"profile": profile, "ttl_seconds": ttl, "env": _variables(env or []), "actor_user_id": actor}
    headers = {"Idempotency-Key": key} if key else {}
    with _gateway() as http:
        reply = http.post(
            "/v1/sandboxes", json={k: v for k, v in asked.items() if v is not None}, headers=headers
        )
        print(_checked(reply).json()["id"])


def exec_(
    sandbox_id: SandboxId,
    argv: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")
    ],
    timeout: Annotated[float, typer.Option(help="After so many seconds it is ended.")] = 60.0,
    cwd: Annotated[str, typer.Option(help="Where in the sandbox it runs.")] = ".",
    actor: Actor = None,
) -> None:
    """Run a command in a sandbox: its output as it comes, its exit code as this one's."""
    asked = {"argv": argv, "timeout_seconds": timeout, "cwd": cwd, **_input()}
    ended: dict[str, Any] = {}
    with (
        _gateway(timeout + 60) as http,
        http.stream(
            "POST",
            f"/v1/sandboxes/{quote(sandbox_id, safe='')}/exec",
            json=asked,
            params=_acting(actor),
            headers={"Accept": "text/event-stream"},
        ) as reply,
    ):
        if reply.status_code != 200:
            reply.read()
            _checked(reply)
        for name, data in _events(reply):
            ended = _shown(name, data) or ended
    if not ended:
        from engram.kernel.errors import GatewayUnavailable

        raise GatewayUnavailable("the gateway hung up before the command ended")
    if ended["ended_by"]:
        print(f"engram: the command was ended: {ENDINGS[ended['ended_by']]}", file=sys.stderr)
    elif ended["truncated"]:
        print("engram: the command wrote more than is passed on", file=sys.stderr)
    raise typer.Exit(ended["exit_code"])


def ls(
    status: Annotated[str | None, typer.Option(help="Only these: creating, ready, failed, ...")] = None,
    actor: Actor = None,
) -> None:
    """List your sandboxes, newest first."""
    asked = {**_acting(actor), **({"status": status} if status else {})}
    cursor: dict[str, str] = {}
    with _gateway() as http:
        while True:
            page = _checked(http.get("/v1/sandboxes", params={**asked, **cursor})).json()
            if not cursor:
                print(f"{'ID':<36}  {'STATUS':<8}  {'PROFILE':<8}  {'CREATED':<20}  EXPIRES")
            for box in page["sandboxes"]:
                created, expires = (box[name][:19].replace("T", " ") for name in ("created_at", "expires_at"))
                print(f"{box['id']:<36}  {box['status']:<8}  {box['profile']:<8}  {created:<20}  {expires}")
            if page["next_cursor"] is None:
                return
            cursor = {"cursor": page["next_cursor"]}


def rm(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The sandboxes to remove.")],
    actor: Actor = None,
) -> None:
    """End what runs in sandboxes and remove them with their files."""
    with _gateway() as http:
        for sandbox_id in ids:
            _checked(http.delete(f"/v1/sandboxes/{quote(sandbox_id, safe='')}", params=_acting(actor)))
            print(sandbox_id)


def reap() -> None:
    """End what is past its time and remove what nobody knows; gateways do so by themselves."""
    import asyncio

    from engram.assembly.addresses import addresses, require_schema
    from engram.assembly.parts import open_executor
    from engram.assembly.sandboxes import reap_sandboxes
    from engram.cli.roles import prepared

    settings = prepared(quiet=True)

    async def once() -> int:
        async with open_executor(settings_found, "engram-reap") as db:
            return await reap_sandboxes(settings_found, db)

    with addresses(settings) as settings_found:
        require_schema(settings_found)
        print(f"{asyncio.run(once())} sandbox(es) ended or removed")


def _variables(given: list[str]) -> dict[str, str]:
    from engram.kernel.errors import InputError

    if wrong := [one for one in given if "=" not in one[1:]]:
        raise InputError(f"--env {wrong[0]!r} is not NAME=VALUE")
    return {name: value for name, _, value in (one.partition("=") for one in given)}


def _acting(actor: str | None) -> dict[str, str]:
    return {} if actor is None else {"actor_user_id": actor}


def _input() -> dict[str, str]:
    """What is piped into this command; a terminal is left alone."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return {}
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return {}
    content = sys.stdin.buffer.read()
    return {"stdin": base64.b64encode(content).decode(), "stdin_encoding": "base64"} if content else {}


def _events(reply: httpx2.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def _shown(name: str, data: dict[str, Any]) -> dict[str, Any] | None:
    """Pass on what was written; the last event is given back."""
    if name in ("stdout", "stderr"):
        stream = getattr(sys, name).buffer
        stream.write(base64.b64decode(data["base64"]) if "base64" in data else data["text"].encode())
        stream.flush()
    elif name == "error":
        raise _refused(data)
    return data if name == "exit" else None


def _checked(reply: httpx2.Response) -> httpx2.Response:
    if reply.status_code >= 400:
        raise _refused(reply.json())
    return reply


def _refused(body: dict[str, Any]) -> Exception:
    from engram.kernel.errors import EngramError

    return EngramError(body["message"], hint=f"correlation id {body['correlation_id']}")


@contextmanager
def _gateway(seconds: float = 60) -> Iterator[httpx2.Client]:
    import httpx2

    from engram.cli.memory import _authorization
    from engram.kernel.errors import GatewayUnavailable
    from engram.kernel.settings import Settings

    settings = Settings.load()
    url, headers = settings.gateway_url, _authorization(settings.token)
    try:
        with httpx2.Client(base_url=url, timeout=seconds, trust_env=False, headers=headers) as http:
            yield http
    except (httpx2.HTTPError, json.JSONDecodeError) as error:
        raise GatewayUnavailable(f"no gateway answers at {url}", hint="start one with `engram up`") from error
