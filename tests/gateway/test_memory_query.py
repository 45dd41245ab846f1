"""memory_query: own and shared spaces only, deferred writes included, and an answer when the server has none."""

from __future__ import annotations

import pytest

from engram.gateway.memory_query import MemoryQuery, QueryRequest
from engram.gateway.memory_store import MemoryStore
from engram.gateway.store_reply import StoreRequest
from engram.kernel.errors import DatabaseUnavailable, Forbidden, InputError
from engram.logbook import governance
from engram.logbook.config import Config
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio


def ask(text: str, actor: str = "ada", **kw) -> QueryRequest:
    return QueryRequest(query=text, actor_user_id=actor, correlation_id="corr-0123456789abcdef", **kw)


def put(text: str, actor: str = "ada", space: str | None = None) -> StoreRequest:
    return StoreRequest(
        payload_md=text, actor_user_id=actor, correlation_id="corr-0123456789abcdef", target_space=space
    )


def contents(reply) -> list[str]:
    return [result["content"] for result in reply.results]


async def test_a_stored_memory_is_found(store: MemoryStore, query: MemoryQuery) -> None:
    stored = await store.store(put("The webhook is retried three times."))
    reply = await query.query(ask("how often is the webhook retried"))
    assert not reply.degraded
    assert reply.spaces_searched == ["team:default", "private:ada"]
    assert [(r["memory_id"], r["space"]) for r in reply.results] == [(stored.memory_id, "private:ada")]


async def test_a_deferred_write_is_found_a_moment_later(
    store: MemoryStore, query: MemoryQuery, backend
) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    deferred = await store.store(put("The webhook is retried three times."))
    reply = await query.query(ask("webhook"))
    assert not reply.degraded
    assert [(r["outbox_id"], r["state"]) for r in reply.results] == [(deferred.outbox_id, "parked")]


QUERY_FAULTS = [
    Order(Fault.STATUS, 500),
    Order(Fault.STATUS, 401),
    Order(Fault.HTML),
    Order(Fault.NONSENSE),
    Order(Fault.STATUS, 200, {"matches": "rubbish"}),
    Order(Fault.STATUS, 200, {"matches": [{"id": 1}]}),
    Order(Fault.HANG),
    Order(Fault.DROP),
]


@pytest.mark.parametrize("order", QUERY_FAULTS, ids=lambda o: f"{o.fault.value}-{o.status}")
async def test_whatever_the_server_does_the_logbook_answers(
    store: MemoryStore, query: MemoryQuery, backend, order: Order
) -> None:
    await store.store(put("The webhook is retried three times."))
    backend.faults.fail(Order(Fault.STATUS, 500))
    await store.store(put("The webhook key is rotated."))
    backend.faults.fail(order, path="/memory/query")
    reply = await query.query(ask("webhook"))
    assert reply.degraded
    assert "lean less on memory" in reply.message
    assert set(contents(reply)) == {"The webhook is retried three times.", "The webhook key is rotated."}


@pytest.mark.parametrize("degraded", [False, True])
async def test_private_memory_is_its_owners_alone(
    store: MemoryStore, query: MemoryQuery, backend, degraded: bool
) -> None:
    await store.store(put("The webhook secret of Ada.", "ada"))
    if degraded:
        backend.faults.fail(Order(Fault.STATUS, 500), path="/memory/query")
    reply = await query.query(ask("webhook secret", "bob"))
    assert (reply.degraded, reply.results) == (degraded, [])
    with pytest.raises(Forbidden):
        await query.query(ask("webhook", "bob", spaces=["private:ada"]))


async def test_team_memory_is_shared(store: MemoryStore, query: MemoryQuery, config: Config) -> None:
    governance.upsert_settings("default", True, None, "ada", config=config)
    await store.store(put("The webhook is retried three times.", "ada", "team:default"))
    assert contents(await query.query(ask("webhook", "bob"))) == ["The webhook is retried three times."]


async def test_enough_results_though_most_hits_are_somebody_elses(
    store: MemoryStore, query: MemoryQuery
) -> None:
    for n in range(120):
        await store.store(put(f"webhook webhook webhook {n}", "bob"))
    for n in range(3):
        await store.store(put(f"one webhook among other words {n}", "ada"))
    reply = await query.query(ask("webhook", "ada", top_k=3))
    assert len(reply.results) == 3


async def test_a_database_that_is_away_is_told_as_such(query: MemoryQuery, db, monkeypatch) -> None:
    async def away(_) -> None:
        raise DatabaseUnavailable("gone")

    monkeypatch.setattr(db, "run", away)
    with pytest.raises(DatabaseUnavailable):
        await query.query(ask("webhook"))


@pytest.mark.parametrize(
    "request_", [ask(""), ask("x" * 5000), ask("x", top_k=0), ask("x", top_k=101), ask("x", "a b"), ask("x", spaces=["nope"])],
    ids=range(6),
)  # fmt: skip
async def test_what_cannot_be_asked_is_refused_by_field(query: MemoryQuery, request_: QueryRequest) -> None:
    with pytest.raises(InputError) as refused:
        await query.query(request_)
    assert refused.value.context["fields"]
