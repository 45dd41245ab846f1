"""A real PostgreSQL for the memory server.

Each test has an empty database: the same one, emptied, or one of its own where
the test touches more than rows (a module says so by overriding `dsn`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engram.embedded import EmbeddedPostgres
from engram.memory.app import create_app
from engram.memory.server import prepare
from engram.postgres.pool import connect

TEMPLATE = "memory_template"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(tmp_path_factory.mktemp("engram")).start()
    server.ensure_database(TEMPLATE)
    prepare(server.dsn(TEMPLATE))
    yield server
    server.release()


@pytest.fixture(scope="session")
def reused_dsn(postgres: EmbeddedPostgres) -> str:
    postgres.ensure_database("memory_reused")
    prepare(postgres.dsn("memory_reused"))
    return postgres.dsn("memory_reused")


@pytest.fixture
def dsn(reused_dsn: str) -> str:
    with connect(reused_dsn) as connection:
        connection.execute("TRUNCATE memories, idempotency_keys, idempotency_answers RESTART IDENTITY")
    return reused_dsn


@pytest.fixture
def fresh_dsn(postgres: EmbeddedPostgres) -> Iterator[str]:
    name = f"memory_{next(_numbers)}"
    with connect(postgres.dsn("postgres")) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}".encode())
    yield postgres.dsn(name)
    with connect(postgres.dsn("postgres")) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def sql(dsn: str) -> Callable[..., list[dict[str, Any]]]:
    """Ask the test's database directly."""

    def run(statement: str, *params: object) -> list[dict[str, Any]]:
        with connect(dsn) as connection:
            cursor = connection.execute(statement.encode(), params)
            return cursor.fetchall() if cursor.description else []

    return run


Connect = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


def connecting_to(dsn: str) -> Connect:
    @asynccontextmanager
    async def running(
        api_keys: Mapping[str, str] | None = None, allowed_hosts: tuple[str, ...] = ()
    ) -> AsyncIterator[httpx2.AsyncClient]:
        app = create_app(dsn, api_keys, allowed_hosts)
        # Unexpected errors are re-raised for the log after the reply: look at the reply.
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            yield client

    return running


@pytest.fixture
def in_process(dsn: str) -> Connect:
    """Clients of an application in this process, with a real database behind it."""
    return connecting_to(dsn)


@pytest.fixture
async def client(in_process: Connect) -> AsyncIterator[httpx2.AsyncClient]:
    async with in_process() as client:
        yield client


@pytest.fixture
def refusing(dsn: str) -> Iterator[Connect]:
    """Like `in_process`, for tests that are refused: in the end nothing was stored."""
    yield connecting_to(dsn)
    with connect(dsn) as connection:
        assert not connection.execute("SELECT FROM memories").fetchall()
        assert not connection.execute("SELECT FROM idempotency_keys").fetchall()


@pytest.fixture
async def refused(refusing: Connect) -> AsyncIterator[httpx2.AsyncClient]:
    async with refusing() as client:
        yield client


@dataclass
class Server:
    """The memory server as a process of its own."""

    dsn: str
    api_key: str | None = None
    port: int = field(default_factory=lambda: _free_port())
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> subprocess.Popen[bytes]:
        code = "import sys; from engram.memory.server import serve; serve(sys.argv[1], '127.0.0.1', int(sys.argv[2]), api_key=sys.argv[3] or None)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, self.dsn, str(self.port), self.api_key or ""],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self.process

    def start(self) -> Server:
        self.launch()
        eventually(lambda: self.health() == 200)
        return self

    def health(self) -> int | None:
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{self.url}/health", timeout=10).status_code
        return None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(timeout=15)


@pytest.fixture
def server(dsn: str) -> Iterator[Server]:
    server = Server(dsn).start()
    yield server
    if server.process and server.process.poll() is None:
        server.kill()


@pytest.fixture
def kill_postgres(postgres: EmbeddedPostgres) -> Callable[[], None]:
    """Kill the postmaster as a crash would; `postgres.start()` brings it back."""

    def kill() -> None:
        pid = int((Path(postgres.folder) / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    return kill


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(holds: Callable[[], bool], *, within: float = 20.0) -> None:
    """Wait for a condition, no longer than it takes and never longer than `within`."""
    give_up = time.monotonic() + within
    while not holds():
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., None]:
    return eventually
