"""A database for each test, without making one for each test.

Making a database means copying some three hundred files. So a test gets the
one before it had, emptied: rows away, sequences at their start, connections
ended. If a test changed anything but rows (a table, an index, a trigger, an
extension, a setting) or what is known of migrations, its database is thrown
away and the next test gets a new one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import psycopg

from engram.embedded import EmbeddedPostgres
from engram.postgres.pool import connect

_numbers = itertools.count()

_OURS = "nspname IN ('logbook', 'governance', 'analysis', 'scm', 'ingest', 'sandboxes', 'public')"
_END_OTHERS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()"""
# Everything that is not a row. Analysing a table leaves statistics, which change plans.
_SHAPE = f"""
SELECT md5(string_agg(part, ' ' ORDER BY part)) AS shape FROM (
    SELECT format('class %s %s %s %s', c.oid, relname, relkind, reloptions) AS part
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE {_OURS}
    UNION ALL
    SELECT format('column %s %s %s %s %s', attrelid, attname, atttypid, attnotnull, attisdropped)
    FROM pg_attribute JOIN pg_class c ON c.oid = attrelid JOIN pg_namespace n ON n.oid = relnamespace
    WHERE {_OURS} AND attnum > 0
    UNION ALL
    SELECT format('constraint %s %s %s', r.oid, conname, convalidated)
    FROM pg_constraint r JOIN pg_namespace n ON n.oid = connamespace WHERE {_OURS}
    UNION ALL
    SELECT format('trigger %s %s %s', oid, tgname, tgenabled) FROM pg_trigger
    UNION ALL
    SELECT format('function %s %s %s', p.oid, proname, md5(prosrc))
    FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace WHERE {_OURS}
    UNION ALL
    SELECT format('statistics %s %s', starelid, staattnum) FROM pg_statistic
    JOIN pg_class c ON c.oid = starelid JOIN pg_namespace n ON n.oid = relnamespace WHERE {_OURS}
    UNION ALL
    SELECT format('extension %s %s', oid, extname) FROM pg_extension
    UNION ALL
    SELECT format('schema %s %s', oid, nspname) FROM pg_namespace WHERE nspname NOT LIKE 'pg_%%'
    UNION ALL
    SELECT format('migration %s', to_jsonb(v)) FROM public.engram_schema_version v
    UNION ALL
    SELECT format('setting %s', setconfig) FROM pg_db_role_setting
    JOIN pg_database d ON d.oid = setdatabase WHERE d.datname = current_database()
) AS parts"""
_EMPTY = f"""
DO $$
DECLARE
    found record;
    filled boolean;
    dirty text := '';
BEGIN
    FOR found IN
        SELECT c.oid::regclass::text AS name FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
        WHERE {_OURS} AND relkind = 'r' AND relname <> 'engram_schema_version'
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %s)', found.name) INTO filled;
        IF filled THEN
            dirty := dirty || ', ' || found.name;
        END IF;
    END LOOP;
    IF dirty <> '' THEN
        EXECUTE 'TRUNCATE ' || substr(dirty, 3) || ' CASCADE';
    END IF;
    FOR found IN
        SELECT format('%I.%I', schemaname, sequencename) AS name FROM pg_sequences WHERE last_value IS NOT NULL
    LOOP
        EXECUTE format('ALTER SEQUENCE %s RESTART', found.name);
    END LOOP;
END $$"""


class Databases:
    """Those of one server and one template."""

    def __init__(self, server: EmbeddedPostgres, template: str) -> None:
        self._server = server
        self._template = template
        self._spare: tuple[str, str] | None = None

    def lend(self) -> Iterator[str]:
        name, shape = self._spare or self._made()
        self._spare = None
        yield self._server.dsn(name)
        if self._emptied(name, shape):
            self._spare = (name, shape)
        else:
            drop(self._server, name)

    def _made(self) -> tuple[str, str]:
        name = make(self._server, self._template)
        with connect(self._server.dsn(name)) as connection:
            return name, _shape(connection)

    def _emptied(self, name: str, shape: str) -> bool:
        try:
            with connect(self._server.dsn(name)) as connection:
                connection.execute(_END_OTHERS)
                if _shape(connection) != shape:
                    return False
                # The audit may not be emptied, says its trigger: to users, not to tests.
                connection.execute("SET session_replication_role = replica")
                connection.execute(_EMPTY.encode())
                return _shape(connection) == shape
        except Exception:  # noqa: BLE001 (whatever it is: this database is not used again)
            return False


def make(server: EmbeddedPostgres, template: str) -> str:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    with connect(server.dsn("postgres")) as admin:
        admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY'.encode())
    return name


def drop(server: EmbeddedPostgres, name: str) -> None:
    with connect(server.dsn("postgres")) as admin:
        admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def fresh(server: EmbeddedPostgres, template: str) -> Iterator[str]:
    """One that nobody had."""
    name = make(server, template)
    yield server.dsn(name)
    drop(server, name)


def _shape(connection: psycopg.Connection[dict[str, object]]) -> str:
    (row,) = connection.execute(_SHAPE.encode()).fetchall()
    return str(row["shape"])
