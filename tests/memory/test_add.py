"""POST /memory/add: what is stored, what is the same, what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
SEMANTIC = {"primary_sector": "semantic", "sectors": ["semantic"]}


async def add(client, content, *, key=None, **more) -> dict[str, Any]:
    headers = {"Idempotency-Key": key} if key else {}
    reply = await client.post("/memory/add", json={"content": content, **more}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def rows(sql) -> int:
    return sql("SELECT count(*) AS n FROM memories")[0]["n"]


async def test_a_memory_is_given_back_as_it_came(client):
    metadata = {"b": 1, "a": {"n": [1.5, None, True, "記憶", "q'\"\\"]}, "": -0.0}
    added = await add(client, "Renew the lease\n early.", tags=["x", "space:team:a"], metadata=metadata)
    assert added == {"id": added["id"], **SEMANTIC}
    assert str(UUID(added["id"])) == added["id"]

    got = (await client.get(f"/memory/{added['id']}")).json()
    assert got["created_at"] == got["updated_at"] == got["last_seen_at"] > 1_700_000_000_000
    for moment in ("created_at", "updated_at", "last_seen_at"):
        del got[moment]
    assert got == {
        "id": added["id"],
        "content": "Renew the lease\n early.",
        "tags": ["x", "space:team:a"],
        "metadata": metadata,
        "user_id": "default",
        "salience": 1.0,
        **SEMANTIC,
    }
    assert list(got["metadata"]) == ["b", "a", ""]


@pytest.mark.parametrize("absent", [{}, {"tags": None, "metadata": None, "user_id": None}])
async def test_only_content_is_needed(client, absent):
    added = await add(client, "x", **absent)
    got = (await client.get(f"/memory/{added['id']}")).json()
    assert (got["tags"], got["metadata"]) == ([], {})


async def test_own_user_id_is_accepted(client):
    added = await add(client, "x", user_id="default")
    assert (await client.get(f"/memory/{added['id']}")).json()["user_id"] == "default"


async def test_same_content_in_the_same_space_is_one_memory(client, sql):
    first = await add(client, "x", tags=["space:a", "one"], metadata={"first": True})
    second = await add(client, "x", tags=["two", "space:a"])
    assert second == {"id": first["id"], **SEMANTIC, "deduplicated": True}
    assert rows(sql) == 1
    kept = (await client.get(f"/memory/{first['id']}")).json()
    assert (kept["tags"], kept["metadata"]) == (["space:a", "one"], {"first": True})


async def test_spaces_are_apart(client, sql):
    spaces = [["space:a"], ["space:b"], [], ["space:"], ["spaces:a"]]
    ids = [(await add(client, "x", tags=tags))["id"] for tags in spaces]
    assert len(set(ids)) == 3, "without a space there is one more, shared by all that have none"
    assert rows(sql) == 3


async def test_content_is_compared_exactly(client):
    variants = ["x", "X", " x", "x ", "é", "e\u0301"]
    assert len({(await add(client, content))["id"] for content in variants}) == len(variants)


async def test_tenants_are_apart(in_process):
    async with in_process({"key-a": "a", "key-b": "b"}) as client:
        ids = {}
        for tenant in "ab":
            client.headers["x-api-key"] = f"key-{tenant}"
            ids[tenant] = (await add(client, "shared words", key="same", user_id=tenant))["id"]
        assert ids["a"] != ids["b"]

        seen = (await client.post("/memory/query", json={"query": "shared"})).json()["matches"]
        assert [match["id"] for match in seen] == [ids["b"]]
        assert [item["id"] for item in (await client.get("/memory/all")).json()["items"]] == [ids["b"]]
        assert (await client.get(f"/memory/{ids['a']}")).status_code == 404
        assert (await client.delete(f"/memory/{ids['a']}")).status_code == 404
        client.headers["x-api-key"] = "key-a"
        assert (await client.get(f"/memory/{ids['a']}")).status_code == 200


async def test_32_identical_adds_at_once_make_one_memory(client, sql):
    replies = await asyncio.gather(*(add(client, "x", tags=["space:a"]) for _ in range(32)))
    assert len({reply["id"] for reply in replies}) == 1
    assert sum("deduplicated" not in reply for reply in replies) == 1
    assert rows(sql) == 1


async def test_a_key_counts_once(client, sql):
    first = await add(client, "x", key="k")
    assert await add(client, "x", key="k") == first, "a repeat gets the first answer, flag and all"
    assert rows(sql) == 1


async def test_a_key_that_met_a_twin_keeps_that_answer(client):
    first = await add(client, "x", key="k1")
    second = await add(client, "x", key="k2")
    assert second == {**first, "deduplicated": True}
    assert await add(client, "x", key="k2") == second


@pytest.mark.parametrize("other", [{"content": "y"}, {"content": "x", "tags": ["space:elsewhere"]}])
async def test_a_key_used_for_something_else_is_a_conflict(client, sql, other):
    first = await add(client, "x", key="k")
    reply = await client.post("/memory/add", json=other, headers={"Idempotency-Key": "k"})
    assert (reply.status_code, reply.json()) == (409, {"error": "idempotency_conflict"})
    assert rows(sql) == 1
    assert await add(client, "x", key="k") == first


async def test_32_repeats_of_a_key_at_once_get_one_answer(client, sql):
    replies = await asyncio.gather(*(add(client, "x", key="k") for _ in range(32)))
    assert all(reply == {"id": replies[0]["id"], **SEMANTIC} for reply in replies)
    assert rows(sql) == 1


async def test_one_key_for_32_contents_at_once_stores_one(client, sql):
    headers = {"Idempotency-Key": "k"}
    replies = await asyncio.gather(
        *(client.post("/memory/add", json={"content": f"x{i}"}, headers=headers) for i in range(32))
    )
    assert sorted(reply.status_code for reply in replies) == [200] + [409] * 31
    assert rows(sql) == 1


async def test_32_keys_for_one_content_at_once_remember_the_one_id(client, sql):
    replies = await asyncio.gather(*(add(client, "x", key=f"k{i}") for i in range(32)))
    assert len({reply["id"] for reply in replies}) == 1
    assert rows(sql) == 1
    again = await asyncio.gather(*(add(client, "x", key=f"k{i}") for i in range(32)))
    assert again == replies


async def test_a_late_repeat_does_not_bring_back_what_was_deleted(client, sql):
    first = await add(client, "x", key="k")
    assert (await client.delete(f"/memory/{first['id']}")).json() == {"ok": True}
    assert await add(client, "x", key="k") == first
    assert rows(sql) == 0


async def test_deleted_content_may_be_stored_anew(client):
    first = await add(client, "x", key="k")
    await client.delete(f"/memory/{first['id']}")
    anew = await add(client, "x", key="k2")
    assert anew["id"] != first["id"]
    assert "deduplicated" not in anew
    assert await add(client, "x", key="k") == first, "the old key still means the old memory"


async def test_adds_and_deletes_at_once_never_fail_or_double(client, sql):
    async def add_and_delete() -> None:
        for _ in range(5):
            reply = await add(client, "x", tags=["space:a"])
            assert (await client.delete(f"/memory/{reply['id']}")).status_code in (200, 404)

    await asyncio.gather(*(add_and_delete() for _ in range(8)))
    await add(client, "x", tags=["space:a"])
    assert rows(sql) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "content"),
        ({"content": ""}, "content"),
        ({"content": " \n\t\u3000"}, "content"),
        ({"content": "x" * 200_001}, "content"),
        ({"content": 7}, "content"),
        ({"content": None}, "content"),
        ({"content": "a\x00b"}, "content"),
        ({"content": "a\ud800b"}, "content"),
        ({"content": "x", "tags": "space:a"}, "tags"),
        ({"content": "x", "tags": ["a", 1]}, "tags"),
        ({"content": "x", "tags": ["t"] * 101}, "tags"),
        ({"content": "x", "tags": ["t" * 301]}, "tags"),
        ({"content": "x", "tags": ["a\x00"]}, "tags"),
        ({"content": "x", "metadata": []}, "metadata"),
        ({"content": "x", "metadata": {"a": [{"b\x00": 1}]}}, "metadata"),
        ({"content": "x", "metadata": {"a": "\udfff"}}, "metadata"),
        ({"content": "x", "metadata": {"a": float("nan")}}, "metadata"),
        ({"content": "x", "user_id": 5}, "user_id"),
        ([], "body"),
        ("x", "body"),
    ],
)
async def test_invalid_input_names_its_field(refused, body, field):
    reply = await refused.post("/memory/add", content=json.dumps(body), headers=JSON)
    assert reply.status_code == 400
    told = reply.json()
    assert told["error"] == "invalid_input"
    assert told["message"]
    assert [detail["field"] for detail in told["details"]] == [field]
    assert told["details"][0]["message"]


async def test_every_problem_is_told_at_once(refused):
    reply = await refused.post("/memory/add", json={"content": "", "tags": 1, "metadata": 2, "user_id": 3})
    fields = {detail["field"] for detail in reply.json()["details"]}
    assert fields == {"content", "tags", "metadata", "user_id"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"content": "x", "metadata": {"n": ' + b"9" * 5000 + b"}}",
    ],
    ids=["nothing", "half", "not text", "deep", "a number without end"],
)
async def test_what_is_not_json_is_invalid_input(refused, raw):
    reply = await refused.post("/memory/add", content=raw, headers=JSON)
    assert (reply.status_code, reply.json()["error"]) == (400, "invalid_input")
    assert reply.json()["details"] == [{"field": "body", "message": "is not valid JSON"}]


async def test_nesting_has_an_end_and_is_readable_up_to_it(client):
    def nested(depth: int) -> dict[str, Any]:
        return {"a": nested(depth - 1)} if depth else {}

    added = await add(client, "x", metadata=nested(64))
    assert (await client.get(f"/memory/{added['id']}")).json()["metadata"] == nested(64)
    reply = await client.post("/memory/add", json={"content": "y", "metadata": nested(65)})
    assert reply.status_code == 400


async def test_infinity_by_another_spelling_is_refused(refused):
    reply = await refused.post(
        "/memory/add", content=b'{"content": "x", "metadata": {"n": 1e999}}', headers=JSON
    )
    assert reply.json()["details"][0]["field"] == "metadata"


@pytest.mark.parametrize("key", ["", "k" * 201, "a\tb"])
async def test_a_bad_key_is_invalid_input(refused, key):
    reply = await refused.post("/memory/add", json={"content": "x"}, headers={"Idempotency-Key": key})
    assert reply.status_code == 400
    assert reply.json()["details"][0]["field"] == "Idempotency-Key"


async def test_a_key_of_200_characters_is_good(client):
    assert await add(client, "x", key="k" * 200) == await add(client, "x", key="k" * 200)


async def test_another_tenants_user_id_is_refused(refused):
    for path, body in [
        ("/memory/add", {"content": "x", "user_id": "somebody"}),
        ("/memory/query", {"query": "x", "filters": {"user_id": "somebody"}}),
    ]:
        reply = await refused.post(path, json=body)
        assert (reply.status_code, reply.json()) == (403, {"error": "tenant_mismatch"})
    assert (await refused.get("/memory/all?user_id=somebody")).status_code == 403
