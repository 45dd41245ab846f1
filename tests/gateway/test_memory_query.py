"""memory_query: own and shared spaces only, deferred writes included, and an answer when the server has none."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from engram.gateway.memory_query import MemoryQuery, QueryRequest
from engram.gateway.memory_store import MemoryStore
from engram.gateway.store_reply import StoreRequest
from engram.kernel.errors import DatabaseUnavailable, Forbidden, InputError
from engram.logbook import governance, items, recall
from engram.logbook.config import Config
from engram.logbook.memories import Filters
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


async def test_degraded_candidates_and_events_are_searched_too(
    query: MemoryQuery, backend, config: Config
) -> None:
    for space in ("team:default", "private:bob"):
        recall.add_candidate(space, "PITFALL", "Webhook", f"candidate in {space}", config=config)
        items.add_event("incident", space, f"a webhook event in {space}", actor_user_id="eve", config=config)
    backend.faults.fail(*[Order(Fault.STATUS, 500)] * 5, path="/memory/query")
    reply = await query.query(ask("webhook"))
    assert reply.degraded
    assert {(r["source"], r["space"], r["kind"], r["state"]) for r in reply.results} == {
        ("candidates", "team:default", "PITFALL", "recorded"),
        ("events", "team:default", "incident", "recorded"),
    }
    only = await query.query(ask("webhook", filters=Filters(kinds=("pitfall",))))
    assert [r["source"] for r in only.results] == ["candidates"]
    of_eve = await query.query(ask("webhook", filters=Filters(actor_user_id="eve")))
    assert [r["source"] for r in of_eve.results] == ["events"]


BEFORE, AFTER = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
FILTERS = [
    (Filters(kinds=("fact",)), ["A webhook fact."]),
    (Filters(kinds=("fact", "PITFALL")), ["A webhook fact.", "A webhook pitfall."]),
    (Filters(actor_user_id="bob"), ["A webhook pitfall."]),
    (Filters(item_id=7), ["A webhook fact."]),
    (Filters(meta={"module": "billing"}), ["A webhook pitfall."]),
    (Filters(since=BEFORE, until=AFTER), ["A webhook fact.", "A webhook pitfall."]),
    (Filters(since=AFTER), []),
    (Filters(until=BEFORE), []),
    (Filters(kinds=("fact",), actor_user_id="bob"), []),
]


@pytest.mark.parametrize("parked", [False, True], ids=["stored", "parked"])
@pytest.mark.parametrize("degraded", [False, True], ids=["server-well", "server-ill"])
@pytest.mark.parametrize(("filters", "expected"), FILTERS, ids=range(len(FILTERS)))
async def test_filters_hold_wherever_the_answer_comes_from(
    store: MemoryStore,
    query: MemoryQuery,
    backend,
    config: Config,
    filters: Filters,
    expected: list[str],
    degraded: bool,
    parked: bool,
) -> None:
    governance.upsert_settings("default", True, None, "ada", config=config)
    fact = replace(put("A webhook fact.", "ada", "team:default"), kind="FACT", item_id=7)
    pitfall = replace(
        put("A webhook pitfall.", "bob", "team:default"),
        kind="PITFALL",
        meta_json={"module": "billing", "tries": 3},
    )
    for request in (fact, pitfall):
        if parked:
            backend.faults.fail(Order(Fault.STATUS, 500))
        await store.store(request)
    if degraded:
        backend.faults.fail(Order(Fault.STATUS, 500), path="/memory/query")
    reply = await query.query(ask("webhook", filters=filters))
    assert reply.degraded is degraded
    assert sorted(contents(reply)) == expected


async def test_a_token_that_lists_spaces_reads_no_others(
    store: MemoryStore, query: MemoryQuery, config: Config
) -> None:
    governance.upsert_settings("default", True, None, "ada", config=config)
    await store.store(put("The webhook is retried three times.", "ada", "team:default"))
    narrow = ask("webhook", "bob", shared_spaces=frozenset({"team:other"}))
    reply = await query.query(narrow)
    assert (reply.spaces_searched, reply.results) == (["private:bob"], [])
    with pytest.raises(Forbidden):
        await query.query(replace(narrow, spaces=["team:default"]))


@pytest.mark.parametrize(
    "request_", [ask(""), ask("x" * 5000), ask("x", top_k=0), ask("x", top_k=101), ask("x", "a b"), ask("x", spaces=["nope"])],
    ids=range(6),
)  # fmt: skip
async def test_what_cannot_be_asked_is_refused_by_field(query: MemoryQuery, request_: QueryRequest) -> None:
    with pytest.raises(InputError) as refused:
        await query.query(request_)
    assert refused.value.context["fields"]
