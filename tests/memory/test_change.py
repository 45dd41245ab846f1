"""PATCH /memory/{id}: what changes, what stays, and how it is found afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

CAR = "We take the car to the mechanic every spring."
UNKNOWN = "6f1c1f0e-5b0a-4c57-9d0a-3f6a2f1f9c11"


async def add(client, content: str, **more: Any) -> str:
    reply = await client.post("/memory/add", json={"content": content, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def change(client, memory_id: str, **body: Any) -> Any:
    return await client.patch(f"/memory/{memory_id}", json=body)


async def found(client, text: str, **more: Any) -> list[str]:
    reply = await client.post("/memory/query", json={"query": text, **more})
    return [match["id"] for match in reply.json()["matches"]]


async def test_new_content_is_found_by_its_words_and_its_meaning_and_the_old_is_not(client):
    memory_id = await add(
        client, "Puppies and cats are allowed in the office.", tags=["t"], metadata={"a": 1}
    )
    reply = await change(client, memory_id, content=CAR)
    assert (reply.status_code, reply.json()) == (200, {"id": memory_id, "updated": True})
    for text in ("mechanic", "automobile"):
        assert await found(client, text) == [memory_id]
    for text in ("office", "dogs"):
        assert await found(client, text) == []
    got = (await client.get(f"/memory/{memory_id}")).json()
    assert (got["content"], got["tags"], got["metadata"]) == (CAR, ["t"], {"a": 1})
    assert got["updated_at"] >= got["created_at"]


async def test_tags_and_metadata_change_alone(client, sql):
    memory_id = await add(client, CAR, tags=["space:a"], metadata={"a": 1})
    created = (await client.get(f"/memory/{memory_id}")).json()["created_at"]
    assert (await change(client, memory_id, tags=["space:b", "x"])).status_code == 200
    assert (await change(client, memory_id, metadata={"b": 2})).status_code == 200
    got = (await client.get(f"/memory/{memory_id}")).json()
    assert (got["content"], got["tags"], got["metadata"]) == (CAR, ["space:b", "x"], {"b": 2})
    assert got["created_at"] == created
    assert await found(client, "automobile", filters={"tags": ["space:b"]}) == [memory_id]
    assert await found(client, "automobile", filters={"tags": ["space:a"]}) == []
    assert [row["to_embed"] for row in sql("SELECT to_embed FROM memories")] == [False], (
        "the vector is as it was"
    )


async def test_a_changed_memory_is_what_later_adds_are_compared_with(client):
    memory_id = await add(client, "one", tags=["space:a"])
    await change(client, memory_id, content="two")
    assert await add(client, "two", tags=["space:a"]) == memory_id
    assert await add(client, "one", tags=["space:a"]) != memory_id


async def test_two_memories_of_a_space_cannot_become_the_same(client):
    first = await add(client, "one", tags=["space:a"])
    second = await add(client, "two", tags=["space:a"])
    elsewhere = await add(client, "two", tags=["space:b"])
    for reply in (
        await change(client, second, content="one"),
        await change(client, elsewhere, tags=["space:a"]),
    ):
        assert (reply.status_code, reply.json()) == (409, {"error": "duplicate"})
    assert (await client.get(f"/memory/{second}")).json()["content"] == "two"
    assert (await client.get(f"/memory/{first}")).json()["content"] == "one"
    assert (await change(client, first, content="one")).status_code == 200, "to itself it may"


async def test_another_tenants_memory_is_not_found(in_process):
    async with in_process({"key-a": "a", "key-b": "b"}) as client:
        client.headers["x-api-key"] = "key-a"
        memory_id = await add(client, CAR)
        client.headers["x-api-key"] = "key-b"
        reply = await change(client, memory_id, content="mine now")
        assert (reply.status_code, reply.json()) == (404, {"error": "not_found"})
        assert (await change(client, memory_id, content="x", user_id="a")).status_code == 403
        client.headers["x-api-key"] = "key-a"
        assert (await client.get(f"/memory/{memory_id}")).json()["content"] == CAR


@pytest.mark.parametrize("memory_id", [UNKNOWN, "7"])
async def test_an_unknown_or_malformed_id_is_not_found(refused, memory_id):
    reply = await change(refused, memory_id, content="x")
    assert (reply.status_code, reply.json()) == (404, {"error": "not_found"})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"content": None}, "body"),
        ({"content": " "}, "content"),
        ({"content": 7}, "content"),
        ({"content": "x" * 200_001}, "content"),
        ({"tags": "a"}, "tags"),
        ({"metadata": []}, "metadata"),
        ({"content": "x", "user_id": 5}, "user_id"),
    ],
)
async def test_an_invalid_change_names_its_field(refused, body, field):
    reply = await refused.patch(f"/memory/{UNKNOWN}", json=body)
    assert (reply.status_code, reply.json()["error"]) == (400, "invalid_input")
    assert [detail["field"] for detail in reply.json()["details"]] == [field]


async def test_it_must_be_json(refused):
    reply = await refused.patch(f"/memory/{UNKNOWN}", content=b'{"content": "x"}')
    assert reply.status_code == 415


async def test_changes_at_once_leave_one_of_them_whole(client, sql, until):
    memory_id = await add(client, "first")
    texts = [f"{CAR} {n}" for n in range(16)]
    replies = await asyncio.gather(
        *(change(client, memory_id, content=text, metadata={"text": text}) for text in texts)
    )
    assert {reply.status_code for reply in replies} == {200}
    got = (await client.get(f"/memory/{memory_id}")).json()
    assert got["content"] in texts
    assert got["metadata"] == {"text": got["content"]}

    async def has_its_vector() -> bool:
        return not sql("SELECT FROM memories WHERE to_embed OR embedding IS NULL")

    await until(has_its_vector)
    assert await found(client, "automobile") == [memory_id]
