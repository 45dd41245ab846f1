"""Two commits: what the audit says before the call, after it, and when a commit fails.

The trail is read the way an auditor would, from the tables; after every story
the sums of `governance.invariants` must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from engram.gateway.memory_store import MemoryStore
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.reconcile_outbox import Reconciler
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel.content import payload_sha
from engram.kernel.errors import AuditWriteFailed, EngramError, OutboxEnqueueFailed
from engram.logbook import governance, outbox
from engram.logbook.config import Config
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio

CORRELATION = "corr-0123456789abcdef"
FACT = "Deploy on Tuesdays."


def asked(text: str = FACT, **kw: Any) -> StoreRequest:
    return StoreRequest(payload_md=text, **{"actor_user_id": "ada", "correlation_id": CORRELATION, **kw})


def table(dsn: str, name: str) -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute(f"SELECT * FROM {name} ORDER BY 1".encode()).fetchall()


def trail(dsn: str) -> list[tuple[str, str, str | None]]:
    return [(a["action"], a["status"], a["reason"]) for a in table(dsn, "governance.write_audit")]


def broken(dsn: str, relation: str, rule: str) -> None:
    """From now on the database refuses rows of this table that break the rule."""
    with connect(dsn) as connection:
        connection.execute(f"ALTER TABLE {relation} ADD CONSTRAINT broken CHECK ({rule}) NOT VALID".encode())


def mended(dsn: str, relation: str) -> None:
    with connect(dsn) as connection:
        connection.execute(f"ALTER TABLE {relation} DROP CONSTRAINT broken".encode())


@pytest.fixture(autouse=True)
def every_sum_agrees_in_the_end(config: Config) -> Iterator[None]:
    yield
    assert [row for row in governance.invariants(config) if not row["ok"]] == []


async def test_before_the_call_there_is_a_pending_audit_and_the_whole_payload(
    store: MemoryStore, backend, dsn: str
) -> None:
    backend.faults.fail(Fault.WAIT)
    task = asyncio.create_task(store.store(asked(kind="FACT", meta_json={"a": 1}, item_id=7)))
    while not backend.faults.calls:
        await asyncio.sleep(0.001)
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["status"], audit["finalized_at"]) == ("pending", "pending", None)
    assert (audit["actor_user_id"], audit["payload_sha"]) == ("ada", payload_sha(FACT))
    (memory,) = table(dsn, "logbook.memories")
    assert (memory["state"], memory["payload_md"], memory["audit_id"]) == ("intent", FACT, audit["audit_id"])
    assert (memory["kind"], memory["meta_json"], memory["item_id"]) == ("FACT", {"a": 1}, 7)
    assert table(dsn, "logbook.outbox_memory") == []
    backend.faults.let_go.set()
    reply = await task
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["status"], audit["memory_id"]) == ("allow", "success", reply.memory_id)
    assert audit["finalized_at"] >= audit["created_at"]


async def store_one(store: MemoryStore, **kw: Any) -> StoreReply:
    return await store.store(asked(**kw))


FAILED = Order(Fault.STATUS, 500)
OUTCOMES: dict[
    str, tuple[list[Order | Fault], list[dict[str, Any]], str, list[tuple[str, str, str | None]]]
] = {
    # name: (faults of the memory server, the stores, the last reply's action, the whole trail)
    "stored": ([], [{}], "allow", [("allow", "success", None)]),
    "diverted": (
        [],
        [{"target_space": "team:a"}],
        "redirect",
        [("allow", "success", "policy_redirect:team_write_disabled")],
    ),
    "rejected": (
        [],
        [{"target_space": "private:bob"}],
        "reject",
        [("reject", "success", "policy_reject:private_space_of_another")],
    ),
    "parked": (
        [FAILED],
        [{}],
        "deferred",
        [("redirect", "redirected", "openmemory_write_failed:server_error")],
    ),
    "parked, unknown": (
        [Fault.AFTER_DROP],
        [{}],
        "deferred",
        [("redirect", "redirected", "openmemory_write_failed:connection_broken")],
    ),
    "diverted and parked": (
        [FAILED],
        [{"target_space": "team:a"}],
        "deferred",
        [("redirect", "redirected", "openmemory_write_failed:server_error")],
    ),
    "stored before": (
        [],
        [{}, {}],
        "allow",
        [("allow", "success", None), ("allow", "success", "already_stored")],
    ),
    "parked before": (
        [FAILED],
        [{}, {}],
        "deferred",
        [
            ("redirect", "redirected", "openmemory_write_failed:server_error"),
            ("dedup", "success", "already_parked"),
        ],
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
async def test_each_outcome_has_its_final_audit(store: MemoryStore, backend, dsn: str, name: str) -> None:
    faults, stores, action, expected = OUTCOMES[name]
    backend.faults.fail(*faults)
    replies = [await store_one(store, **given) for given in stores]
    assert replies[-1].action == action
    assert trail(dsn) == expected
    audits = table(dsn, "governance.write_audit")
    assert all(audit["correlation_id"] == CORRELATION for audit in audits)
    assert all(audit["finalized_at"] is not None for audit in audits)
    redirects = [audit for audit in audits if audit["action"] == "redirect"]
    assert len(redirects) == len(table(dsn, "logbook.outbox_memory"))


async def test_no_first_commit_no_call(store: MemoryStore, backend, dsn: str) -> None:
    broken(dsn, "logbook.memories", "false")
    with pytest.raises(AuditWriteFailed):
        await store_one(store)
    assert backend.faults.calls == []
    assert trail(dsn) == [], "the audit went with the intent: one commit"


async def test_a_second_commit_that_fails_leaves_the_write_open_for_reconcile(
    store: MemoryStore, worker: OutboxWorker, db: AsyncExecutor, backend, dsn: str
) -> None:
    """The memory server has it, nobody was told so; in the end it is there once and accounted for."""
    broken(dsn, "governance.write_audit", "status = 'pending'")
    with pytest.raises(AuditWriteFailed):
        await store_one(store)
    assert backend.contents() == [FACT]
    assert trail(dsn) == [("pending", "pending", None)]
    mended(dsn, "governance.write_audit")
    _age_the_intent(dsn)
    assert await Reconciler(db).run_once() == 1
    assert trail(dsn) == [("redirect", "redirected", "openmemory_write_failed:outcome_unknown")]
    await worker.run_once()
    assert backend.contents() == [FACT], "it was found, not sent again"
    assert trail(dsn)[1:] == [("allow", "success", "outbox_flush_dedup_hit")]


@pytest.mark.parametrize("relation", ["logbook.outbox_memory", "governance.write_audit", "logbook.memories"])
async def test_a_park_is_whole_or_not_at_all(store: MemoryStore, backend, dsn: str, relation: str) -> None:
    rules = {
        "logbook.outbox_memory": "false",
        "governance.write_audit": "status = 'pending'",
        "logbook.memories": "state = 'intent'",
    }
    broken(dsn, relation, rules[relation])
    backend.faults.fail(FAILED)
    with pytest.raises(OutboxEnqueueFailed) as failed:
        await store_one(store, target_space="team:a")
    assert set(failed.value.context) == {"target_space", "payload_sha", "timestamp"}
    assert failed.value.context["target_space"] == "private:ada"
    assert table(dsn, "logbook.outbox_memory") == []
    assert [memory["state"] for memory in table(dsn, "logbook.memories")] == ["intent"]
    assert trail(dsn) == [("pending", "pending", "policy_redirect:team_write_disabled")]
    mended(dsn, relation)


async def test_a_rejection_that_cannot_be_audited_is_no_answer(store: MemoryStore, dsn: str) -> None:
    broken(dsn, "governance.write_audit", "false")
    with pytest.raises(AuditWriteFailed):
        await store_one(store, target_space="private:bob")


async def test_the_worker_settles_and_audits_in_one_commit(
    worker: OutboxWorker, config: Config, dsn: str
) -> None:
    outbox.enqueue_memory(FACT, "private:ada", config=config)
    governance.insert_write_audit("ada", "private:ada", "redirect", None, None, {"outbox_id": 1}, config)
    broken(dsn, "governance.write_audit", "action = 'redirect'")
    with pytest.raises(EngramError):
        await worker.run_once()
    (row,) = table(dsn, "logbook.outbox_memory")
    assert row["status"] == "pending", "no audit, no settle"
    mended(dsn, "governance.write_audit")


async def test_every_request_has_its_own_audit_however_many_there_are(
    store: MemoryStore, backend, dsn: str
) -> None:
    backend.faults.fail(FAILED)
    ids = [f"corr-{n:016x}" for n in range(30)]
    texts = [f"fact {n % 3}" for n in range(30)]
    await asyncio.gather(
        *(store.store(asked(text, correlation_id=id_)) for text, id_ in zip(texts, ids, strict=True))
    )
    audits = table(dsn, "governance.write_audit")
    assert sorted(audit["correlation_id"] for audit in audits) == ids
    assert {audit["status"] for audit in audits} <= {"success", "redirected"}


def _age_the_intent(dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.memories SET intent_at = intent_at - interval '1 hour'")
