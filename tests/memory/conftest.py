"""A real PostgreSQL for the memory server.

Each test has an empty database: the same one, emptied, or one of its own where
the test touches more than rows (a module says so by overriding `dsn`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
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
from engram.search.embeddings import Embedder

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
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY FILE_COPY".encode())
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
        api_keys: Mapping[str, str] | None = None,
        allowed_hosts: tuple[str, ...] = (),
        embedder: Embedder | None = None,
    ) -> AsyncIterator[httpx2.AsyncClient]:
        app = create_app(dsn, api_keys, allowed_hosts, embedder=embedder)
        # Unexpected errors are re-raised for the log after the reply: look at the reply.
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            await settled(client)
            yield client

    return running


async def vectors_of(client: httpx2.AsyncClient) -> str:
    return str((await client.get("/health")).json().get("vectors"))


async def settled(client: httpx2.AsyncClient) -> None:
    """The model is loaded, or will not be: the server searches as it will go on to."""
    await until(lambda: _is_settled(client))


async def _is_settled(client: httpx2.AsyncClient) -> bool:
    return await vectors_of(client) != "starting"


async def until(holds: Callable[[], Awaitable[bool]], *, within: float = 20.0) -> None:
    """Like `eventually`, inside the event loop."""
    async with asyncio.timeout(within):
        while not await holds():
            await asyncio.sleep(0.005)


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


_SERVE = """
import sys
from engram.kernel import logs
from engram.kernel.failpoints import arm_from_environment
from engram.memory.server import serve

logs.configure("info", "json")
arm_from_environment()
serve(sys.argv[1], "127.0.0.1", int(sys.argv[2]), api_key=sys.argv[3] or None)
"""


@dataclass
class Server:
    """The memory server as a process of its own."""

    dsn: str
    api_key: str | None = None
    port: int = field(default_factory=lambda: _free_port())
    failpoint: str = ""
    log: str = os.devnull
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, self.dsn, str(self.port), self.api_key or ""],
                env={**os.environ, "ENGRAM_FAILPOINT": self.failpoint},
                stdout=log,
                stderr=log,
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

    def told(self) -> dict[str, Any]:
        return dict(httpx2.get(f"{self.url}/health", timeout=10).json())

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


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., None]:
    return eventually
