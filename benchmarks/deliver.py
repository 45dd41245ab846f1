"""Delivering what was parked: the whole worker against a bare client that only adds, on one memory server.

The memory server is a process of its own with its own database, as under
`engram up`. Both sides run in this process and keep as many calls in flight.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2

from benchmarks.bare import deliver as bare
from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from engram.assembly.addresses import with_memory_server
from engram.assembly.outbox import open_worker
from engram.embedded import EmbeddedPostgres
from engram.kernel.content import payload_sha
from engram.kernel.settings import Settings
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.connection import close
from engram.postgres.pool import connect
from engram.supervisor import as_environment

ROWS = 10_000
SPACE = "team:a"
START_SECONDS = 60


def contents() -> list[str]:
    return [f"fact {n} about the webhook and its retries" for n in range(ROWS)]


@contextmanager
def memory_server(server: EmbeddedPostgres, name: str = "bench_memory") -> Iterator[Settings]:
    """A fresh `engram memory-server`; the settings that reach it."""
    admin = server.dsn("postgres")
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as folder, connect(admin) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
        settings = replace(Settings.load({}), data_dir=Path(folder), memory_dsn=server.dsn(name))
        found = with_memory_server(settings)
        command = [sys.executable, "-m", "engram", "memory-server"]
        log = (Path(folder) / "server.log").open("wb")
        process = subprocess.Popen(command, env=as_environment(settings), stdout=log, stderr=log)
        try:
            _wait_for(found.openmemory_base_url or "", process)
            yield found
        finally:
            process.terminate()
            process.wait(20)
            log.close()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        try:
            if httpx2.get(f"{url}/health", trust_env=False, timeout=2).json().get("vectors") == "ready":
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.05)
    raise SystemExit("the memory server did not start")


def by_the_worker(server: EmbeddedPostgres) -> float:
    with fresh_database(server) as dsn, memory_server(server) as reached:
        config, texts = Config(postgres_dsn=dsn), contents()
        for start in range(0, ROWS, 1000):
            outbox.enqueue_many([(text, SPACE) for text in texts[start : start + 1000]], config)
        started = time.perf_counter()
        asyncio.run(_drained(replace(reached, postgres_dsn=dsn)))
        seconds = time.perf_counter() - started
        left = outbox.stats(config)
        close(config)
    if left["sent"] != ROWS:
        raise SystemExit(f"not everything arrived: {left}")
    return ROWS / seconds


async def _drained(settings: Settings) -> None:
    async with open_worker(settings) as (worker, _):
        await worker.drain()


def by_the_bare_client(server: EmbeddedPostgres) -> float:
    with memory_server(server) as reached:
        memories = [(text, SPACE, payload_sha(text)) for text in contents()]
        url, key = reached.openmemory_base_url or "", reached.openmemory_api_key or ""
        started = time.perf_counter()
        done = asyncio.run(bare.deliver(url, key, memories, reached.outbox_batch_size))
        seconds = time.perf_counter() - started
    if done != ROWS:
        raise SystemExit(f"added {done} of {ROWS}")
    return ROWS / seconds


def main() -> None:
    concurrency = Settings.load({}).outbox_batch_size
    print(f"deliver: {ROWS:,} parked memories to the embedded memory server, {concurrency} calls at a time")
    with database_server() as server:
        values = alternate(bare=lambda: by_the_bare_client(server), engram=lambda: by_the_worker(server))
    for name, measured in values.items():
        told(name, measured, "memories/s")
    verdict("delivery against a bare client", median(values["engram"]) / median(values["bare"]), 0.7)


if __name__ == "__main__":
    main()
