"""`schema.sql` is the migrations' schema, written to be read."""

from __future__ import annotations

import re
import subprocess
from importlib.resources import files
from typing import Any

import psycopg
import pytest

from engram.embedded import EmbeddedPostgres, postgres_binary
from engram.postgres.pool import connect

SCHEMA = files("engram.migrations").joinpath("schema.sql").read_text("utf-8")
OBJECT = re.compile(
    r"^CREATE (?:SCHEMA|TABLE|VIEW|SEQUENCE|FUNCTION|TRIGGER|(?:UNIQUE )?INDEX) ([\w.]+)", re.M
)


def dumped(dsn: str) -> list[str]:
    """The schema as `pg_dump` tells it, without the ledger and what differs from run to run."""
    text = subprocess.run(
        [
            str(postgres_binary("pg_dump")),
            "--schema-only",
            "--no-comments",
            "--no-owner",
            "--exclude-table=public.engram_schema_version",
            f"--dbname={dsn}",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("--", "\\restrict", "\\unrestrict"))]


def database_settings(dsn: str) -> list[tuple[Any, ...]]:
    """What is set on the database itself, such as its search path; `pg_dump` leaves that out."""
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "SELECT setrole, setconfig FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase"
            " WHERE d.datname = current_database()"
        ).fetchall()


def test_it_is_equal_to_the_migrations(
    dsn: str, empty_dsn: str, postgres_server: EmbeddedPostgres, template: str
) -> None:
    with connect(empty_dsn) as connection:
        connection.execute(SCHEMA.encode())
    from_migrations = dumped(dsn)
    assert len(from_migrations) > 50
    assert dumped(empty_dsn) == from_migrations
    # A copy of a database has none of its settings, so the template itself is asked.
    assert database_settings(empty_dsn) == database_settings(postgres_server.dsn(template))
    assert any("search_path" in config for _, configs in database_settings(empty_dsn) for config in configs)


def test_the_comparison_sees_a_difference(dsn: str, empty_dsn: str) -> None:
    changed = SCHEMA.replace("fillfactor = 70", "fillfactor = 71", 1)
    assert changed != SCHEMA
    with connect(empty_dsn) as connection:
        connection.execute(changed.encode())
    assert dumped(empty_dsn) != dumped(dsn)


@pytest.mark.parametrize("created", list(OBJECT.finditer(SCHEMA)), ids=lambda created: created[1])
def test_every_object_is_explained(created: re.Match[str]) -> None:
    """A comment stands right above it, or above the group that it belongs to."""
    group = SCHEMA[: created.start()].rpartition("\n\n")[2]
    assert group.startswith("-- ")


def test_it_makes_no_ledger() -> None:
    """Which versions a database has is for the migrations to say."""
    assert not any("engram_schema_version" in created[1] for created in OBJECT.finditer(SCHEMA))
