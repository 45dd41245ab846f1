"""Numbered SQL files, applied once each, in order, under an advisory lock.

Two processes may migrate at once: one does it, the other waits and finds it
done. Each file and its version row are one transaction, so a crash leaves the
database at a whole version. A database that is newer than the code, or whose
applied files differ from the code's, is refused and left alone.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

import psycopg

from engram.kernel.errors import DatabaseTimeout, SchemaError
from engram.postgres.errors import translated
from engram.postgres.pool import connect
from engram.postgres.query import Row

_FILE = re.compile(r"(?P<version>\d{4})_(?P<name>\w+)\.sql")
_READABLE = "schema.sql"
_LOCK_KEY = 0x656E6772616D  # "engram"
_LOCK_WAIT_SECONDS = 300.0
_LOCK_POLL_SECONDS = 0.1

_CREATE_LEDGER = """
CREATE TABLE IF NOT EXISTS public.engram_schema_version (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    checksum   text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)
"""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.version:04d} {self.name}"


def load_migrations(package: str) -> list[Migration]:
    """The numbered files beside `package`; gaps and strangers are refused."""
    found = [
        _loaded(package, entry)
        for entry in files(package).iterdir()
        if entry.name.lower().endswith(".sql") and entry.name != _READABLE
    ]
    found.sort(key=lambda m: m.version)
    if [m.version for m in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"{package}: migrations are not numbered 0001, 0002, ...")
    return found


def _loaded(package: str, entry: Traversable) -> Migration:
    match = _FILE.fullmatch(entry.name)
    if match is None:
        raise ValueError(f"{package}: {entry.name} is not named like 0001_what_it_does.sql")
    return Migration(int(match["version"]), match["name"], entry.read_text("utf-8"))


def pending(dsn: str, migrations: Sequence[Migration]) -> list[Migration]:
    """What `migrate` would apply; raises `SchemaError` if it would refuse."""
    with translated("read the schema version"), connect(dsn) as connection:
        return _pending(connection, migrations)


def migrate(
    dsn: str, migrations: Sequence[Migration], *, on_progress: Progress = lambda _: None
) -> list[Migration]:
    """Bring the database to the newest version; returns what was applied."""
    with translated("migrate"), connect(dsn, application_name="engram-migrate") as connection:
        connection.execute("SET statement_timeout = 0")
        connection.execute("SET lock_timeout = '60s'")
        _lock(connection, on_progress)
        todo = _pending(connection, migrations)
        if todo:
            connection.execute(_CREATE_LEDGER)
        for migration in todo:
            on_progress(f"applying {migration}")
            _apply(connection, migration)
        return todo


def _lock(connection: psycopg.Connection[Row], on_progress: Progress) -> None:
    """Polled rather than blocking: a waiter can say what it waits for, and gives up."""
    give_up = time.monotonic() + _LOCK_WAIT_SECONDS
    told = False
    while True:
        row = connection.execute("SELECT pg_try_advisory_lock(%s) AS got", [_LOCK_KEY]).fetchone()
        if row and row["got"]:
            return
        if time.monotonic() > give_up:
            raise DatabaseTimeout(
                "another process has been migrating this database for five minutes",
                hint="see `SELECT * FROM pg_locks WHERE locktype = 'advisory'`",
            )
        if not told:
            on_progress("another process is migrating; waiting for it")
            told = True
        time.sleep(_LOCK_POLL_SECONDS)


def _applied(connection: psycopg.Connection[Row]) -> list[Row]:
    row = connection.execute("SELECT to_regclass('public.engram_schema_version') AS ledger").fetchone()
    if row is None or row["ledger"] is None:
        return []
    return connection.execute(
        "SELECT version, name, checksum FROM public.engram_schema_version ORDER BY version"
    ).fetchall()


def _pending(connection: psycopg.Connection[Row], migrations: Sequence[Migration]) -> list[Migration]:
    applied = _applied(connection)
    if len(applied) > len(migrations):
        raise SchemaError(
            f"the database is at version {applied[-1]['version']}, this engram knows {len(migrations)}",
            hint="install the engram that migrated it, or a newer one; nothing was changed",
        )
    for row, migration in zip(applied, migrations, strict=False):
        if row["checksum"] != migration.checksum:
            raise SchemaError(
                f"migration {migration} was applied with other contents",
                hint="this database was made by another build of engram; nothing was changed",
            )
    return list(migrations[len(applied) :])


def _apply(connection: psycopg.Connection[Row], migration: Migration) -> None:
    with connection.transaction():
        connection.execute(migration.sql.encode())
        connection.execute(
            "INSERT INTO public.engram_schema_version (version, name, checksum) VALUES (%s, %s, %s)",
            [migration.version, migration.name, migration.checksum],
        )
