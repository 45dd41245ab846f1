"""memory_forget: unreadable at once, the copy deleted, nothing else deleted, nobody else's touched."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engram.gateway.callers import Caller
from engram.gateway.erasing import Eraser
from engram.gateway.memory_forget import ForgetReply, ForgetRequest, MemoryForget
from engram.gateway.memory_query import MemoryQuery, QueryRequest
from engram.gateway.memory_store import MemoryStore
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel.errors import ConstraintViolated, Forbidden, InputError, NotFound
from engram.kernel.settings import Settings
from engram.logbook import erasures, governance, outbox
from engram.logbook.config import Config
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.backend import Backend
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio

ADA, BOB = Caller("ada"), Caller("bob")
MEMBER = Caller("bob", scopes=frozenset({"read", "write"}), verified=True)
TEXT = "The webhook is retried three times."


@pytest.fixture
def eraser(db: AsyncExecutor, client: OpenMemoryClient) -> Eraser:
    return Eraser(db, client)


@pytest.fixture
def forget(db: AsyncExecutor, eraser: Eraser, settings: Settings) -> MemoryForget:
    return MemoryForget(db, eraser, settings)


def put(text: str = TEXT, actor: str = "ada", space: str | None = None) -> StoreRequest:
    return StoreRequest(
        payload_md=text, actor_user_id=actor, correlation_id="corr-0123456789abcdef", target_space=space
    )


async def found(query: MemoryQuery, actor: str = "ada") -> list[str]:
    asked = QueryRequest(query="webhook", actor_user_id=actor, correlation_id="corr-0123456789abcdef")
    return [result["content"] for result in (await query.query(asked)).results]


async def forgotten(forget: MemoryForget, reply: StoreReply, caller: Caller = ADA) -> ForgetReply:
    by_row = reply.memory_id is None
    return await forget.forget(
        ForgetRequest(
            caller=caller,
            correlation_id="corr-fedcba9876543210",
            memory_id=reply.memory_id,
            outbox_id=reply.outbox_id if by_row else None,
            reason="it was wrong",
        )
    )


def pass_time(dsn: str, what: str = "1 hour") -> None:
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.memories SET erase_due_at = erase_due_at - %(t)s::interval,"
            " erase_locked_at = erase_locked_at - %(t)s::interval",
            {"t": what},
        )


async def test_a_stored_memory_is_gone_here_and_there(
    store: MemoryStore, query: MemoryQuery, forget: MemoryForget, backend: Backend, config: Config
) -> None:
    stored = await store.store(put())
    reply = await forgotten(forget, stored)
    assert (reply.ok, reply.forgotten) == (True, True)
    assert "will be deleted" not in reply.message
    assert await found(query) == []
    assert backend.contents() == []
    (audit,) = governance.query_write_audit(reason="memory_forget", config=config)
    assert (audit["action"], audit["actor_user_id"], audit["memory_id"]) == ("allow", "ada", stored.memory_id)
    assert audit["evidence_refs_json"]["extra"]["asked_because"] == "it was wrong"
    assert erasures.waiting(config)["waiting"] == 0


async def test_a_memory_server_that_is_down_is_caught_up_with(
    store: MemoryStore,
    query: MemoryQuery,
    forget: MemoryForget,
    eraser: Eraser,
    backend: Backend,
    dsn: str,
    config: Config,
) -> None:
    stored = await store.store(put())
    backend.faults.fail(Order(Fault.STATUS, 503), path=f"/memory/{stored.memory_id}")
    reply = await forgotten(forget, stored)
    assert reply.forgotten
    assert "will be deleted" in reply.message
    assert await found(query) == [], "unreadable at once all the same"
    assert backend.contents() == [TEXT]
    assert await eraser.run_once() == 0, "not due yet"
    pass_time(dsn)
    assert await eraser.run_once() == 1
    assert backend.contents() == []
    assert erasures.waiting(config)["waiting"] == 0


async def test_a_parked_memory_is_never_sent(
    store: MemoryStore, query: MemoryQuery, forget: MemoryForget, worker: OutboxWorker, backend: Backend
) -> None:
    backend.faults.fail(Order(Fault.STATUS, 429))
    parked = await store.store(put())
    assert await found(query) == [TEXT]
    await forgotten(forget, parked)
    assert await found(query) == []
    assert (await worker.run_once()).claimed == 0
    assert backend.contents() == []


async def test_a_parked_memory_that_had_arrived_is_found_and_deleted(
    store: MemoryStore, forget: MemoryForget, eraser: Eraser, backend: Backend, dsn: str
) -> None:
    backend.faults.fail(Order(Fault.AFTER_500))
    parked = await store.store(put())
    assert (parked.action, backend.contents()) == ("deferred", [TEXT])
    await forgotten(forget, parked)
    pass_time(dsn)
    await eraser.run_once()
    assert backend.contents() == []


async def test_a_copy_that_another_memory_has_stays(
    store: MemoryStore, query: MemoryQuery, forget: MemoryForget, backend: Backend, dsn: str
) -> None:
    stored = await store.store(put())
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO logbook.memories (target_space, payload_sha, payload_md, state, memory_id, words)"
            " SELECT 'org:all', payload_sha, payload_md, state, memory_id, words FROM logbook.memories"
        )
        connection.execute("UPDATE logbook.memories SET actor_user_id = 'eve' WHERE target_space = 'org:all'")
    narrow = Caller("ada", shared_spaces=frozenset(), scopes=frozenset({"write"}), verified=True)
    await forgotten(forget, stored, narrow)
    assert await found(query) == []
    assert backend.contents() == [TEXT], "org:all has the same copy"


async def test_forgotten_content_may_be_stored_anew(
    store: MemoryStore, query: MemoryQuery, forget: MemoryForget, backend: Backend, config: Config
) -> None:
    first = await store.store(put())
    await forgotten(forget, first)
    second = await store.store(put())
    assert (second.action, second.deduplicated) == ("allow", False)
    assert await found(query) == [TEXT]
    assert backend.contents() == [TEXT]
    assert all(row["ok"] for row in governance.invariants(config))


async def test_content_stored_anew_keeps_its_copy_when_the_old_one_was_still_to_go(
    store: MemoryStore,
    query: MemoryQuery,
    forget: MemoryForget,
    eraser: Eraser,
    backend: Backend,
    dsn: str,
    config: Config,
) -> None:
    first = await store.store(put())
    backend.faults.fail(Order(Fault.STATUS, 429), path=f"/memory/{first.memory_id}")
    await forgotten(forget, first)
    second = await store.store(put())
    assert second.memory_id == first.memory_id, "the memory server had it still"
    pass_time(dsn)
    await eraser.run_once()
    assert backend.contents() == [TEXT]
    assert await found(query) == [TEXT]
    assert erasures.waiting(config)["waiting"] == 0


async def test_a_write_waits_while_the_same_content_is_being_erased(
    store: MemoryStore, forget: MemoryForget, backend: Backend, config: Config
) -> None:
    stored = await store.store(put())
    backend.faults.fail(Fault.WAIT, path=f"/memory/{stored.memory_id}")
    forgetting = asyncio.create_task(forgotten(forget, stored))
    while f"DELETE /memory/{stored.memory_id}" not in backend.faults.calls:
        await asyncio.sleep(0.005)
    with pytest.raises(ConstraintViolated, match="memories_erased_before_written_anew"):
        outbox.enqueue_memory(TEXT, "private:ada", config=config)
    writing = asyncio.create_task(store.store(put()))
    await asyncio.sleep(0.1)
    assert not writing.done()
    backend.faults.let_go.set()
    assert (await forgetting).forgotten
    again = await writing
    assert (again.action, again.deduplicated) == ("allow", False)
    assert backend.contents() == [TEXT], "the new one was not taken for the old"


async def test_an_eraser_that_died_is_not_waited_for_for_ever(
    store: MemoryStore, forget: MemoryForget, eraser: Eraser, backend: Backend, dsn: str, config: Config
) -> None:
    stored = await store.store(put())
    backend.faults.fail(Order(Fault.STATUS, 503), path=f"/memory/{stored.memory_id}")
    await forgotten(forget, stored)
    pass_time(dsn)
    (record,) = erasures.due(config=config)
    assert erasures.claim(record, config) is not None, "and its holder dies"
    assert await eraser.run_once() == 0, "the lease is on"
    pass_time(dsn)
    again = await store.store(put())
    assert again.action == "allow"
    assert backend.contents() == [TEXT]
    pass_time(dsn)
    await eraser.run_once()
    assert backend.contents() == [TEXT]


async def test_a_lost_erasing_lease_finishes_nothing(
    store: MemoryStore, forget: MemoryForget, backend: Backend, dsn: str, config: Config
) -> None:
    stored = await store.store(put())
    backend.faults.fail(Order(Fault.STATUS, 503), path=f"/memory/{stored.memory_id}")
    await forgotten(forget, stored)
    pass_time(dsn)
    (record,) = erasures.due(config=config)
    lost = erasures.claim(record, config)
    pass_time(dsn)
    held = erasures.claim(record, config)
    assert lost is not None
    assert held is not None
    assert not erasures.finish(record, lost.erase_token, config)
    assert not erasures.postpone(record, lost.erase_token, 10, config)
    assert erasures.finish(record, held.erase_token, config)


async def test_a_worker_in_the_middle_of_it_brings_nothing_back(
    store: MemoryStore,
    query: MemoryQuery,
    forget: MemoryForget,
    worker: OutboxWorker,
    eraser: Eraser,
    backend: Backend,
    dsn: str,
) -> None:
    backend.faults.fail(Order(Fault.STATUS, 429))
    parked = await store.store(put())
    backend.faults.fail(Fault.WAIT)
    delivering = asyncio.create_task(worker.run_once())
    while backend.faults.calls.count("POST /memory/add") < 2:
        await asyncio.sleep(0.005)
    await forgotten(forget, parked)
    backend.faults.let_go.set()
    await delivering
    assert backend.contents() == [TEXT], "it was on its way"
    assert await found(query) == [], "and nobody sees it"
    pass_time(dsn)
    await eraser.run_once()
    assert backend.contents() == []


async def test_somebody_elses_private_memory_does_not_exist(
    store: MemoryStore, forget: MemoryForget, backend: Backend
) -> None:
    stored = await store.store(put())
    with pytest.raises(NotFound) as unreadable:
        await forgotten(forget, stored, BOB)
    with pytest.raises(NotFound) as missing:
        await forget.forget(ForgetRequest(BOB, "corr-0123456789abcdef", memory_id="no-such-id"))
    assert str(unreadable.value).replace(stored.memory_id or "", "X") == str(missing.value).replace(
        "no-such-id", "X"
    )
    assert backend.contents() == [TEXT]


async def test_a_shared_memory_is_forgotten_by_its_author_or_an_administrator(
    store: MemoryStore, query: MemoryQuery, forget: MemoryForget, config: Config
) -> None:
    governance.upsert_settings("default", True, None, "ada", config=config)
    stored = await store.store(put(space="team:default"))
    with pytest.raises(Forbidden):
        await forgotten(forget, stored, MEMBER)
    assert await found(query, "bob") == [TEXT]
    author = replace(MEMBER, actor="ada")
    assert (await forgotten(forget, stored, author)).forgotten
    again = await store.store(put(space="team:default"))
    assert (await forgotten(forget, again, BOB)).forgotten, "without tokens everybody administers"


async def test_a_repeat_is_answered_alike_and_does_nothing(
    store: MemoryStore, forget: MemoryForget, config: Config
) -> None:
    stored = await store.store(put())
    await forgotten(forget, stored)
    assert (await forgotten(forget, stored)).forgotten
    assert len(governance.query_write_audit(reason="memory_forget", config=config)) == 1
    with pytest.raises(NotFound):
        await forgotten(forget, stored, BOB)


@pytest.mark.parametrize("ids", [{}, {"memory_id": "m", "outbox_id": 1}, {"outbox_id": 0}])
async def test_what_cannot_be_asked_is_refused_by_field(forget: MemoryForget, ids: dict) -> None:
    with pytest.raises(InputError) as refused:
        await forget.forget(ForgetRequest(ADA, "corr-0123456789abcdef", **ids))
    assert refused.value.context["fields"]


async def test_two_at_once_forget_it_once(store: MemoryStore, forget: MemoryForget, config: Config) -> None:
    stored = await store.store(put())
    replies = await asyncio.gather(*(forgotten(forget, stored) for _ in range(8)), return_exceptions=True)
    assert all(isinstance(reply, ForgetReply) and reply.forgotten for reply in replies)
    assert len(governance.query_write_audit(reason="memory_forget", config=config)) == 1
