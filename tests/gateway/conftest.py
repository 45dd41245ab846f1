"""A gateway's parts over a real database and a real memory server that can be told to fail."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from engram.assembly.parts import open_client
from engram.gateway.memory_query import MemoryQuery
from engram.gateway.memory_store import MemoryStore
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.outbox_worker import OutboxWorker
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[OpenMemoryClient]:
    async with open_client(settings) as client:
        yield client


@pytest.fixture
def store(db: AsyncExecutor, client: OpenMemoryClient, settings: Settings) -> MemoryStore:
    return MemoryStore(db, client, settings)


@pytest.fixture
def query(db: AsyncExecutor, client: OpenMemoryClient, settings: Settings) -> MemoryQuery:
    return MemoryQuery(db, client, settings)


@pytest.fixture
def worker(db: AsyncExecutor, client: OpenMemoryClient, settings: Settings) -> OutboxWorker:
    return OutboxWorker(db, client, settings, worker_id="w1")
