"""What `engram` can do: each command with the module that does it, which is imported when it is asked for.

`engram --help` is printed from this table, without the library that reads arguments.
"""

from __future__ import annotations

import shutil
import textwrap
from typing import NamedTuple

ABOUT = "The durable back end for AI agents: no write is lost, doubled or unaccounted for."


class Command(NamedTuple):
    """`target` is a module of this package and its function; `says` is the first paragraph of its docstring."""

    target: str
    says: str


class Group(NamedTuple):
    """Commands that belong together, by name, each with its target."""

    says: str
    commands: dict[str, str]


# Whose further arguments are another program's.
PASSED_ON = ("psql", "pg_dump", "pg_restore", "redis-cli")

COMMANDS: dict[str, Command] = {
    "up": Command("stack:up", "Run everything on this machine, and keep it running until Ctrl-C."),
    "demo": Command("stack:demo", "Show a write surviving a dead memory server, in under half a minute."),
    "hold": Command(
        "stack:hold",
        "Stop a role of the running stack and keep it down until `engram release`.",
    ),
    "release": Command("stack:release", "Bring back a role that `engram hold` stopped."),
    "serve": Command("roles:serve", "Run the gateway: HTTP and MCP only, no worker."),
    "memory-server": Command("roles:memory_server", "Run the embedded memory server."),
    "reconcile": Command(
        "roles:reconcile",
        "Finish what processes that died could not, and check the sums: 0 clean, 1 repaired, 2 violated.",
    ),
    "migrate": Command("database:migrate", "Bring the database to this version's schema."),
    "psql": Command("database:psql", "Open psql on engram's database; further arguments go to psql."),
    "pg_dump": Command("database:pg_dump", "Run pg_dump on engram's database; all arguments go to pg_dump."),
    "pg_restore": Command(
        "database:pg_restore",
        "Run pg_restore on the server of engram's database; all arguments go to pg_restore.",
    ),
    "redis-cli": Command(
        "database:redis_cli",
        "Open redis-cli on engram's Redis; further arguments go to redis-cli.",
    ),
    "store": Command("memory:store", "Store a memory."),
    "query": Command("memory:query", "Search memories."),
    "forget": Command("memory:forget", "Make a memory unreadable at once, and have its copy deleted."),
    "search": Command("search:search", "Search documents, and show the passages that answer best."),
    "why": Command(
        "why:why",
        "Say what became of a write, what it waits for, since when, and what to do next.",
    ),
    "report": Command(
        "governance:report",
        "Show what became of the writes, how the outbox stands, and whether the sums agree.",
    ),
    "mcp": Command(
        "mcp:mcp",
        "Serve MCP on standard input and output; starts `engram up` if nobody answers.",
    ),
    "mcp-config": Command("memory:mcp_config", "Print what to paste into an MCP client."),
    "doctor": Command(
        "database:doctor",
        "Say how every part is, and check the invariants; exit 1 if anything is wrong.",
    ),
    "verify": Command(
        "verify:verify",
        "Look at everything engram depends on, and say whether it is fit for use; exit 1 if it is not.",
    ),
    "settings": Command(
        "database:settings",
        "List every setting: its name, its value here, and what it is for.",
    ),
}

GROUPS: dict[str, Group] = {
    "worker": Group(
        "Run a background role.",
        {
            "outbox": "roles:worker_outbox",
            "ingest": "roles:worker_ingest",
            "publisher": "roles:worker_publisher",
        },
    ),
    "token": Group(
        "Make, list and revoke callers' tokens.",
        {
            "create": "token:create",
            "list": "token:list_",
            "revoke": "token:revoke",
        },
    ),
    "governance": Group(
        "See and change who may write to a project.",
        {
            "show": "governance:show",
            "set": "governance:set_",
        },
    ),
    "evidence": Group(
        "Keep and read the files that memories rest on.",
        {
            "upload": "evidence:upload",
            "read": "evidence:read",
            "show": "evidence:read",
        },
    ),
    "outbox": Group(
        "See what waits for the memory server, and try again.",
        {
            "list": "outbox:list_",
            "show": "outbox:show",
            "requeue": "outbox:requeue",
        },
    ),
    "scm": Group(
        "Follow git, Subversion and GitLab, and remember.",
        {
            "add": "scm:add",
            "sync": "scm:sync",
            "status": "scm:status",
            "materialize": "scm:materialize",
            "consume": "scm:consume",
        },
    ),
    "ingest": Group(
        "Bring documents in, and see how they are.",
        {
            "upload": "ingest:upload",
            "status": "ingest:status",
            "retry": "ingest:retry",
            "rebuild": "ingest:rebuild",
            "events": "ingest:list_events",
        },
    ),
    "sandbox": Group(
        "Make sandboxes and run commands in them.",
        {
            "create": "sandbox:create",
            "exec": "sandbox:exec_",
            "ls": "sandbox:ls",
            "rm": "sandbox:rm",
            "reap": "sandbox:reap",
        },
    ),
}


def overview() -> str:
    """What `engram --help` says."""
    said = {name: command.says for name, command in COMMANDS.items()}
    said |= {name: group.says for name, group in GROUPS.items()}
    width = min(100, shutil.get_terminal_size().columns)
    column = max(map(len, said)) + 4
    lines = [
        textwrap.fill(says, width, initial_indent=f"  {name:<{column - 2}}", subsequent_indent=" " * column)
        for name, says in said.items()
    ]
    about = textwrap.fill(ABOUT, width, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(
        [
            "Usage: engram COMMAND [ARGS]...",
            "",
            about,
            "",
            "Commands:",
            *lines,
            "",
            "`engram COMMAND --help` says more of each; `engram --version`, which engram this is.",
        ]
    )
