"""The Kafka outbox: events to the topic against its two bare halves, and what a claim costs.

Needs Java and Maven for the broker, or KAFKA_BOOTSTRAP_SERVERS.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.bare import kafka_outbox as bare
from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from engram.assembly.ingest import open_publishers
from engram.embedded import EmbeddedPostgres
from engram.embedded.kafka import Broker
from engram.ingest import events
from engram.kernel.settings import Settings
from engram.postgres import SyncExecutor
from engram.postgres.pool import connect, sync_pool

EVENTS = 20_000
BATCH = 500
WAITING = (1_000, 100_000)
CLAIMS = 50


@contextmanager
def a_broker() -> Iterator[str]:
    if given := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="engram-bench-kafka-") as folder:
        broker = Broker(Path(folder))
        broker.start()
        try:
            yield broker.servers
        finally:
            broker.kill()


def fill(dsn: str, count: int, *, in_one_lane: int = 0, named: str = "k") -> None:
    """Events of as many keys, but for those that one key has."""
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO ingest.outbox_lane (aggregatetype, aggregateid, next_seq)"
            " SELECT 'bench', %(named)s || n, CASE n WHEN 0 THEN %(long)s + 1 ELSE 2 END"
            " FROM generate_series(CASE WHEN %(long)s > 0 THEN 0 ELSE 1 END, %(others)s) n",
            {"named": named, "long": in_one_lane, "others": count - in_one_lane},
        )
        connection.execute(
            "INSERT INTO ingest.outbox_event (id, aggregatetype, aggregateid, type, payload, lane_id, seq)"
            " SELECT gen_random_uuid(), 'bench', l.aggregateid, 'Bench',"
            " jsonb_build_object('taskId', gen_random_uuid(), 'documentId', gen_random_uuid()), l.id, s"
            " FROM ingest.outbox_lane l, generate_series(1, l.next_seq - 1) s"
            " WHERE NOT EXISTS (SELECT FROM ingest.outbox_event e WHERE e.lane_id = l.id)"
        )
        connection.execute("VACUUM ANALYZE ingest.outbox_lane")
        connection.execute("VACUUM ANALYZE ingest.outbox_event")


def by_loop(server: EmbeddedPostgres) -> float:
    with fresh_database(server) as dsn:
        fill(dsn, EVENTS)
        started = time.perf_counter()
        if bare.claim_and_settle(dsn, BATCH) != EVENTS:
            raise SystemExit("the bare loop left some")
        return EVENTS / (time.perf_counter() - started)


def by_engram(server: EmbeddedPostgres, servers: str) -> float:
    with fresh_database(server) as dsn:
        settings = replace(
            Settings.load({}),
            postgres_dsn=dsn,
            kafka_bootstrap_servers=servers,
            ingest_kafka_publish_batch_size=BATCH,
        )
        return asyncio.run(_published(settings))


async def _published(settings: Settings) -> float:
    async with open_publishers(settings) as publishers:

        async def drain(publisher) -> int:  # type: ignore[no-untyped-def]
            done = 0
            while count := await publisher.run_once():
                done += count
            return done

        # The bare producer is warm as well: it knows the topic and has its number from the broker.
        for publisher in publishers:
            fill(settings.postgres_dsn or "", 1, named=publisher.worker_id)
            await publisher.run_once()
        fill(settings.postgres_dsn or "", EVENTS)
        started = time.perf_counter()
        done = sum(await asyncio.gather(*map(drain, publishers)))
        seconds = time.perf_counter() - started
    if done != EVENTS:
        raise SystemExit(f"published {done} of {EVENTS}")
    return EVENTS / seconds


def claim_ms(server: EmbeddedPostgres, count: int, in_one_lane: int) -> float:
    with fresh_database(server) as dsn, sync_pool(dsn) as pool:
        fill(dsn, count, in_one_lane=in_one_lane)
        db, times = SyncExecutor(pool), []
        for n in range(CLAIMS):
            started = time.perf_counter()
            claimed = db.run(events.claim(f"p{n}", 20, 60))
            times.append(time.perf_counter() - started)
            db.run(events.release(f"p{n}", claimed))
    return 1000 * statistics.median(times)


def main() -> None:
    print(f"kafka: {EVENTS:,} events to a topic, batches of {BATCH}")
    with database_server() as server, a_broker() as servers:
        values = alternate(
            producer=lambda: bare.produce(servers, EVENTS, BATCH),
            loop=lambda: by_loop(server),
            engram=lambda: by_engram(server, servers),
        )
        for name, measured in values.items():
            told(name, measured, "events/s")
        slower = min(median(values["producer"]), median(values["loop"]))
        verdict("outbox to topic against the slower half", median(values["engram"]) / slower, 0.7)
        small, large = WAITING
        claims = alternate(
            few=lambda: claim_ms(server, small, 0),
            many=lambda: claim_ms(server, large, 0),
            one_key_has_half=lambda: claim_ms(server, large, large // 2),
        )
    for name, measured in claims.items():
        told(f"claim of 20, {name.replace('_', ' ')}", measured, "ms")
    for name in ("many", "one_key_has_half"):
        ratio = median(claims[name]) / median(claims["few"])
        verdict(f"claim, {name.replace('_', ' ')}, {large:,} to {small:,}", ratio, 1.5, at_most=True)


if __name__ == "__main__":
    main()
