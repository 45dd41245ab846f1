"""The `engram` command.

Each command's work is imported when it runs, so that `engram --help` is quick.
An `EngramError` ends a command with one line and the next step, never a trace.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from engram.cli import (
    database,
    evidence,
    governance,
    ingest,
    mcp,
    memory,
    outbox,
    roles,
    sandbox,
    scm,
    search,
    stack,
    token,
    verify,
    why,
)

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
tokens = typer.Typer(help="Make, list and revoke callers' tokens.", no_args_is_help=True)
app.add_typer(tokens, name="token")
governing = typer.Typer(help="See and change who may write to a project.", no_args_is_help=True)
app.add_typer(governing, name="governance")
files = typer.Typer(help="Keep and read the files that memories rest on.", no_args_is_help=True)
app.add_typer(files, name="evidence")
waiting = typer.Typer(help="See what waits for the memory server, and try again.", no_args_is_help=True)
app.add_typer(waiting, name="outbox")
following = typer.Typer(help="Follow git, Subversion and GitLab, and remember.", no_args_is_help=True)
app.add_typer(following, name="scm")

bringing = typer.Typer(help="Bring documents in, and see how they are.", no_args_is_help=True)
app.add_typer(bringing, name="ingest")
boxes = typer.Typer(help="Make sandboxes and run commands in them.", no_args_is_help=True)
app.add_typer(boxes, name="sandbox")

app.command("up")(stack.up)
app.command("demo")(stack.demo)
app.command("hold")(stack.hold)
app.command("release")(stack.release)
app.command("serve")(roles.serve)
app.command("memory-server")(roles.memory_server)
worker.command("outbox")(roles.worker_outbox)
worker.command("ingest")(roles.worker_ingest)
worker.command("publisher")(roles.worker_publisher)
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
app.command("forget")(memory.forget)
app.command("search")(search.search)
app.command("why")(why.why)
app.command("report")(governance.report)
governing.command("show")(governance.show)
governing.command("set")(governance.set_)
files.command("upload")(evidence.upload)
files.command("read")(evidence.read)
files.command("show")(evidence.read)
waiting.command("list")(outbox.list_)
waiting.command("show")(outbox.show)
waiting.command("requeue")(outbox.requeue)
following.command("add")(scm.add)
following.command("sync")(scm.sync)
following.command("status")(scm.status)
following.command("materialize")(scm.materialize)
following.command("consume")(scm.consume)
bringing.command("upload")(ingest.upload)
bringing.command("status")(ingest.status)
bringing.command("retry")(ingest.retry)
bringing.command("rebuild")(ingest.rebuild)
bringing.command("events")(ingest.list_events)
boxes.command("create")(sandbox.create)
boxes.command("exec")(sandbox.exec_)
boxes.command("ls")(sandbox.ls)
boxes.command("rm")(sandbox.rm)
boxes.command("reap")(sandbox.reap)
app.command("mcp")(mcp.mcp)
app.command("mcp-config")(memory.mcp_config)
tokens.command("create")(token.create)
tokens.command("list")(token.list_)
tokens.command("revoke")(token.revoke)
app.command("doctor")(database.doctor)
app.command("verify")(verify.verify)
app.command("settings")(database.settings)


def main() -> None:
    # Nobody's plug-ins in what checks every request; looking for them takes a tenth of each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
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
