"""The `engram` command.

A command's module is imported when it is asked for, and its work when it runs,
so that `engram --help` is quick. An `EngramError` ends a command with one line
and the next step, never a trace.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engram.cli.commands import ABOUT, COMMANDS, GROUPS, PASSED_ON, overview

if TYPE_CHECKING:
    import typer


def main() -> None:
    # Nobody's plug-ins in what checks every request; looking for them takes a tenth of each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
    asked = sys.argv[1:]
    if asked in ([], ["--help"]):
        print(overview())
        sys.exit(0 if asked else 2)
    # For what there is not, all that there is: its name may be nearly right.
    known = asked[0] in COMMANDS or asked[0] in GROUPS
    _guarded(application(asked[:1] if known else [*COMMANDS, *GROUPS]))


def application(names: Iterable[str]) -> typer.Typer:
    """These commands and groups, with all that they need."""
    import typer

    app = typer.Typer(
        name="engram",
        help=ABOUT,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(lambda: None)  # else one command alone would be taken for the whole
    for name in names:
        if group := GROUPS.get(name):
            within = typer.Typer(help=group.says, no_args_is_help=True)
            for inner, target in group.commands.items():
                within.command(inner)(_function(target))
            app.add_typer(within, name=name)
        else:
            more = {"allow_extra_args": True, "ignore_unknown_options": True} if name in PASSED_ON else None
            app.command(name, context_settings=more)(_function(COMMANDS[name].target))
    return app


def __getattr__(name: str) -> Any:
    """`app` is the whole command, for whoever calls it from Python."""
    if name == "app":
        return application([*COMMANDS, *GROUPS])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _function(target: str) -> Callable[..., None]:
    module, _, function = target.partition(":")
    found: Callable[..., None] = getattr(import_module(f"engram.cli.{module}"), function)
    return found


def run(command: Callable[..., None]) -> None:
    """One command by itself, with the same manners as `engram`."""
    import typer

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
