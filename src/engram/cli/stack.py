"""Commands that run the whole stack: `up` for real, `demo` on a throw-away folder."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram.supervisor import Stack


def up() -> None:
    """Run everything on this machine, and keep it running until Ctrl-C."""
    from engram.kernel import logs
    from engram.kernel.settings import Settings
    from engram.supervisor import Stack

    settings = Settings.load()
    logs.configure("warning", settings.log_format)
    stack = Stack(settings, on_progress=_progress)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stack.request_stop())
    with stack:
        if not stack.wait(0):
            _welcome(stack)
        stack.wait()
        _progress("stopping")
    _progress("stopped; nothing is lost")


def demo() -> None:
    """Show a write surviving a dead memory server, in under half a minute."""
    from engram.cli.demo import tell

    sys.exit(tell())


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _welcome(stack: Stack) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    from engram.cli.memory import mcp_configurations

    url = stack.gateway_url
    table = Table.grid(padding=(0, 2))
    rows = {
        "gateway": f"{url}  (MCP at /mcp, API at /docs)",
        "mode": stack.settings.gateway_mode,
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
    console.print(f'Try it:       {me} store "We deploy on Tuesdays." && {me} query deploy', highlight=False)
    console.print(f"Ctrl-C stops everything. `{me} demo` shows what a dead memory server costs: nothing.")


def _program() -> str:
    """How this very program is called from here."""
    import os
    import shutil

    return "engram" if shutil.which("engram") else os.path.relpath(sys.argv[0])
