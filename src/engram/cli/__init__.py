"""The `engram` command.

Each command's work is imported when it runs, so that `engram --help` is quick.
An `EngramError` ends a command with one line and the next step, never a trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from engram.cli import database, memory, roles, stack

app = typer.Typer(
    name="engram",
    help="The durable back end for AI agents: no write is lost, doubled or unaccounted for.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
worker = typer.Typer(help="Run a background role.", no_args_is_help=True)
app.add_typer(worker, name="worker")

app.command("up")(stack.up)
app.command("demo")(stack.demo)
app.command("serve")(roles.serve)
app.command("memory-server")(roles.memory_server)
worker.command("outbox")(roles.worker_outbox)
app.command("reconcile")(roles.reconcile)
app.command("migrate")(database.migrate)
app.command("psql", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    database.psql
)
app.command("redis-cli", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    database.redis_cli
)
app.command("store")(memory.store)
app.command("query")(memory.query)
app.command("mcp-config")(memory.mcp_config)
app.command("doctor")(database.doctor)
app.command("settings")(database.settings)


def main() -> None:
    _guarded(app)


def run(command: Callable[..., None]) -> None:
    """One command by itself, with the same manners as `engram`."""
    _guarded(lambda: typer.run(command))


def _guarded(work: Callable[[], object]) -> None:
    from engram.kernel.errors import EngramError
    from engram.kernel.failpoints import arm_from_environment

    try:
        arm_from_environment()
        work()
    except EngramError as error:
        from engram.kernel.logs import redact

        print(redact(f"engram: {error.message}"), file=sys.stderr)
        if error.hint:
            print(redact(f"        {error.hint}"), file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"engram: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
