"""Real sandboxes: a folder that the commands' user can reach, a driver for it, a gateway over it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import httpx2
import pytest

from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from engram.sandboxes.driver import Limits
from engram.sandboxes.sandlock_driver import SandlockDriver
from support.parts import used
from support.serving import serving

LIMITS = Limits(
    memory_bytes=128 << 20,
    cpu_seconds=1.0,
    processes=12,
    output_bytes=64 << 10,
    disk_bytes=8 << 20,
    file_bytes=4 << 20,
)


@pytest.fixture
def sandbox_dir() -> Iterator[Path]:
    """Not below pytest's own folder, which nobody else may enter."""
    folder = Path(tempfile.mkdtemp(prefix="engram-sandboxes-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def driver(sandbox_dir: Path) -> AsyncIterator[SandlockDriver]:
    used("sandlock", f"real: {version('sandlock')}")
    uid = 65534 if os.geteuid() == 0 else None
    driver = SandlockDriver(sandbox_dir / "db", limits=LIMITS, uid=uid)
    assert await driver.why_not() is None
    yield driver
    await driver.close()


@pytest.fixture
def settings(settings: Settings, sandbox_dir: Path) -> Settings:
    return replace(settings, sandbox_dir=sandbox_dir, sandbox_disk_mb=8, sandbox_file_mb=4)


@pytest.fixture
def gateway(settings: Settings) -> Iterator[str]:
    used("sandlock", f"real: {version('sandlock')}")
    with serving(build_app(settings)) as url:
        yield url


@pytest.fixture
def http(gateway: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway, trust_env=False, timeout=30) as client:
        yield client
