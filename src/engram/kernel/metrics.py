"""The process's metrics, in one registry. A metric is defined once, here, with its meaning."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY = CollectorRegistry()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STORES = Counter(
    "engram_memory_store", "memory_store calls by the action of their reply", ["action"], registry=REGISTRY
)
STORE_SECONDS = Histogram(
    "engram_memory_store_seconds", "Time from a valid request to its reply", ["action"], registry=REGISTRY
)
QUERIES = Counter("engram_memory_query", "memory_query calls", ["degraded"], registry=REGISTRY)
OUTBOX_SETTLED = Counter(
    "engram_outbox_settled", "Outbox rows by how a delivery ended", ["result"], registry=REGISTRY
)
OUTBOX_DEAD = Counter(
    "engram_outbox_dead_letters", "Outbox rows whose delivery was given up", registry=REGISTRY
)
OUTBOX_PENDING = Gauge("engram_outbox_pending", "Outbox rows that wait to be delivered", registry=REGISTRY)
OUTBOX_OLDEST_SECONDS = Gauge(
    "engram_outbox_oldest_seconds", "How long the oldest of them has waited", registry=REGISTRY
)
ALERTS = Counter(
    "engram_alerts", "Alerts raised, whether or not a webhook took them", ["kind"], registry=REGISTRY
)
BREAKER_OPEN = Gauge(
    "engram_openmemory_breaker_open", "1 while the memory server is being left alone", registry=REGISTRY
)

SANDBOXES_MADE = Counter(
    "engram_sandboxes", "Sandboxes that were asked for, by what came of it", ["result"], registry=REGISTRY
)
SANDBOX_EXEC_SECONDS = Histogram(
    "engram_sandbox_exec_seconds",
    "How long commands ran in sandboxes, by what ended them",
    ["ended_by"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800),
    registry=REGISTRY,
)

INGEST_PROCESSED = Counter(
    "ingest_task_process", "Ingest tasks by how a worker's look at them ended", ["result"], registry=REGISTRY
)
INGEST_SECONDS = Histogram(
    "ingest_task_process_seconds",
    "Time from a task's start to its result",
    ["result"],
    buckets=(0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800),
    registry=REGISTRY,
)
INGEST_STREAM_LENGTH = Gauge(
    "ingest_stream_length", "Entries on the stream: XLEN", ["stream"], registry=REGISTRY
)
INGEST_STREAM_PENDING = Gauge(
    "ingest_stream_pending",
    "Entries that were read and not acknowledged: XPENDING",
    ["stream", "group"],
    registry=REGISTRY,
)
INGEST_RECLAIMED = Counter(
    "ingest_stream_reclaim",
    "Entries taken over from other consumers, and failures to",
    ["result"],
    registry=REGISTRY,
)
# There from the start: a rate needs the nought before the first.
for _result in ("made", "failed", "refused"):
    SANDBOXES_MADE.labels(_result)
for _result in ("succeeded", "retry", "dead", "skipped", "not_due"):
    INGEST_PROCESSED.labels(_result)
for _result in ("claimed", "error"):
    INGEST_RECLAIMED.labels(_result)
INGEST_DEAD_LETTERS = Counter("ingest_task_dlq", "Tasks written to the dead-letter stream", registry=REGISTRY)

KAFKA_BACKLOG = Gauge(
    "outbox_backlog", "Events that wait to be published: NEW and RETRYING", registry=REGISTRY
)
KAFKA_PUBLISHED = Counter(
    "outbox_publish", "Events by how an attempt to publish them ended", ["result"], registry=REGISTRY
)
KAFKA_SECONDS = Histogram(
    "outbox_publish_seconds",
    "Time from handing an event to the producer to the broker's word",
    ["result"],
    registry=REGISTRY,
)
KAFKA_DELAY_SECONDS = Histogram(
    "outbox_publish_delay_seconds",
    "Time from an event's making to its being sent",
    buckets=(0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200),
    registry=REGISTRY,
)
for _result in ("success", "failure", "dead"):
    KAFKA_PUBLISHED.labels(_result)


def exposition() -> bytes:
    """What `/metrics` answers."""
    return generate_latest(REGISTRY)
