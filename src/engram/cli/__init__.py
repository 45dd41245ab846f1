"""The `engram` command.

A command's module is imported when it is asked for, and its work when it runs,
so that `engram --help` is quick. An `EngramError` ends a command with one line
and the next step, never a trace. Whoever reads a command's output may stop
reading (`| head`): that ends it without a word.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

from engram.cli.commands import ABOUT, COMMANDS, GROUPS, PASSED_ON, overview

if TYPE_CHECKING:
    import typer

    from engram.kernel.errors import EngramError
    from engram.kernel.settings import Settings

# What a shell says of a command that a closed pipe ended: 128 + SIGPIPE.
NOBODY_READS = 141


def main() -> None:
    # Nobody's plug-ins in what checks every request; looking for them takes a tenth of each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
    asked = sys.argv[1:]
    if asked in ([], ["--help"], ["--version"]):
        _guarded(lambda: print(_version() if asked == ["--version"] else overview()))
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


def _version() -> str:
    from engram import __version__

    return f"engram {__version__}"


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
        _written_out(work) if sys.stdout else work()
    except EngramError as error:
        _tell(error.message, error.hint or _hint_for(error))
    except BrokenPipeError:
        sys.exit(NOBODY_READS)
    except OSError as error:
        _tell(str(error), _hint_for(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _written_out(work: Callable[[], object]) -> None:
    """Do the work and write out what it printed: Python would do that too late to tell of a failure."""
    out = sys.stdout
    try:
        work()
    except SystemExit:
        # The library that reads arguments takes a closed pipe for a failure, and leaves this mark.
        if sys.stdout is not out:
            _write_no_more(out)
            raise BrokenPipeError from None
        raise
    finally:
        try:
            out.flush()
        except OSError:
            _write_no_more(out)
            raise


def _write_no_more(out: TextIO) -> None:
    """What could not be written is not tried again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _tell(message: str, hint: str | None) -> None:
    from engram.kernel.logs import redact

    print(redact(f"engram: {message}"), file=sys.stderr)
    if hint:
        print(redact(f"        {hint}"), file=sys.stderr)
    sys.exit(1)


def _hint_for(error: EngramError | OSError) -> str | None:
    """The setting to look at, for an error that was made far from the settings."""
    from engram.kernel.errors import ConfigError, DatabaseUnavailable
    from engram.kernel.settings import Settings

    try:
        settings = Settings.load()
    except ConfigError:
        return None
    if isinstance(error, DatabaseUnavailable) and settings.postgres_dsn:
        return "POSTGRES_DSN says where PostgreSQL is: it must run there and let you in"
    if isinstance(error, OSError) and _is_about_the_data_folder(error, settings):
        return "the data folder must be writable for you and have room; ENGRAM_DATA_DIR names another one"
    return None


def _is_about_the_data_folder(error: OSError, settings: Settings) -> bool:
    """It, something in it, or a folder above that is not there and could not be made."""
    from pathlib import Path

    if not isinstance(error.filename, str):
        return False
    path = Path(error.filename).absolute()
    above = settings.data_dir.is_relative_to(path) and not os.path.isdir(path)
    return above or path.is_relative_to(settings.data_dir)
