"""Named statements: the loader's rules, and that every statement engram has fits its schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

import engram
from engram.assembly.addresses import migrate_all
from engram.embedded import EmbeddedPostgres
from engram.memory.server import prepare
from engram.postgres import Statement, load_sql
from engram.postgres.pool import connect
from engram.postgres.query import Row
from engram.postgres.sqlfile import parse_sql

ROOT = Path(engram.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.sql") if "migrations" not in path.parts)
PLACEHOLDER = re.compile(r"%\((\w+)\)s")

TWO = """\
-- name: first
-- What it is for.
SELECT 1;

-- name: second
-- What this is for,
-- in more than a line.
SELECT %(a)s
FROM t;
"""


def test_statements_by_name() -> None:
    loaded = parse_sql(TWO, "demo")
    assert list(loaded) == ["first", "second"]
    assert loaded["first"] == Statement("demo.first", "SELECT 1;")
    assert loaded["second"].name == "demo.second"
    assert loaded["second"].text.endswith("SELECT %(a)s\nFROM t;")


def test_what_is_loaded_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        parse_sql(TWO, "demo")["first"] = Statement("x", "y")  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("SELECT 1;\n", id="no name"),
        pytest.param("-- name: a\nSELECT 1;\n", id="no purpose"),
        pytest.param("-- name: a\n--\nSELECT 1;\n", id="an empty purpose"),
        pytest.param("-- name: a\n\n-- Purpose.\nSELECT 1;\n", id="a purpose apart"),
        pytest.param("-- name: a b\n-- Purpose.\nSELECT 1;\n", id="two words"),
        pytest.param("-- name:a\n-- Purpose.\nSELECT 1;\n", id="no space"),
        pytest.param("-- Name: a\n-- Purpose.\nSELECT 1;\n", id="another spelling"),
        pytest.param(TWO + "--  name: c\n-- Purpose.\nSELECT 3;\n", id="one of three is misspelled"),
        pytest.param(TWO + "-- name: first\n-- Again.\nSELECT 3;\n", id="twice"),
        pytest.param(TWO + "-- name: c\n-- Purpose.\n", id="nothing under it"),
    ],
)
def test_a_file_that_breaks_the_rules_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"^demo\.sql: "):
        parse_sql(text, "demo")


def test_a_statement_before_the_first_name_is_refused() -> None:
    with pytest.raises(ValueError):
        parse_sql("DELETE FROM t;\n" + TWO, "demo")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        load_sql("engram.logbook", "nothing.sql")


def test_there_are_files() -> None:
    assert {path.as_posix() for path in FILES} >= {
        "logbook/outbox.sql",
        "logbook/writes.sql",
        "memory/store.sql",
    }


def statements() -> Iterator[object]:
    for path in FILES:
        package = ".".join(("engram", *path.parent.parts))
        for statement in load_sql(package, path.name).values():
            yield pytest.param(path, statement, id=f"{path.parent.name}/{statement.name}")


@pytest.fixture(scope="module")
def schemas(postgres_server: EmbeddedPostgres) -> Iterator[dict[str, psycopg.Connection[Row]]]:
    """A connection to a database of each schema."""
    with ExitStack() as held:
        connections = {}
        migrations: dict[str, Callable[[str], object]] = {"memory": prepare, "engram": migrate_all}
        for name, migrate in migrations.items():
            postgres_server.ensure_database(f"sqlfile_{name}")
            dsn = postgres_server.dsn(f"sqlfile_{name}")
            migrate(dsn)
            connections[name] = held.enter_context(connect(dsn))
        connections["memory"].execute("SELECT use_vectors('a model', 8)")
        connections["engram"].execute("SELECT ingest.use_vectors('a model', 8)")
        yield connections


@pytest.mark.parametrize(("path", "statement"), list(statements()))
def test_a_statement_fits_the_schema(
    path: Path, statement: Statement, schemas: dict[str, psycopg.Connection[Row]]
) -> None:
    """PostgreSQL plans it: every table, column, function and type in it is there, and it is one
    statement (the extended protocol takes no more)."""
    connection = schemas["memory" if path.parts[0] == "memory" else "engram"]
    unknown = dict.fromkeys(PLACEHOLDER.findall(statement.text))
    plan = connection.execute(f"EXPLAIN {statement.text}".encode(), unknown, binary=True).fetchall()
    assert plan


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_is_beside_the_module_that_uses_it(path: Path) -> None:
    assert (ROOT / path).with_suffix(".py").is_file()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_statement_of_a_file_is_used(path: Path) -> None:
    package = ".".join(("engram", *path.parent.parts))
    source = (ROOT / path).with_suffix(".py").read_text("utf-8")
    unused = [name for name in load_sql(package, path.name) if f'SQL["{name}"]' not in source]
    assert not unused
