"""Sandboxes on this host, and what ends them."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from engram.kernel.runloop import run_loop
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from engram.sandboxes.driver import Driver, Limits
from engram.sandboxes.profiles import reachable
from engram.sandboxes.sandlock_driver import SandlockDriver
from engram.sandboxes.service import Sandboxes

SANDBOXES_OF_ROOT = Path("/var/lib/engram/sandboxes")
REAP_SECONDS = 5.0


@asynccontextmanager
async def open_sandboxes(settings: Settings, db: AsyncExecutor) -> AsyncIterator[Sandboxes]:
    """Sandboxes, and beside them whatever ends what is over."""
    sandboxes = Sandboxes(db, lambda database: sandbox_driver(settings, database), settings)
    stop = asyncio.Event()
    reaping = asyncio.create_task(
        run_loop("sandboxes.reaper", sandboxes.reap_quietly, idle_seconds=REAP_SECONDS, stop=stop)
    )
    try:
        yield sandboxes
    finally:
        stop.set()
        await reaping
        await sandboxes.close()


async def reap_sandboxes(settings: Settings, db: AsyncExecutor) -> int:
    """One pass of what every gateway does now and then; how much there was to do."""
    sandboxes = Sandboxes(db, lambda database: sandbox_driver(settings, database), settings)
    try:
        return await sandboxes.reap()
    finally:
        await sandboxes.close()


def sandbox_driver(settings: Settings, database: str) -> Driver | None:
    """What runs sandboxes on this host, for this database; None: switched off."""
    if settings.sandbox_driver == "none":
        return None
    uid = settings.sandbox_uid if os.geteuid() == 0 else None
    limits = Limits(
        memory_bytes=settings.sandbox_memory_mb << 20,
        cpu_seconds=settings.sandbox_cpu_seconds,
        processes=settings.sandbox_processes,
        output_bytes=settings.sandbox_output_bytes,
        disk_bytes=settings.sandbox_disk_mb << 20,
        file_bytes=settings.sandbox_file_mb << 20,
    )
    folder = _sandbox_root(settings, uid) / f"{database}{_server(settings)}"
    return SandlockDriver(folder, limits=limits, uid=uid)


def _server(settings: Settings) -> str:
    """Which server of this machine it is, where that can be seen: a copy of a data folder that is started
    beside it says that it is the same database, and would remove what it does not know."""
    try:
        place = str(conninfo_to_dict(settings.postgres_dsn or "").get("host") or "")
    except ProgrammingError:
        return ""  # told by whoever connects
    return f"-{hashlib.sha256(os.path.realpath(place).encode()).hexdigest()[:8]}" if place[:1] == "/" else ""


def _sandbox_root(settings: Settings, uid: int | None) -> Path:
    """In the data folder, unless that is hidden from the user as whom commands run."""
    if settings.sandbox_dir is not None:
        return settings.sandbox_dir
    return settings.data_dir / "sandboxes" if reachable(settings.data_dir, uid) else SANDBOXES_OF_ROOT
