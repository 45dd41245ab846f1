"""Does a claim stay as quick when the table is large, and after a million rows were settled?"""

from __future__ import annotations

import os
import time

from benchmarks.drain import drain
from benchmarks.measuring import database_server, fresh_database, median, told, verdict
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.connection import close
from engram.postgres.pool import connect

SMALL = 1_000
LARGE = int(1_000_000 * float(os.environ.get("ENGRAM_BENCH_SCALE", "1")))
PROBE = 20_000

FILL = """
WITH rows AS (
    INSERT INTO logbook.outbox_memory (target_space, payload_sha, payload_md)
    SELECT 'team:a', encode(sha256(convert_to(%(tag)s || n, 'UTF8')), 'hex'), 'fact ' || n
    FROM generate_series(1, %(rows)s::int) n
    RETURNING outbox_id, target_space, payload_sha, payload_md
)
INSERT INTO logbook.memories (target_space, payload_sha, payload_md, state, outbox_id)
SELECT target_space, payload_sha, payload_md, 'parked', outbox_id FROM rows
"""


def fill(dsn: str, rows: int, tag: str) -> None:
    with connect(dsn) as connection:
        connection.execute("SET statement_timeout = 0")
        for start in range(0, rows, 100_000):
            connection.execute(FILL, {"rows": min(100_000, rows - start), "tag": f"{tag}-{start}-"})


def claim_ms(dsn: str) -> list[float]:
    config, values = Config(postgres_dsn=dsn), []
    for _ in range(30):
        started = time.perf_counter()
        rows = outbox.claim_outbox("bench", 10, 60, config)
        values.append((time.perf_counter() - started) * 1000)
        if len(rows) != 10:
            raise SystemExit("nothing to claim")
    close(config)
    return values[10:]


def drain_rate(dsn: str, tag: str) -> float:
    fill(dsn, PROBE, tag)
    started = time.perf_counter()
    done = drain(dsn, 500, audited=True)
    seconds = time.perf_counter() - started
    return done / seconds


def main() -> None:
    print(f"claim of 10 rows with {SMALL:,} and with {LARGE:,} pending")
    with database_server() as server:
        with fresh_database(server, "small") as dsn:
            fill(dsn, SMALL, "s")
            small = claim_ms(dsn)
        with fresh_database(server, "large") as dsn:
            fill(dsn, LARGE, "l")
            large = claim_ms(dsn)
            told(f"{SMALL:,} pending", small, "ms")
            told(f"{LARGE:,} pending", large, "ms")
            verdict("claim, large against small", median(large) / median(small), 1.5, at_most=True)
            aged(dsn)


def aged(dsn: str) -> None:
    """Settle everything there is, then compare with a fresh table; autovacuum is left to itself."""
    print(f"drain before and after {LARGE:,} settled rows, no manual vacuum")
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET locked_at = NULL, locked_by = NULL WHERE locked_at IS NOT NULL"
        )
    started = time.perf_counter()
    settled = drain(dsn, 500, audited=True)
    print(
        f"  settled {settled:,} at {settled / (time.perf_counter() - started):,.0f} rows/s on the way",
        flush=True,
    )
    after = [drain_rate(dsn, f"after{n}") for n in range(3)]
    with database_server() as other, fresh_database(other) as fresh:
        before = [drain_rate(fresh, f"fresh{n}") for n in range(3)]
    told("fresh", before, "rows/s")
    told(f"after {LARGE:,} settled", after, "rows/s")
    verdict("throughput after, against fresh", median(after) / median(before), 0.8)


if __name__ == "__main__":
    main()
