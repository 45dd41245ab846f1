"""A real Redis for the session, a stream of its own for each test."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID, uuid4

import httpx2
import pytest
from redis import Redis

from engram.assembly.gateway import build_app
from engram.assembly.ingest import open_ingest
from engram.embedded import EmbeddedRedis
from engram.ingest import tasks
from engram.ingest.ingest_worker import IngestWorker
from engram.ingest.reclaimer import Reclaimer
from engram.ingest.redis_queue import RedisQueue
from engram.ingest.seam import Lease, Work
from engram.kernel.runloop import run_together
from engram.kernel.settings import Settings
from engram.postgres.errors import translated
from engram.postgres.executors import AsyncExecutor
from support.parts import used
from support.serving import serving

_numbers = itertools.count()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        used("Redis", "real: embedded")
        yield server


@pytest.fixture
async def queue(redis_server: EmbeddedRedis) -> AsyncIterator[RedisQueue]:
    name = f"test:{next(_numbers)}"
    made = RedisQueue(redis_server.url, stream=name, dlq=f"{name}:dlq")
    yield made
    await made.close()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """A Redis with nothing in it: for what uses the streams' own names."""
    with Redis.from_url(redis_server.url()) as client:
        client.flushall()
    return redis_server.url()


@pytest.fixture
def api_settings(settings: Settings, redis_url: str, tmp_path: Path) -> Settings:
    return replace(
        settings,
        redis_url=redis_url,
        data_dir=tmp_path / "data",
        ingest_max_attempts=2,
        ingest_base_backoff_ms=0,
        ingest_max_upload_bytes=1 << 20,
    )


@pytest.fixture
def http(api_settings: Settings) -> Iterator[httpx2.Client]:
    with (
        serving(build_app(api_settings)) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=30) as client,
    ):
        yield client


@dataclass
class FakePipeline:
    """Does what the test says for each document; by default it has three segments."""

    behave: Callable[[Work, Lease], Awaitable[int]] | None = None
    seen: list[UUID] = field(default_factory=list)

    async def ingest(self, work: Work, lease: Lease) -> int:
        self.seen.append(work.task_id)
        if self.behave is not None:
            return await self.behave(work, lease)
        await lease.progress(3, 3)
        return 3


@pytest.fixture
def pipeline() -> FakePipeline:
    return FakePipeline()


@pytest.fixture
def ingest_settings(dsn: str, tmp_path: Path) -> Settings:
    return replace(
        Settings.load({}),
        postgres_dsn=dsn,
        data_dir=tmp_path / "data",
        artifacts_dir=tmp_path / "artifacts",
        ingest_max_attempts=3,
        ingest_base_backoff_ms=0,
        ingest_lease_seconds=30.0,
    )


@contextmanager
def working(settings: Settings, pipeline: FakePipeline | None = None) -> Iterator[None]:
    """An ingest worker, in a thread; by default with the real pipeline."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def work() -> None:
        async with open_ingest(settings, pipeline, stop=stop) as parts:
            await parts.reclaimer.beat()
            await run_together(
                *parts.loops(settings, stop), parts.worker.finish(), stop=stop, patience_seconds=10
            )
            await parts.reclaimer.leave()

    thread = threading.Thread(target=lambda: loop.run_until_complete(work()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@dataclass
class Machine:
    """A worker and what is around it, driven step by step."""

    db: AsyncExecutor
    queue: RedisQueue
    pipeline: FakePipeline
    settings: Settings

    def __post_init__(self) -> None:
        self.stop = asyncio.Event()
        self.worker = IngestWorker(self.db, self.queue, self.pipeline, self.settings, stop=self.stop)
        self.reclaimer = Reclaimer(self.db, self.queue, self.worker, self.settings)

    def another(self, **changes: object) -> Machine:
        return Machine(self.db, self.queue, self.pipeline, replace(self.settings, **changes))  # type: ignore[arg-type]

    async def task(self, *, put: bool = True, owner: str = "ann") -> UUID:
        task_id = uuid4()
        sha256 = hashlib.sha256(task_id.bytes).hexdigest()
        given = tasks.Upload(
            task_id, uuid4(), owner, None, "a.md", "text/markdown", sha256, 3, f"blobs/{sha256[:2]}/{sha256}"
        )
        await self.db.run(tasks.create(given))
        if put:
            (entry,) = await self.queue.put([task_id])
            await self.db.run(tasks.put_on_stream([(task_id, entry)]))
        return task_id

    async def step(self) -> None:
        """Take what there is, let it end, settle it."""
        self.worker._look_for_due_at = 0.0  # time does not matter here
        await self.worker.run_once()
        await self.settle()

    async def settle(self) -> None:
        runs = [run.task for run in self.worker._running.values() if run.task is not None]
        if runs:
            await asyncio.wait(runs)
        await self.worker.settle()

    async def row(self, task_id: UUID, owner: str = "ann") -> dict:
        found = await self.db.run(tasks.get(owner, task_id))
        assert found is not None
        return found

    async def history(self, task_id: UUID) -> list[tuple[str | None, str, int]]:
        found = await self.db.run(tasks.transitions(task_id))
        return [(row["from_status"], row["to_status"], row["attempt_count"]) for row in found]

    async def run_sql(self, sql: str, *params: object) -> None:
        with translated("a test's own statement"):
            async with self.db.pool.connection() as connection:
                await connection.execute(sql.encode(), params)

    async def lapse(self, task_id: UUID) -> None:
        """Move the lease of a running task into the past."""
        await self.run_sql(
            "UPDATE ingest.ingest_task SET locked_at = now() - interval '1 day' WHERE id = %s", task_id
        )

    async def dead_letters(self) -> list[dict[bytes, bytes]]:
        redis = await self.queue._client()
        return [values for _, values in await redis.xrange(self.queue.dlq)]


@pytest.fixture
async def machine(
    db: AsyncExecutor,
    queue: RedisQueue,
    pipeline: FakePipeline,
    ingest_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> Machine:
    monkeypatch.setattr("engram.ingest.ingest_worker.TAKE_SECONDS", 0.02)
    return Machine(db, queue, pipeline, ingest_settings)
