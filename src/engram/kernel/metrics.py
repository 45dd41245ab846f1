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


def exposition() -> bytes:
    """What `/metrics` answers."""
    return generate_latest(REGISTRY)
