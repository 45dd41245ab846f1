"""Commands that run the whole stack, or stop a part of it: `up` for real, `demo` on a throw-away folder."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engram.supervisor import Stack


def up() -> None:
    """Run everything on this machine, and keep it running until Ctrl-C."""
    from engram.kernel import logs
    from engram.kernel.settings import Settings
    from engram.supervisor import Stack

    settings = Settings.load()
    logs.configure("warning", settings.log_format)
    stack = Stack(settings, on_progress=_progress)
    # A terminal that is closed says SIGHUP.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stack.request_stop())
    with stack:
        if not stack.wait(0):
            _welcome(stack)
        stack.wait()
        _progress("stopping")
    _progress("stopped; nothing is lost")


def demo(
    kafka: Annotated[
        bool, typer.Option("--kafka", help="An upload surviving the restart of a broker (Java and Maven).")
    ] = False,
) -> None:
    """Show a write surviving a dead memory server, in under half a minute."""
    if kafka:
        from engram.cli.demo_kafka import tell as tell_of_kafka

        sys.exit(tell_of_kafka())
    from engram.cli.demo import tell

    sys.exit(tell())


def hold(
    role: Annotated[str, typer.Argument(help="memory-server, gateway, outbox-worker or ingest-worker.")],
) -> None:
    """Stop a role of the running stack and keep it down until `engram release`."""
    from engram import supervisor

    data_dir = _folder_of(role)
    supervisor.hold_role(data_dir, role)
    _wait_until(lambda: not _is_running(data_dir, role), f"{role} did not stop")
    print(f"{role} is down; `engram release {role}` brings it back")


def release(
    role: Annotated[str, typer.Argument(help="memory-server, gateway, outbox-worker or ingest-worker.")],
) -> None:
    """Bring back a role that `engram hold` stopped."""
    from engram import supervisor

    data_dir = _folder_of(role)
    supervisor.release_role(data_dir, role)
    see = f"see its log in {data_dir}/logs"
    _wait_until(lambda: _is_running(data_dir, role), f"{role} did not start; {see}")
    if url := _address_of(role):
        _wait_until(lambda: _is_well(url), f"{role} runs, and nothing answers at {url}; {see}")
    print(f"{role} is back")


def _address_of(role: str) -> str | None:
    """Where a role that has one listens, as far as it can be known here."""
    from engram.assembly.addresses import memory_port
    from engram.kernel.settings import Settings

    settings = Settings.load()
    if role == "gateway" and settings.gateway_port:
        return settings.gateway_url
    return f"http://127.0.0.1:{memory_port(settings.data_dir)}" if role == "memory-server" else None


def _is_well(url: str) -> bool:
    import httpx2

    try:
        return httpx2.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def _folder_of(role: str) -> Path:
    """The data folder, if a stack runs there that has such a role."""
    from engram import supervisor
    from engram.kernel.errors import EmbeddedError, InputError
    from engram.kernel.settings import Settings

    data_dir = Settings.load().data_dir
    if not supervisor.is_up(data_dir):
        raise EmbeddedError(f"engram is not up on {data_dir}", hint="start it with `engram up`")
    roles = supervisor.roles_of(data_dir)
    if role not in roles:
        raise InputError(f"this stack has no role {role!r}", hint=f"it has {', '.join(roles)}")
    return data_dir


def _is_running(data_dir: Path, role: str) -> bool:
    from engram import supervisor

    return supervisor.roles_of(data_dir).get(role) is not None


def _wait_until(look: Callable[[], bool], failed: str) -> None:
    import time

    from engram.kernel.errors import EmbeddedError

    give_up = time.monotonic() + 30
    while not look():
        if time.monotonic() > give_up:
            raise EmbeddedError(failed)
        time.sleep(0.05)


def _progress(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed must not keep us from stopping
        print(f"  {text}", file=sys.stderr, flush=True)


# In words: the bare name of a mode reads as if something were wrong.
_IF_ONE_FAILS = {"DEGRADED": "the others go on (mode DEGRADED)", "FULL": "none is ready (mode FULL)"}


def _welcome(stack: Stack) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    from engram.cli.memory import mcp_configurations

    url = stack.gateway_url
    table = Table.grid(padding=(0, 2))
    rows = {
        "gateway": f"{url}  (MCP at /mcp, API at /docs)",
        "if one fails": _IF_ONE_FAILS[stack.settings.gateway_mode],
        "PostgreSQL": "yours (POSTGRES_DSN)" if stack.settings.postgres_dsn else "embedded; `engram psql`",
        "Redis": "embedded; `engram redis-cli`" if stack.redis else "yours (REDIS_URL)",
        "memory server": stack.environment["OPENMEMORY_BASE_URL"],
        "data and logs": str(stack.settings.data_dir),
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", value)
    console = Console(file=sys.stdout, soft_wrap=True)
    console.print(Panel(table, title="engram is up", expand=False))
    console.print("Claude Code:  " + mcp_configurations(f"{url}/mcp")["claude-code"], highlight=False)
    console.print('Cursor:       {"mcpServers": {"engram": {"url": "' + url + '/mcp"}}}', highlight=False)
    me = _program()
    if stack.settings.tokens_file is not None:
        console.print(f"A token is asked for: `{me} token create YOU` makes one; ENGRAM_TOKEN=... gives it.")
    console.print(f'Try it:       {me} store "We deploy on Tuesdays." && {me} query deploy', highlight=False)
    console.print(f"Ctrl-C stops everything. `{me} demo` shows what a dead memory server costs: nothing.")


def _program() -> str:
    """How this very program is called from here."""
    import os
    import shutil

    return "engram" if shutil.which("engram") else os.path.relpath(sys.argv[0])
