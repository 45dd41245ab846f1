"""Real parts for every test: a PostgreSQL for the session, a fresh database for each test.

`ENGRAM_TEST_SCALE` scales every fault and load test: 1 in `make test`, more in
`make soak`. `ENGRAM_TEST_SEED` repeats a seeded run.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from engram.assembly.addresses import migrate_all
from engram.embedded import EmbeddedPostgres
from engram.logbook.config import Config
from engram.logbook.connection import close
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import async_pool, connect
from support.backend import backend, memory_server, sandbox_root, settings
from support.databases import Databases, fresh
from support.parts import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown, used

__all__ = [
    "backend",
    "memory_server",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "sandbox_root",
    "settings",
]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def scale() -> float:
    return float(os.environ.get("ENGRAM_TEST_SCALE", "1"))


@pytest.fixture
def seed() -> int:
    """Printed, so that a failure can be repeated with ENGRAM_TEST_SEED."""
    value = int(os.environ.get("ENGRAM_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"ENGRAM_TEST_SEED={value}")
    return value


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres")) as server:
        with connect(server.dsn()) as connection:
            version = connection.info.server_version
            # A database for each test is written and thrown away: nobody needs it after a power cut.
            # Tests that kill a server have one of their own, as it comes.
            for setting in ("fsync", "full_page_writes"):
                connection.execute(f"ALTER SYSTEM SET {setting} = off".encode())
            connection.execute("SELECT pg_reload_conf()")
        used("PostgreSQL", f"real: {version // 10000}.{version % 10000}, embedded")
        yield server


@pytest.fixture(scope="session")
def template(postgres_server: EmbeddedPostgres) -> str:
    postgres_server.ensure_database("template_migrated")
    migrate_all(postgres_server.dsn("template_migrated"))
    return "template_migrated"


@pytest.fixture
def empty_dsn(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    """A fresh, empty database."""
    yield from fresh(postgres_server, "template1")


@pytest.fixture(scope="session")
def databases(postgres_server: EmbeddedPostgres, template: str) -> Databases:
    return Databases(postgres_server, template)


@pytest.fixture
def dsn(databases: Databases) -> Iterator[str]:
    """An empty database with engram's schema, of which no other test has left anything."""
    yield from databases.lend()


@pytest.fixture
def config(dsn: str) -> Iterator[Config]:
    """What a plain script passes to the logbook."""
    config = Config(postgres_dsn=dsn)
    yield config
    close(config)


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[AsyncExecutor]:
    async with async_pool(dsn, max_size=32) as pool:
        yield AsyncExecutor(pool)
