"""What these tests need besides a database: a second pair of eyes on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from engram.embedded import EmbeddedPostgres
from engram.postgres.pool import connect
from engram.postgres.query import Row

EMPTY = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT nspname FROM pg_namespace
                WHERE nspname NOT IN ('pg_catalog', 'pg_toast', 'information_schema')
    LOOP EXECUTE format('DROP SCHEMA %I CASCADE', name); END LOOP;
    CREATE SCHEMA public;
    EXECUTE format('ALTER DATABASE %I RESET ALL', current_database());
END $$
"""

Eventually = Callable[[Callable[[], object]], None]


@pytest.fixture
def eventually() -> Eventually:
    """Wait for a condition, no longer than it takes."""

    def wait(holds: Callable[[], object], within: float = 20.0) -> None:
        give_up = time.monotonic() + within
        while not holds():
            assert time.monotonic() < give_up, "it did not come true in time"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def _scratch(postgres_server: EmbeddedPostgres) -> str:
    postgres_server.ensure_database("scratch")
    return postgres_server.dsn("scratch")


@pytest.fixture
def scratch_dsn(_scratch: str) -> Iterator[str]:
    """An empty database: always the same one, emptied after each test, which is quicker than a new one."""
    yield _scratch
    with connect(_scratch) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.execute(EMPTY)


@pytest.fixture
def observer(scratch_dsn: str) -> Iterator[psycopg.Connection[Row]]:
    """A connection of the test's own to the empty database."""
    with connect(scratch_dsn, application_name="observer") as connection:
        yield connection
