"""The memory server as the tests see it: real, one for the session, a tenant for each test."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engram.embedded import EmbeddedPostgres
from engram.kernel.settings import Settings
from engram.memory.app import create_app
from engram.memory.server import prepare
from engram.postgres.pool import connect
from support.faults import FaultyServer
from support.parts import used
from support.serving import serving

TENANTS = 1000
_tenants = itertools.count()


@dataclass
class Backend:
    """A tenant of the memory server: what it was asked, what it has, and how to make it fail."""

    url: str
    faults: FaultyServer
    dsn: str
    tenant: str

    @property
    def key(self) -> str:
        return f"key-of-{self.tenant}"

    def kept(self) -> list[dict[str, Any]]:
        with connect(self.dsn) as connection:
            return connection.execute(
                "SELECT content, tags, metadata FROM memories WHERE tenant = %s ORDER BY created_at",
                [self.tenant],
            ).fetchall()

    def contents(self) -> list[str]:
        return [row["content"] for row in self.kept()]


@pytest.fixture(scope="session")
def memory_server(postgres_server: EmbeddedPostgres) -> Iterator[Backend]:
    postgres_server.ensure_database("gateway_tests_memory")
    dsn = postgres_server.dsn("gateway_tests_memory")
    prepare(dsn)
    used("memory server", "real: engram's own, embedded; OpenMemory's JS server is not run here")
    tenants = [f"tenant-{n}" for n in range(TENANTS)]
    faults = FaultyServer(create_app(dsn, {f"key-of-{tenant}": tenant for tenant in tenants}))
    with serving(faults) as url:
        yield Backend(url, faults, dsn, "")


@pytest.fixture
def backend(memory_server: Backend) -> Iterator[Backend]:
    """The memory server with a tenant of the test's own, behaving until told otherwise."""
    memory_server.faults.reset()
    yield replace(memory_server, tenant=f"tenant-{next(_tenants)}")
    memory_server.faults.reset()


@pytest.fixture(scope="session")
def sandbox_root() -> Iterator[Path]:
    """Where sandboxes may be: not below pytest's own folder, which nobody else may enter."""
    folder = Path(tempfile.mkdtemp(prefix="engram-sandboxes-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def settings(
    request: pytest.FixtureRequest, dsn: str, backend: Backend, tmp_path: Path, sandbox_root: Path
) -> Settings:
    """Deadlines that only what hangs can miss; a test that lets them pass is marked `impatient`."""
    deadline = 2.0 if request.node.get_closest_marker("impatient") else 20.0
    return replace(
        Settings.load({}),
        postgres_dsn=dsn,
        artifacts_dir=tmp_path / "artifacts",
        sandbox_dir=sandbox_root,
        openmemory_base_url=backend.url,
        openmemory_api_key=backend.key,
        openmemory_timeout_seconds=deadline,
        store_deadline_seconds=deadline,
        breaker_failures=1000,
        breaker_cooldown_seconds=0.05,
    )
