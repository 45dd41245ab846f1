"""The embedded memory server: adds against a bare server, queries against their bare statements.

Queries are drawn by word frequency, and are the ten commonest words, and are
asked within a space that has a hundredth of the memories. They are asked of
1,000 and of 100,000 memories, one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2
import psycopg

from benchmarks.bare.memory_query import BareSearch
from benchmarks.measuring import alternate, database_server, median, told, verdict
from benchmarks.memory_corpus import SMALL_SPACE, Corpus
from engram.assembly.addresses import with_memory_server
from engram.embedded import EmbeddedPostgres
from engram.kernel.content import payload_sha
from engram.kernel.settings import Settings
from engram.memory.connections import memory_pool
from engram.memory.server import prepare
from engram.memory.upkeep import Upkeep
from engram.memory.vectors import Vectors
from engram.postgres import AsyncExecutor
from engram.postgres.pool import connect
from engram.search.embeddings import LocalEmbedder, embed_locally
from engram.search.tokens import tokenize, tsvector
from engram.supervisor import as_environment
from engram.web.sockets import free_port

SIZES = (1_000, 100_000)
ADDS = {1: 400, 16: 2_000}
ADDED_TO = 10_000
QUESTIONS = 100
K = 10
START_SECONDS = 60
_COLUMNS = "tenant, space, content_sha, content, tags, metadata, words, embedding, to_embed"
_numbers = itertools.count()


def load(server: EmbeddedPostgres, name: str, count: int) -> str:
    """A database with so many memories, analysed and indexed as it would be after a while."""
    with connect(server.dsn("postgres")) as admin:
        admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())
        admin.execute(f'CREATE DATABASE "{name}"'.encode())
    dsn = server.dsn(name)
    prepare(dsn)
    asyncio.run(_kept(dsn))
    memories = list(Corpus().memories(count))
    vectors = embed_locally([memory.content for memory in memories])
    with psycopg.connect(dsn, autocommit=True) as connection, connection.cursor() as cursor:
        with cursor.copy(f"COPY memories ({_COLUMNS}) FROM STDIN".encode()) as copy:
            for memory, vector in zip(memories, vectors, strict=True):
                text, words = memory.content, tsvector(tokenize(memory.content))
                sha, numbers = payload_sha(text), _literal(vector)
                copy.write_row(("default", memory.space, sha, text, memory.tags, "{}", words, numbers, False))
        connection.execute("VACUUM ANALYZE memories")
    asyncio.run(_kept(dsn))
    return dsn


async def _kept(dsn: str) -> None:
    """What the server does in the background: make ready for vectors, build their index."""
    async with memory_pool(dsn) as pool:
        db, embedder = AsyncExecutor(pool), LocalEmbedder()
        vectors = Vectors(db, embedder)
        await vectors.run_once()
        await Upkeep(dsn, db, vectors).run_once()
        await embedder.shut()


def _literal(vector: Sequence[float]) -> str:
    return f"[{','.join(f'{number:.5f}' for number in vector)}]"


@contextmanager
def serving(command: list[str], url: str, env: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, *command], env=env)
    try:
        give_up = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < give_up and not _is_up(url):
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _is_up(url: str) -> bool:
    """Up, and where there are vectors to wait for, with them."""
    try:
        reply = httpx2.get(f"{url}/health", trust_env=False, timeout=2)
    except httpx2.HTTPError:
        return False
    return reply.status_code == 404 or reply.json().get("vectors") == "ready"


@contextmanager
def engram(dsn: str) -> Iterator[tuple[str, dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as folder:
        settings = replace(Settings.load({}), data_dir=Path(folder), memory_dsn=dsn, log_level="error")
        found = with_memory_server(settings)
        url, key = found.openmemory_base_url or "", found.openmemory_api_key or ""
        with serving(["-m", "engram", "memory-server"], url, as_environment(settings)):
            yield url, {"x-api-key": key}


@contextmanager
def bare(dsn: str) -> Iterator[tuple[str, dict[str, str]]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(["-m", "benchmarks.bare.memory_server", dsn, str(port)], url):
        yield url, {}


def request(path: str, body: Mapping[str, object], headers: dict[str, str]) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw


def an_add(headers: dict[str, str]) -> bytes:
    n = next(_numbers)
    (memory,) = Corpus(1_000_000 + n % 50).memories(1)
    body = {"content": f"{memory.content} fresh{n}", "tags": memory.tags, "metadata": {"n": n}}
    return request("/memory/add", body, {**headers, "idempotency-key": f"bench-{n}"})


async def _connection(port: int, requests: Iterator[bytes]) -> list[float]:
    """Send one after the other; how long each took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    for raw in requests:
        started = time.perf_counter()
        writer.write(raw)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        times.append(time.perf_counter() - started)
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise SystemExit(f"unexpected answer: {head[:200]!r} {body[:300]!r}")
    writer.close()
    return times


async def _all(port: int, requests: list[bytes], connections: int) -> list[float]:
    left = iter(requests)
    done = await asyncio.gather(*(_connection(port, left) for _ in range(connections)))
    return list(itertools.chain(*done))


@contextmanager
def filled(
    side: Callable[..., object], server: EmbeddedPostgres, name: str
) -> Iterator[Callable[[int], float]]:
    """A server over a table that has its index; gives a way to measure adds a second."""
    with side(load(server, f"bench_adds_{name}", ADDED_TO)) as (url, headers):  # type: ignore[attr-defined]
        port = int(url.rpartition(":")[2])
        asyncio.run(_all(port, [an_add(headers) for _ in range(300)], 16))

        def adds(connections: int) -> float:
            requests = [an_add(headers) for _ in range(ADDS[connections])]
            started = time.perf_counter()
            asyncio.run(_all(port, requests, connections))
            return len(requests) / (time.perf_counter() - started)

        yield adds


def kinds() -> dict[str, tuple[list[str], list[str]]]:
    """Name -> questions, and the tags they are asked with."""
    corpus = Corpus(31)
    drawn, common = corpus.questions(QUESTIONS), corpus.commonest()
    return {
        "drawn by frequency": (drawn, []),
        "the ten commonest words": (common, []),
        "in a space of 1 %": (drawn[: QUESTIONS // 2] + common, [f"space:{SMALL_SPACE}"]),
    }


def by_statements(dsn: str, questions: list[str], tags: list[str]) -> float:
    """Milliseconds a query, on average."""
    search = BareSearch(dsn)
    times = []
    for question in questions:
        started = time.perf_counter()
        search.search(question, tags, K)
        times.append(time.perf_counter() - started)
    search.close()
    return 1000 * statistics.mean(times)


def by_server(url: str, headers: dict[str, str], questions: list[str], tags: list[str]) -> float:
    bodies = [{"query": question, "k": K, "filters": {"tags": tags}} for question in questions]
    requests = [request("/memory/query", body, headers) for body in bodies]
    return 1000 * statistics.mean(asyncio.run(_all(int(url.rpartition(":")[2]), requests, 1)))


def measure_adds(server: EmbeddedPostgres) -> None:
    """Both are up all the time and take turns every few seconds: a slow minute hits both."""
    with filled(bare, server, "bare") as theirs, filled(engram, server, "engram") as ours:
        for connections in ADDS:
            values = alternate(bare=partial(theirs, connections), engram=partial(ours, connections))
            for side, measured in values.items():
                told(f"{side}, {connections} connection(s)", measured, "adds/s")
            ratio = median(values["engram"]) / median(values["bare"])
            verdict(f"adds, {connections} connection(s)", ratio, 0.75)


def measure_queries(server: EmbeddedPostgres) -> None:
    ours: dict[tuple[str, int], float] = {}
    for size in SIZES:
        dsn = load(server, f"bench_queries_{size}", size)
        with engram(dsn) as (url, headers):
            for name, (questions, tags) in kinds().items():
                by_server(url, headers, questions, tags)
                values = alternate(
                    statements=partial(by_statements, dsn, questions, tags),
                    engram=partial(by_server, url, headers, questions, tags),
                )
                for side, measured in values.items():
                    told(f"{name}, {size:,}, {side}", measured, "ms")
                ours[name, size] = median(values["engram"])
                ratio = ours[name, size] / median(values["statements"])
                verdict(f"{name}, {size:,}, against the statements", ratio, 1.5, at_most=True)
    small, large = SIZES
    for name in kinds():
        verdict(f"{name}, {large:,} to {small:,}", ours[name, large] / ours[name, small], 3, at_most=True)


def main() -> None:
    print(f"memory server: adds to {ADDED_TO:,} memories; queries for {K} of {SIZES[0]:,} and {SIZES[1]:,}")
    with database_server() as server:
        measure_adds(server)
        measure_queries(server)


if __name__ == "__main__":
    main()
