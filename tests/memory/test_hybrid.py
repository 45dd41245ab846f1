"""Search by words and by meaning at once: what is found, by whom, and how much of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

CAR = "We take the car to the mechanic every spring."
DOCTOR = "Ask the doctor before you take medicine."
COFFEE = "The espresso machine needs descaling on Fridays."


async def add(client, content: str, *tags: str, **more: Any) -> str:
    reply = await client.post("/memory/add", json={"content": content, "tags": list(tags), **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def query(client, text: str, **more: Any) -> list[dict[str, Any]]:
    reply = await client.post("/memory/query", json={"query": text, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["matches"]


async def found(client, text: str, **more: Any) -> list[str]:
    return [match["content"] for match in await query(client, text, **more)]


async def test_what_was_meant_is_found_though_no_word_of_it_was_said(client):
    for text in (CAR, DOCTOR, COFFEE):
        await add(client, text)
    assert await found(client, "automobile repair") == [CAR]
    assert await found(client, "physician") == [DOCTOR]


async def test_a_name_is_found_exactly_and_first(client):
    for n in range(30):
        await add(client, f"The car of host{n} is repaired by a mechanic, see PAY-{1000 + n}.")
    assert (await found(client, "PAY-1017"))[
        0
    ] == "The car of host17 is repaired by a mechanic, see PAY-1017."


async def test_a_memory_that_both_find_comes_before_one_that_either_finds(client):
    meant = await add(client, CAR)
    said = await add(client, f"{COFFEE} Beans, milk and sugar are in the kitchen. (Not the automobile!)")
    both = await add(client, "The automobile goes to the mechanic, the car is old.")
    matches = await query(client, "automobile")
    assert matches[0]["id"] == both
    assert {match["id"] for match in matches} == {meant, said, both}
    assert matches[0]["score"] > max(match["score"] for match in matches[1:])


async def test_words_are_found_in_any_of_their_endings(client):
    for stored, asked in [
        ("Deliveries were retried twice.", "retry a delivery"),
        ("The deployment was approved.", "who approves deployments?"),
        ("Payments are refunded.", "refunding"),
    ]:
        await add(client, stored)
        assert (await found(client, asked))[0] == stored


async def test_words_that_only_ask_bring_nothing_in(client):
    await add(client, "What we do is what we are, and how.")
    about = await add(client, "Certificates expire in October.")
    assert (await query(client, "When do our certificates expire?"))[0]["id"] == about


async def test_chinese_is_found_by_words_and_by_meaning(client):
    drive = await add(client, "开车上班的人可以停在地下")
    await add(client, "周五下午不允许上线")
    mixed = await add(client, "Kafka 的 topic 名字一律用小写加点号")
    assert [match["id"] for match in await query(client, "汽车")] == [drive]
    assert (await query(client, "topic 怎么命名"))[0]["id"] == mixed
    assert (await query(client, "小写"))[0]["id"] == mixed


async def test_tenants_are_apart_in_meaning_too(in_process):
    async with in_process({"key-a": "a", "key-b": "b"}) as client:
        client.headers["x-api-key"] = "key-a"
        await add(client, CAR)
        client.headers["x-api-key"] = "key-b"
        assert await found(client, "automobile repair") == []
        own = await add(client, "The mechanic repaired my car.")
        assert [match["id"] for match in await query(client, "automobile")] == [own]
        client.headers["x-api-key"] = "key-a"
        for n in range(60):
            await add(client, f"Automobile {n}: automobile repair.")
        client.headers["x-api-key"] = "key-b"
        assert [match["id"] for match in await query(client, "automobile", k=1)] == [own], "not crowded out"


async def test_tags_hold_for_meaning_too(client):
    await add(client, CAR, "space:a")
    other = await add(client, "A mechanic looks at every car.", "space:b")
    matches = await query(client, "automobile repair", filters={"tags": ["space:b"]})
    assert [match["id"] for match in matches] == [other]
    assert await query(client, "automobile repair", filters={"tags": ["space:c"]}) == []


async def test_k_matches_come_if_there_are_so_many_whatever_the_filter(client):
    """Nearer and better memories of another space fill both rankings many times over."""
    for start in range(0, 120, 20):
        some = range(start, start + 20)
        await asyncio.gather(*(add(client, f"car repair {n}, car repair", "space:big") for n in some))
    few = [await add(client, f"The mechanic number {n} has a garage.", "space:small") for n in range(12)]
    filters = {"tags": ["space:small"]}
    for text in ("automobile", "mechanic", "car repair garage"):
        matches = await query(client, text, k=10, filters=filters)
        assert len(matches) == 10, text
        assert {match["id"] for match in matches} <= set(few)
    assert len(await query(client, "car repair", k=100)) == 100
    assert len(await query(client, "number", k=100)) == 12, "no more than there are"


async def test_metadata_must_hold_what_was_asked(client):
    await add(client, f"{CAR} 1", metadata={"kind": "FACT", "n": {"a": 1, "b": 2}})
    await add(client, f"{CAR} 2", metadata={"kind": "RULE"})
    await add(client, f"{CAR} 3")
    for text in ("car", "automobile"):
        assert await found(client, text, filters={"metadata": {"kind": "RULE"}}) == [f"{CAR} 2"]
        assert await found(client, text, filters={"metadata": {"n": {"a": 1}}}) == [f"{CAR} 1"]
        assert await found(client, text, filters={"metadata": {"kind": "rule"}}) == []
        assert len(await found(client, text, filters={"metadata": {}})) == 3


@pytest.mark.parametrize(("since", "until"), [("since", "until"), ("startTime", "endTime")])
async def test_a_time_bounds_the_matches(client, sql, since, until):
    ids = [await add(client, f"{CAR} {n}") for n in range(3)]
    for n, memory_id in enumerate(ids):
        sql("UPDATE memories SET created_at = to_timestamp(%s) WHERE id = %s", 1000 + n, memory_id)

    async def matching(**filters: int) -> set[str]:
        return {match["id"] for text in ("car", "automobile") for match in await query(client, text, filters=filters)}  # fmt: skip

    assert await matching(**{since: 1_001_000}) == set(ids[1:])
    assert await matching(**{until: 1_001_000}) == set(ids[:1])
    assert await matching(**{since: 1_001_000, until: 1_002_000}) == {ids[1]}
    assert await matching(**{since: 1_003_000}) == set()


async def test_openmemorys_other_filters_mean_what_they_say(client):
    await add(client, CAR)
    assert len(await query(client, "car", filters={"sector": "semantic", "min_score": 1})) == 1
    assert await query(client, "car", filters={"sector": "episodic"}) == []
    assert await query(client, "car", filters={"min_score": 1.1}) == []


@pytest.mark.parametrize(
    ("filters", "field"),
    [
        ({"tgas": ["a"]}, "filters.tgas"),
        ({"metadata": []}, "filters.metadata"),
        ({"metadata": {"a": "\x00"}}, "filters.metadata"),
        ({"since": "yesterday"}, "filters.since"),
        ({"until": -1}, "filters.until"),
        ({"startTime": 1.5}, "filters.startTime"),
        ({"endTime": 10**18}, "filters.endTime"),
        ({"sector": 1}, "filters.sector"),
        ({"min_score": "high"}, "filters.min_score"),
    ],
)
async def test_a_filter_that_is_not_understood_is_refused(refused, filters, field):
    reply = await refused.post("/memory/query", json={"query": "x", "filters": filters})
    assert (reply.status_code, reply.json()["error"]) == (400, "invalid_input")
    assert field in [detail["field"] for detail in reply.json()["details"]]


async def test_a_deleted_memory_is_not_found_by_meaning(client):
    memory_id = await add(client, CAR)
    await client.delete(f"/memory/{memory_id}")
    assert await query(client, "automobile repair") == []
