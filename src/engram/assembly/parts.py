"""What several processes have: connections, the memory server's client, the artifact store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engram.assembly.addresses import dsn_of
from engram.gateway.breaker import Breaker
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.kernel.errors import ConfigError
from engram.kernel.settings import Settings
from engram.logbook.artifacts import LocalArtifacts
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import async_pool


@asynccontextmanager
async def open_executor(settings: Settings, application_name: str) -> AsyncIterator[AsyncExecutor]:
    async with async_pool(dsn_of(settings), min_size=2, application_name=application_name) as pool:
        yield AsyncExecutor(pool)


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[OpenMemoryClient]:
    if settings.openmemory_base_url is None:
        raise ConfigError("OPENMEMORY_BASE_URL is not set", hint="e.g. http://127.0.0.1:8080")
    breaker = Breaker(failures=settings.breaker_failures, cooldown=settings.breaker_cooldown_seconds)
    client = OpenMemoryClient(
        settings.openmemory_base_url,
        api_key=settings.openmemory_api_key,
        timeout=settings.openmemory_timeout_seconds,
        breaker=breaker,
    )
    try:
        yield client
    finally:
        await client.close()


def artifacts(settings: Settings) -> LocalArtifacts:
    """Where evidence is kept."""
    return LocalArtifacts(settings.artifacts_dir or settings.data_dir / "artifacts")
