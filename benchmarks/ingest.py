"""Ingest: no-op tasks through the whole machine against arq, and Markdown files with the real pipeline.

A no-op task is a row, three transitions, a stream entry, a lease, an ack and a
delete; arq keeps no row. Both drain what is there already, with a hundred at a
time. For the files it is also told how much of the time is parsing and
embedding. `ENGRAM_BENCH_TASKS` and `ENGRAM_BENCH_FILES` change the sizes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from benchmarks.rivals import run as rivals
from engram.assembly.ingest import open_ingest
from engram.assembly.parts import artifacts, open_executor
from engram.assembly.queues import open_queue
from engram.embedded import EmbeddedPostgres, EmbeddedRedis
from engram.ingest import parsing, tasks
from engram.ingest.queue import Queue
from engram.ingest.redis_queue import RedisQueue
from engram.ingest.seam import Lease, Work
from engram.ingest.uploads import Uploads
from engram.kernel.runloop import run_together
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.search import embeddings

TASKS = int(os.environ.get("ENGRAM_BENCH_TASKS", "10000"))
FILES = int(os.environ.get("ENGRAM_BENCH_FILES", "1000"))
FILE_BYTES = 20_000
AT_ONCE = 100


class NoOp:
    async def ingest(self, work: Work, lease: Lease) -> int:
        return 0


@contextmanager
def settings_on(server: EmbeddedPostgres, redis: EmbeddedRedis, folder: Path) -> Iterator[Settings]:
    with fresh_database(server, "ingest") as dsn:
        yield replace(Settings.load({}), postgres_dsn=dsn, redis_url=redis.url(), data_dir=folder)


def redis_of(queue: Queue) -> RedisQueue:
    assert isinstance(queue, RedisQueue)
    return queue


async def _enqueue(settings: Settings, count: int) -> None:
    async with (
        open_executor(settings, "bench") as db,
        open_queue(settings, db) as queue,
    ):
        await (await redis_of(queue)._client()).flushall()
        for start in range(0, count, 1000):
            given = [
                (uuid4(), uuid4(), hashlib.sha256(str(number).encode()).hexdigest())
                for number in range(start, min(start + 1000, count))
            ]
            ids = await db.run(tasks.create_many("bench", "text/markdown", given))
            await db.run(tasks.put_on_stream(list(zip(ids, await queue.put(ids), strict=True))))


async def _drain(settings: Settings, pipeline: NoOp | None = None) -> None:
    """Run a worker until every task is final."""
    stop = asyncio.Event()
    async with open_ingest(settings, pipeline, stop=stop) as parts:

        async def watch() -> None:
            while await asyncio.to_thread(_left, settings):
                await asyncio.sleep(0.02)
            stop.set()

        if parts.reclaimer is not None:
            await parts.reclaimer.beat()
        loops = parts.loops(settings, stop)
        await run_together(*loops, parts.worker.finish(), watch(), stop=stop, patience_seconds=30)


def _left(settings: Settings) -> int:
    with connect(settings.postgres_dsn or "") as connection:
        row = connection.execute(
            "SELECT count(*) AS n FROM ingest.ingest_task WHERE status NOT IN ('SUCCEEDED', 'DEAD')"
        ).fetchone()
    return int(row["n"]) if row else 0


def engram_rate(server: EmbeddedPostgres, redis: EmbeddedRedis) -> float:
    with tempfile.TemporaryDirectory() as folder, settings_on(server, redis, Path(folder)) as settings:
        busy = replace(settings, ingest_concurrency=AT_ONCE)
        asyncio.run(_enqueue(busy, TASKS))
        started = time.perf_counter()
        asyncio.run(_drain(busy, NoOp()))
        return TASKS / (time.perf_counter() - started)


def arq_rate(redis: EmbeddedRedis) -> float:
    script = Path(rivals.__file__).with_name("arq_drain.py")
    python = rivals.FOLDER / "venv/bin/python"
    done = subprocess.run(
        [str(python), str(script), redis.url(), str(TASKS)], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"arq failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def document(number: int) -> bytes:
    paragraph = f"Part {number} says who may settle a row, and when its lease is over. " * 8
    parts = [f"## Section {n}\n\n{paragraph}\n" for n in range(FILE_BYTES // (len(paragraph) + 20) + 1)]
    return f"# Document {number}\n\n{''.join(parts)}".encode()[:FILE_BYTES]


async def _upload(settings: Settings, count: int) -> None:
    async with (
        open_executor(settings, "bench") as db,
        open_queue(settings, db) as queue,
    ):
        await (await redis_of(queue)._client()).flushall()
        uploads = Uploads(
            db,
            artifacts(settings),
            queue,
            max_bytes=1 << 30,
            detect=lambda head, name: "text/markdown",
        )
        for number in range(count):
            with io.BytesIO(document(number)) as file:
                async with uploads.keep(file, f"{number}.md") as kept:
                    await uploads.enter("bench", kept, None)


class Busy:
    """How long at least one of some calls was under way."""

    def __init__(self) -> None:
        self.seconds, self._running, self._since = 0.0, 0, 0.0

    def __enter__(self) -> None:
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self.seconds += time.perf_counter() - self._since


@contextmanager
def timed() -> Iterator[dict[str, Busy]]:
    """When something was being parsed, something embedded, and either of them."""
    spent = {name: Busy() for name in ("parse", "embed", "either")}
    with ExitStack() as held:
        for owner, name in ((parsing.Parsers, "parse"), (embeddings.LocalEmbedder, "embed")):
            held.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, _watched(getattr(owner, name), spent[name], spent["either"]))
        yield spent


def _watched(work: Callable[..., Awaitable[Any]], *busy: Busy) -> Callable[..., Awaitable[Any]]:
    async def watched(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as held:
            for each in busy:
                held.enter_context(each)
            return await work(*args, **kwargs)

    return watched


def files(server: EmbeddedPostgres, redis: EmbeddedRedis) -> None:
    with tempfile.TemporaryDirectory() as folder, settings_on(server, redis, Path(folder)) as settings:
        started = time.perf_counter()
        asyncio.run(_upload(settings, FILES))
        uploaded = time.perf_counter()
        with timed() as spent:
            asyncio.run(_drain(settings))
        whole = time.perf_counter() - uploaded
    outside = 1 - spent["either"].seconds / whole
    print(f"  {FILES} Markdown files of {FILE_BYTES} bytes: {FILES / whole:,.1f} documents/s", flush=True)
    print(f"  uploading {uploaded - started:.2f} s, bringing in {whole:.2f} s,", flush=True)
    parse, embed = spent["parse"].seconds, spent["embed"].seconds
    print(
        f"  with something being parsed for {parse:.2f} s, something embedded for {embed:.2f} s", flush=True
    )
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  largest resident size {largest:,.0f} MB", flush=True)
    verdict("share of time outside parse and embed", outside, 0.4, at_most=True)


def main() -> None:
    print(f"ingest: {TASKS} no-op tasks, {FILES} files", flush=True)
    rivals.install()
    with (
        database_server() as server,
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis(Path(folder)) as redis,
    ):
        found = alternate(arq=lambda: arq_rate(redis), engram=lambda: engram_rate(server, redis))
        told("arq, no row", found["arq"], "tasks/s")
        told("engram, row and transitions", found["engram"], "tasks/s")
        verdict("engram / arq", median(found["engram"]) / median(found["arq"]), 1.0)
        files(server, redis)


if __name__ == "__main__":
    main()
