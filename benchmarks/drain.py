"""Draining the outbox: engram's fenced claim and settle against the bare loop, and against other queues."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.bare import drain as bare
from benchmarks.measuring import Measure, alternate, database_server, fresh_database, median, told, verdict
from benchmarks.rivals import run as rivals
from engram.embedded import EmbeddedPostgres
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.connection import close, run
from engram.logbook.outbox import Sent
from engram.postgres.query import Query

ROWS = 20_000
BATCH = 500


def fill(dsn: str, rows: int = ROWS) -> None:
    config = Config(postgres_dsn=dsn)
    for start in range(0, rows, 2000):
        outbox.enqueue_many([(f"fact {n}", "team:a") for n in range(start, start + 2000)], config)
    close(config)


def drain(dsn: str, batch: int, *, audited: bool, worker: str = "w1") -> int:
    config, done = Config(postgres_dsn=dsn), 0
    while rows := outbox.claim_outbox(worker, batch, 60, config):
        sent = [Sent(row["outbox_id"], row["lease_token"], "m") for row in rows]
        settled = outbox.ack_many(worker, sent, config) if audited else run(_unaudited(worker, sent), config)
        done += len(settled)
    return done


def _unaudited(worker: str, sent: list[Sent]) -> Query[set[int]]:
    return outbox._ack(worker, sent, outbox._ids, audited=False)


def drain_with_two(dsn: str, batch: int) -> int:
    with ThreadPoolExecutor(2) as threads:
        return sum(threads.map(lambda n: drain(dsn, batch, audited=True, worker=f"w{n}"), range(2)))


def rate(server: EmbeddedPostgres, work: Callable[[str], int], rows: int = ROWS) -> float:
    with fresh_database(server) as dsn:
        fill(dsn, rows)
        started = time.perf_counter()
        done = work(dsn)
        seconds = time.perf_counter() - started
        close(Config(postgres_dsn=dsn))
    if done != rows:
        raise SystemExit(f"drained {done} of {rows}")
    return rows / seconds


def rival(server: EmbeddedPostgres, name: str) -> Measure:
    jobs = ROWS // 10 if name == "procrastinate" else ROWS
    return lambda: rivals.rate(name, server, jobs)


def main() -> None:
    print(f"drain: {ROWS:,} parked memories, batches of {BATCH}, one connection")
    others = rivals.install()
    with database_server() as server:
        values = alternate(
            bare=lambda: rate(server, lambda dsn: bare.drain(dsn, BATCH, audited=False)),
            engram=lambda: rate(server, lambda dsn: drain(dsn, BATCH, audited=False)),
            bare_audited=lambda: rate(server, lambda dsn: bare.drain(dsn, BATCH, audited=True)),
            engram_audited=lambda: rate(server, lambda dsn: drain(dsn, BATCH, audited=True)),
        )
        # In turns with the others, too: what is compared was measured in the same minute.
        contenders = {name: rival(server, name) for name in others}
        values |= alternate(
            rounds=5,
            engram_audited_two=lambda: rate(server, lambda dsn: drain_with_two(dsn, BATCH)),
            **contenders,
        )
    for name, measured in values.items():
        told(name.replace("_", ", "), measured, "rows/s")
    verdict("drain against the bare loop", median(values["engram"]) / median(values["bare"]), 0.85)
    ratio = median(values["engram_audited"]) / median(values["bare_audited"])
    verdict("drain with audits against the bare loop with audits", ratio, 0.85)
    best = median(values["engram_audited_two"])
    verdict("drain with audits, two connections, against pgqueuer", best / median(values["pgqueuer"]), 2.0)
    if "graphile-worker" in values:
        verdict("... against graphile-worker", best / median(values["graphile-worker"]), 1.0)


if __name__ == "__main__":
    main()
