"""From a deferred store to its end, over a real database and a real memory server.

Each story starts with a caller's write and follows it through outbox, worker
and reconcile: its states, its trail, what the memory server has, what a query
finds. Leases and SQL are `tests/logbook/test_outbox_lease.py`'s; what the worker
does with each single answer is `test_outbox_worker.py`'s.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engram.gateway.memory_query import MemoryQuery, QueryRequest
from engram.gateway.memory_store import MemoryStore
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel.settings import Settings
from engram.logbook import governance, outbox
from engram.logbook.config import Config
from engram.postgres.pool import connect
from support.faults import Fault, Order
from support.processes import environment

pytestmark = pytest.mark.anyio

SPACE = "private:ada"
FACT = "Deploy on Tuesdays."
DOWN = Order(Fault.STATUS, 500)


@pytest.fixture(autouse=True)
def every_sum_agrees_in_the_end(config: Config) -> Iterator[None]:
    yield
    assert [row for row in governance.invariants(config) if not row["ok"]] == []


async def stored(store: MemoryStore, text: str = FACT, **kw: Any) -> StoreReply:
    request = StoreRequest(
        payload_md=text, **{"actor_user_id": "ada", "correlation_id": "corr-0123456789abcdef", **kw}
    )
    return await store.store(request)


async def found(query: MemoryQuery, text: str = FACT) -> list[dict[str, Any]]:
    reply = await query.query(QueryRequest(text, "ada", "corr-0123456789abcdef"))
    return reply.results


async def delivered(worker: OutboxWorker, dsn: str) -> None:
    """Until nothing is left to do: waiting times are moved up, not waited for."""
    async with asyncio.timeout(30):
        while statuses(dsn, "pending"):
            make_due(dsn)
            await worker.run_once()


def statuses(dsn: str, *wanted: str) -> list[str]:
    with connect(dsn) as connection:
        rows = connection.execute("SELECT status FROM logbook.outbox_memory ORDER BY outbox_id").fetchall()
    return [row["status"] for row in rows if not wanted or row["status"] in wanted]


def state(dsn: str) -> str:
    with connect(dsn) as connection:
        (row,) = connection.execute(
            "SELECT state FROM logbook.memories WHERE state <> 'forgotten'"
        ).fetchall()
    return row["state"]


def trail(dsn: str) -> list[tuple[str, str]]:
    with connect(dsn) as connection:
        rows = connection.execute(
            "SELECT action, reason FROM governance.write_audit ORDER BY audit_id"
        ).fetchall()
    return [(row["action"], row["reason"]) for row in rows]


def make_due(dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET next_attempt_at = now() WHERE status = 'pending'"
        )


async def test_deferred_then_delivered(
    store: MemoryStore, worker: OutboxWorker, query: MemoryQuery, backend, dsn: str
) -> None:
    backend.faults.fail(DOWN)
    reply = await stored(store, kind="PITFALL", meta_json={"module": "payments"})
    assert (reply.action, state(dsn), statuses(dsn)) == ("deferred", "parked", ["pending"])
    assert backend.contents() == []
    await delivered(worker, dsn)
    assert (state(dsn), statuses(dsn)) == ("stored", ["sent"])
    (kept,) = backend.kept()
    assert kept["content"] == FACT
    assert f"space:{SPACE}" in kept["tags"]
    assert (kept["metadata"]["kind"], kept["metadata"]["module"]) == ("PITFALL", "payments")
    assert kept["metadata"]["correlation_id"] == reply.correlation_id
    assert trail(dsn) == [
        ("redirect", "openmemory_write_failed:server_error"),
        ("allow", "outbox_flush_success"),
    ]
    again = await stored(store)
    assert (again.action, again.deduplicated) == ("allow", True)
    assert [hit["content"] for hit in await found(query)] == [FACT]


async def test_deferred_retried_delivered(
    store: MemoryStore, worker: OutboxWorker, backend, dsn: str
) -> None:
    backend.faults.fail(*[DOWN] * 3)
    await stored(store)
    await delivered(worker, dsn)
    assert (state(dsn), statuses(dsn), backend.contents()) == ("stored", ["sent"], [FACT])
    assert [reason for _, reason in trail(dsn)] == [
        "openmemory_write_failed:server_error",
        "outbox_flush_retry",
        "outbox_flush_retry",
        trail(dsn)[-1][1],
    ]
    assert trail(dsn)[-1][1] in ("outbox_flush_success", "outbox_flush_dedup_hit")


async def test_deferred_given_up_requeued_delivered(
    store: MemoryStore, worker: OutboxWorker, query: MemoryQuery, backend, config: Config, dsn: str
) -> None:
    refused = Order(Fault.STATUS, 422)
    backend.faults.fail(refused, refused)
    first = await stored(store)
    await delivered(worker, dsn)
    assert (state(dsn), statuses(dsn)) == ("parked", ["dead"])
    assert [hit["content"] for hit in await found(query)] == [FACT], "nothing that was acknowledged is lost"
    again = outbox.requeue(int(first.outbox_id or 0), "ada", config)
    assert again is not None
    assert again.fresh
    await delivered(worker, dsn)
    assert (state(dsn), statuses(dsn), backend.contents()) == ("stored", ["dead", "sent"], [FACT])
    actions = [action for action, _ in trail(dsn)]
    assert actions == ["redirect", "reject", "redirect", "allow"]


async def test_stored_anew_after_it_was_given_up(
    store: MemoryStore, worker: OutboxWorker, backend, dsn: str
) -> None:
    refused = Order(Fault.STATUS, 422)
    backend.faults.fail(refused, refused)
    await stored(store)
    await delivered(worker, dsn)
    reply = await stored(store)
    assert (reply.action, reply.deduplicated) == ("allow", False)
    assert (state(dsn), statuses(dsn), backend.contents()) == ("stored", ["dead"], [FACT])


@pytest.mark.parametrize("fault", [Fault.AFTER_DROP, Fault.AFTER_500])
async def test_a_write_that_had_arrived_is_there_once(
    store: MemoryStore, worker: OutboxWorker, backend, dsn: str, fault: Fault
) -> None:
    backend.faults.fail(fault)
    reply = await stored(store)
    assert reply.action == "deferred"
    await delivered(worker, dsn)
    assert (statuses(dsn), backend.contents()) == (["sent"], [FACT])
    assert trail(dsn)[-1] == ("allow", "outbox_flush_dedup_hit")


async def test_diverted_and_deferred_ends_in_the_private_space(
    store: MemoryStore, worker: OutboxWorker, backend, dsn: str
) -> None:
    backend.faults.fail(DOWN)
    await stored(store, target_space="team:payments")
    await delivered(worker, dsn)
    (kept,) = backend.kept()
    assert f"space:{SPACE}" in kept["tags"]
    assert not any("team:payments" in tag for tag in kept["tags"])


async def test_the_same_content_in_two_spaces_is_two_memories(
    store: MemoryStore, worker: OutboxWorker, backend, config: Config, dsn: str
) -> None:
    governance.upsert_settings("payments", True, None, "ada", config=config)
    backend.faults.fail(DOWN, DOWN)
    await stored(store)
    await stored(store, target_space="team:payments")
    await delivered(worker, dsn)
    tags = {tag for kept in backend.kept() for tag in kept["tags"] if tag.startswith("space:")}
    assert tags == {f"space:{SPACE}", "space:team:payments"}


async def test_an_outage_with_many_writes_and_many_workers(
    store: MemoryStore, db, client, settings: Settings, backend, dsn: str, scale: float
) -> None:
    """Everything is delivered once, whoever delivers it, and each write has its two audits."""
    texts = [f"fact {n}" for n in range(int(40 * scale))]
    backend.faults.fail(*[DOWN] * len(texts))
    replies = [await stored(store, text) for text in texts]
    assert {reply.action for reply in replies} == {"deferred"}
    small = replace(settings, outbox_batch_size=7)
    workers = [OutboxWorker(db, client, small, worker_id=f"w{n}") for n in range(4)]
    async with asyncio.timeout(60):
        while statuses(dsn, "pending"):
            make_due(dsn)
            await asyncio.gather(*(worker.run_once() for worker in workers))
    assert sorted(backend.contents()) == sorted(texts)
    actions = Counter(action for action, _ in trail(dsn))
    assert (actions["redirect"], actions["allow"]) == (len(texts), len(texts))


async def test_by_the_documents_own_command(
    store: MemoryStore, settings: Settings, backend, dsn: str
) -> None:
    backend.faults.fail(Order(Fault.STATUS, 401))
    await stored(store)
    command = [sys.executable, "-m", "engram.gateway.outbox_worker", "--once"]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (statuses(dsn), backend.contents()) == (["sent"], [FACT])
