"""Commands about the database and the settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engram.kernel.settings import Settings


def migrate(
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be applied.")] = False,
) -> None:
    """Bring the database to this version's schema."""
    from engram.assembly.addresses import migrate_all, own_migrations
    from engram.kernel.settings import Settings
    from engram.postgres.migrations import pending

    settings = Settings.load()
    with _database(settings) as dsn:
        if plan:
            todo = pending(dsn, own_migrations())
            print("\n".join(f"would apply {m}" for m in todo) or "up to date")
        else:
            done = migrate_all(dsn, _told)
            print(f"applied {len(done)} migration(s)" if done else "up to date")


def psql(
    context: typer.Context,
    dsn: Annotated[bool, typer.Option("--dsn", help="Print the connection string instead.")] = False,
) -> None:
    """Open psql on engram's database; further arguments go to psql."""
    from engram.postgres.pool import without_password

    found = running_database()
    if dsn:
        print(found)
        return
    shown, password = without_password(found)
    # By the environment, not the command line: others can read that.
    if password:
        os.environ["PGPASSWORD"] = password
    _become("psql", [shown, *context.args])


def pg_dump(context: typer.Context) -> None:
    """Run pg_dump on engram's database; all arguments go to pg_dump."""
    _become_beside_the_database("pg_dump", context.args)


def pg_restore(context: typer.Context) -> None:
    """Run pg_restore on the server of engram's database; all arguments go to pg_restore."""
    _become_beside_the_database("pg_restore", context.args)


def _become_beside_the_database(program: str, arguments: list[str]) -> None:
    """With the connection as PostgreSQL's own variables, so that `-d` may name another database there."""
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq import Conninfo

    given = conninfo_to_dict(running_database())
    for option in Conninfo.get_defaults():
        value = given.get(option.keyword.decode())
        if option.envvar and value is not None:
            os.environ[option.envvar.decode()] = str(value)
    _become(program, arguments)


def _become(program: str, arguments: list[str]) -> None:
    from engram.embedded import postgres_binary

    binary = str(postgres_binary(program))
    os.execv(binary, [binary, *arguments])  # noqa: S606 - no shell is wanted


def redis_cli(context: typer.Context) -> None:
    """Open redis-cli on engram's Redis; further arguments go to redis-cli."""
    from urllib.parse import urlsplit

    from engram.embedded import redis_binary, running_redis
    from engram.kernel.errors import EmbeddedError
    from engram.kernel.settings import Settings

    settings = Settings.load()
    found = settings.redis_url or running_redis(settings.data_dir)
    if found is None:
        raise EmbeddedError(f"no Redis is running in {settings.data_dir}", hint="start it with `engram up`")
    parts = urlsplit(found)
    # By the environment, not the command line: others can read that.
    os.environ["REDISCLI_AUTH"] = parts.password or ""
    binary = str(redis_binary("redis-cli"))
    if parts.scheme == "unix":
        where = ["-s", parts.path]
    else:
        where = [
            "-h",
            parts.hostname or "127.0.0.1",
            "-p",
            str(parts.port or 6379),
            "-n",
            parts.path[1:] or "0",
        ]
    os.execv(binary, [binary, *where, *context.args])  # noqa: S606 - no shell is wanted


def doctor() -> None:
    """Say how every part is, and check the invariants; exit 1 if anything is wrong."""
    from engram.cli.doctor import examine
    from engram.kernel import logs
    from engram.kernel.settings import Settings

    logs.configure("error")
    well = True
    for finding in examine(Settings.load()):
        well = well and finding.ok
        print(f"{'✓' if finding.ok else '✗'} {finding.part:<52} {finding.told}", flush=True)
        if finding.next_step:
            print(f"    {finding.next_step}", flush=True)
    raise typer.Exit(0 if well else 1)


def settings() -> None:
    """List every setting: its name, its value here, and what it is for."""
    from engram.kernel.errors import ConfigError
    from engram.kernel.settings import Settings, default_data_dir, described

    wrong = None
    try:
        loaded = Settings.load()
    except ConfigError as error:  # which sends people here to look names up
        wrong = ConfigError(error.message, hint=f"{error.hint or ''} (listed are the defaults)".strip())
        loaded = Settings(data_dir=default_data_dir(os.environ))
    for name, setting in described():
        value = getattr(loaded, name)
        shown = "***" if setting.secret and value else value
        print(f"{setting.env}={'' if value in (None, ()) else shown}\n    {setting.doc} ({setting.key})")
    if wrong is not None:
        raise wrong


def running_database() -> str:
    """The DSN of the configured database, or of the embedded one if it runs."""
    from engram.embedded import running_postgres
    from engram.kernel.errors import EmbeddedError
    from engram.kernel.settings import Settings

    settings = Settings.load()
    found = settings.postgres_dsn or running_postgres(settings.data_dir)
    if found is None:
        raise EmbeddedError(
            f"no PostgreSQL is running in {settings.data_dir}", hint="start it with `engram up`"
        )
    return found


def _told(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _database(settings: Settings) -> Iterator[str]:
    """The configured database, or the embedded one for as long as the command runs."""
    from engram.embedded import EmbeddedPostgres

    if settings.postgres_dsn:
        yield settings.postgres_dsn
        return
    with EmbeddedPostgres(settings.data_dir, on_progress=_told) as postgres:
        yield postgres.dsn()
