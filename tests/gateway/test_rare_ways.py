"""Rare ways through store, forget, requeue and settle: none of them loses, doubles or revives a memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engram.gateway.callers import Caller
from engram.gateway.erasing import Eraser
from engram.gateway.memory_forget import ForgetRequest, MemoryForget
from engram.gateway.memory_store import MemoryStore
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel.content import payload_sha
from engram.kernel.errors import AuditWriteFailed, DatabaseUnavailable
from engram.kernel.settings import Settings
from engram.logbook import erasures, governance, memories, outbox
from engram.logbook.config import Config
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.backend import Backend
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio

TEXT = "The webhook is retried three times."


@pytest.fixture
def eraser(db: AsyncExecutor, client: OpenMemoryClient) -> Eraser:
    return Eraser(db, client)


@pytest.fixture
def forget(db: AsyncExecutor, eraser: Eraser, settings: Settings) -> MemoryForget:
    return MemoryForget(db, eraser, settings)


def put(actor: str = "ada", **more) -> StoreRequest:
    return StoreRequest(payload_md=TEXT, actor_user_id=actor, correlation_id="corr-0123456789abcdef", **more)


def by(reply: StoreReply, actor: str = "ada") -> ForgetRequest:
    row = None if reply.memory_id else reply.outbox_id
    return ForgetRequest(Caller(actor), "corr-fedcba9876543210", memory_id=reply.memory_id, outbox_id=row)


def pass_time(dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.memories SET erase_due_at = erase_due_at - interval '1 hour',"
            " erase_locked_at = erase_locked_at - interval '1 hour', held_until = held_until - interval '1 hour',"
            " intent_at = intent_at - interval '1 hour'"
        )
        connection.execute(
            "UPDATE logbook.outbox_memory SET next_attempt_at = next_attempt_at - interval '1 hour',"
            " locked_at = locked_at - interval '1 hour'"
        )


def holds(config: Config) -> bool:
    return all(row["ok"] for row in governance.invariants(config) if row["name"].startswith("sent"))


async def died(store: MemoryStore, worker: OutboxWorker, backend: Backend, dsn: str, **more) -> int:
    """The content, parked and given up; the id of the dead row."""
    backend.faults.fail(Order(Fault.STATUS, 422), Order(Fault.STATUS, 422))
    parked = await store.store(put(**more))
    pass_time(dsn)
    assert (await worker.run_once()).dead == 1
    return int(parked.outbox_id or 0)


async def test_what_was_forgotten_is_not_requeued(
    store: MemoryStore, worker: OutboxWorker, forget: MemoryForget, backend: Backend, dsn: str, config: Config
) -> None:
    dead = await died(store, worker, backend, dsn)
    stored = await store.store(put())
    await forget.forget(by(stored))
    assert outbox.requeue(dead, config=config) is None
    assert (await worker.run_once()).claimed == 0
    assert backend.contents() == []
    assert holds(config)


async def test_forgetting_takes_every_row_of_the_content_along(
    store: MemoryStore, worker: OutboxWorker, forget: MemoryForget, backend: Backend, config: Config
) -> None:
    stored = await store.store(put())
    outbox.enqueue_memory(TEXT, "private:ada", config=config)
    await forget.forget(by(stored))
    assert (await worker.run_once()).sent == 0
    assert backend.contents() == []
    assert holds(config)


async def test_a_row_that_nobody_wants_is_not_sent(
    worker: OutboxWorker, backend: Backend, config: Config, dsn: str
) -> None:
    outbox.enqueue_memory(TEXT, "private:ada", config=config)
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.memories SET state = 'forgotten', forgotten_at = now()")
    assert (await worker.run_once()).handed_back == 1
    assert (await worker.run_once()).claimed == 0, "and is not claimed over and over"
    assert backend.contents() == []


@pytest.mark.impatient
async def test_a_deletion_that_may_still_be_carried_out_keeps_its_lease(
    store: MemoryStore, forget: MemoryForget, eraser: Eraser, backend: Backend, dsn: str
) -> None:
    stored = await store.store(put())
    backend.faults.fail(Order(Fault.STATUS, 503), path=f"/memory/{stored.memory_id}")
    await forget.forget(by(stored))
    with pytest.raises(AuditWriteFailed, match="still being erased"):
        await store.store(put())
    pass_time(dsn)
    assert await eraser.run_once() == 1
    assert (await store.store(put())).action == "allow"
    assert backend.contents() == [TEXT]


async def test_a_record_that_is_taken_over_has_nothing_of_the_old_write(
    store: MemoryStore,
    worker: OutboxWorker,
    forget: MemoryForget,
    backend: Backend,
    dsn: str,
    config: Config,
) -> None:
    governance.upsert_settings("default", True, None, "ada", config=config)
    bobs = {"actor": "bob", "kind": "OLD", "meta_json": {"secret": "hunter2"}, "target_space": "team:default"}
    await died(store, worker, backend, dsn, **bobs)
    anew = await store.store(put(kind="NEW", target_space="team:default"))
    assert anew.action == "allow"
    known = memories.by_content("team:default", payload_sha(TEXT), config)
    assert known is not None
    assert (known["kind"], known["meta_json"], known["actor_user_id"]) == ("NEW", {}, "ada")


@pytest.mark.impatient
async def test_an_intent_that_nobody_can_finish_does_not_hold_a_store_for_ever(
    store: MemoryStore, config: Config, dsn: str, backend: Backend
) -> None:
    await store.store(put())
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.memories SET state = 'intent', intent_at = now() - interval '1 hour'"
        )
    with pytest.raises(AuditWriteFailed, match="cannot be finished"):
        await store.store(put())


async def test_a_malformed_copy_parks_the_write_and_fails_its_own_row_only(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, dsn: str, config: Config
) -> None:
    backend.faults.fail(Order(Fault.AFTER_500))
    parked = await store.store(put())
    other = await store.store(replace(put(), payload_md="Another fact."))
    backend.faults.fail(
        Order(Fault.STATUS, 200, {"matches": [{"id": "m", "content": TEXT}]}), path="/memory/query"
    )
    backend.faults.fail(Order(Fault.STATUS, 200, {"tags": [{"a": 1}], "content": TEXT}), path="/memory/m")
    pass_time(dsn)
    assert (await worker.run_once()).retried == 1
    row = outbox.get(int(parked.outbox_id or 0), config)
    assert row is not None
    assert "nonsense" in row["last_error"]
    assert other.action == "allow"


async def test_what_may_have_arrived_is_looked_for_though_it_was_parked_again(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, dsn: str, settings: Settings, config: Config
) -> None:
    backend.faults.fail(Order(Fault.AFTER_500))
    parked = await store.store(put())
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET status = 'dead'")
    backend.faults.fail(Order(Fault.STATUS, 429), path="/memory/query")
    again = await store.store(put())
    assert (again.action, again.outbox_id != parked.outbox_id) == ("deferred", True)
    row = outbox.get(int(again.outbox_id or 0), config)
    assert row is not None
    assert row["ambiguous"]


async def test_a_copy_that_arrives_after_it_was_forgotten_goes_too(
    store: MemoryStore, forget: MemoryForget, eraser: Eraser, backend: Backend, dsn: str, config: Config
) -> None:
    backend.faults.fail(Order(Fault.STATUS, 503))
    parked = await store.store(put())
    await forget.forget(by(parked))
    assert erasures.waiting(config)["waiting"] == 1, "not looked for before it could have arrived"
    with connect(backend.dsn) as connection:
        known = connection.execute("SELECT 1 FROM memories WHERE tenant = %s", [backend.tenant]).fetchall()
    assert known == []
    pass_time(dsn)
    assert await eraser.run_once() == 1


async def test_a_forget_whose_erasing_fails_is_a_forget(
    store: MemoryStore, forget: MemoryForget, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> bool:
        raise DatabaseUnavailable("gone")

    stored = await store.store(put())
    monkeypatch.setattr(Eraser, "erase", away)
    reply = await forget.forget(by(stored))
    assert reply.forgotten
    assert "will be deleted" in reply.message


async def test_a_forgotten_copy_goes_though_its_twin_was_given_up(
    store: MemoryStore,
    worker: OutboxWorker,
    forget: MemoryForget,
    eraser: Eraser,
    backend: Backend,
    dsn: str,
) -> None:
    stored = await store.store(put())
    backend.faults.fail(Order(Fault.STATUS, 429), path=f"/memory/{stored.memory_id}")
    await forget.forget(by(stored))
    await died(store, worker, backend, dsn)
    pass_time(dsn)
    assert await eraser.run_once() == 1
    assert backend.contents() == []


async def test_a_lost_answer_to_a_settle_is_no_conflict(config: Config) -> None:
    outbox.enqueue_memory(TEXT, "private:ada", config=config)
    (row,) = outbox.claim_outbox("w1", config=config)
    failed = [outbox.Failed(row["outbox_id"], row["lease_token"], "it failed", delay=60)]
    assert outbox.fail_many("w1", failed, config)
    assert not outbox.fail_many("w1", failed, config)
    assert outbox.record_conflicts("w1", [(row["outbox_id"], row["lease_token"])], config) == set()
