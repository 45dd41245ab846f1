"""The two halves of an outbox, bare: an idempotent producer, and a claim/settle loop over the same rows."""

from __future__ import annotations

import json
import time

import psycopg
from confluent_kafka import Producer

CLAIM = """
WITH due AS (SELECT id FROM ingest.outbox_lane WHERE head_seq < next_seq AND due_at <= now()
             ORDER BY due_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED),
leased AS (UPDATE ingest.outbox_lane l SET locked_by = 'bare', locked_at = now(), lease_seconds = 30,
           lease_token = 1 FROM due WHERE l.id = due.id RETURNING l.id, l.head_seq)
SELECT e.id, e.lane_id, e.payload FROM leased
JOIN ingest.outbox_event e ON e.lane_id = leased.id AND e.seq = leased.head_seq"""
SETTLE = """
WITH sent AS (UPDATE ingest.outbox_event SET status = 'SENT', sent_at = now() WHERE id = ANY(%(ids)s))
UPDATE ingest.outbox_lane SET head_seq = head_seq + 1, due_at = clock_timestamp(),
    locked_by = NULL, locked_at = NULL, lease_seconds = NULL WHERE id = ANY(%(lanes)s)"""


def claim_and_settle(dsn: str, batch: int) -> int:
    done = 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        while rows := connection.execute(CLAIM, {"batch": batch}).fetchall():
            connection.execute(SETTLE, {"ids": [row[0] for row in rows], "lanes": [row[1] for row in rows]})
            done += len(rows)
    return done


def produce(servers: str, count: int, batch: int) -> float:
    """Messages a second, confirmed batch by batch."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 2})
    value = json.dumps({"taskId": "0" * 36, "documentId": "0" * 36}).encode()
    producer.produce("bare", b"warm-up")
    producer.flush()
    started = time.perf_counter()
    for start in range(0, count, batch):
        for n in range(start, start + batch):
            producer.produce("bare", value, key=str(n).encode(), headers=[("id", b"0" * 36)])
        producer.flush()
    return count / (time.perf_counter() - started)
