"""Bulk enqueue, with its uniqueness and its memory records, against COPY into the same tables."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.bare import enqueue as bare
from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from engram.embedded import EmbeddedPostgres
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.connection import close

ROWS = 20_000
BATCH = 2_000


def enqueue(dsn: str, texts: list[str]) -> None:
    config = Config(postgres_dsn=dsn)
    for start in range(0, len(texts), BATCH):
        outbox.enqueue_many([(text, "team:a") for text in texts[start : start + BATCH]], config)
    close(config)


def rate(server: EmbeddedPostgres, work: Callable[[str, list[str]], object]) -> float:
    texts = [f"fact {n} about the webhook" for n in range(ROWS)]
    with fresh_database(server) as dsn:
        started = time.perf_counter()
        work(dsn, texts)
        return ROWS / (time.perf_counter() - started)


def main() -> None:
    print(f"enqueue: {ROWS:,} memories")
    with database_server() as server:
        values = alternate(copy=lambda: rate(server, bare.copy_rows), engram=lambda: rate(server, enqueue))
    for name, measured in values.items():
        told(name, measured, "rows/s")
    verdict("bulk enqueue against COPY", median(values["engram"]) / median(values["copy"]), 0.5)


if __name__ == "__main__":
    main()
