"""Query, get, list and delete."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.anyio

UNKNOWN = "6f1c1f0e-5b0a-4c57-9d0a-3f6a2f1f9c11"


async def add(client, content: str, *tags: str) -> str:
    reply = await client.post("/memory/add", json={"content": content, "tags": list(tags)})
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def query(client, text: str, **more: Any) -> list[dict[str, Any]]:
    reply = await client.post("/memory/query", json={"query": text, **more})
    assert reply.status_code == 200, reply.text
    assert reply.json()["query"] == text
    return reply.json()["matches"]


async def test_a_match_has_openmemorys_shape(client):
    memory_id = await add(client, "Renew the lease early.")
    (match,) = await query(client, "LEASE")
    score, seen = match.pop("score"), match.pop("last_seen_at")
    assert 0 < score <= 1
    assert seen > 1_700_000_000_000
    assert match == {
        "id": memory_id,
        "content": "Renew the lease early.",
        "sectors": ["semantic"],
        "primary_sector": "semantic",
        "path": [],
        "salience": 1.0,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("部署前请先续租约，然后重启网关。", ["租约", "重启", "网关重启", "续租约"]),
        ("デプロイの前にリースを更新してください", ["リース", "更新"]),
        ("배포 전에 임대를 갱신하세요", ["임대", "갱신"]),
        ("Обновите аренду до развёртывания", ["АРЕНДУ", "развёртывания"]),
        ("the outbox_worker renews lease-tokens", ["worker", "Tokens", "ｌｅａｓｅ"]),
    ],
)
async def test_words_of_every_script_are_found(client, text, words):
    memory_id = await add(client, text)
    await add(client, "something else altogether 全く別の話")
    for word in words:
        assert [match["id"] for match in await query(client, word)] == [memory_id], word


async def test_the_better_match_comes_first(client):
    for i in range(30):
        await add(client, f"the gateway writes to the log, day {i}")
    rare = await add(client, "a zebra is our mascot")
    both = await add(client, "zebra gateway")
    found = [match["id"] for match in await query(client, "the zebra gateway", k=100)]
    assert found[:2] == [both, rare], "more of the asked words first, a rare word before common ones"
    assert len(found) == 32
    scores = [match["score"] for match in await query(client, "the zebra gateway", k=100)]
    assert scores == sorted(scores, reverse=True)


async def test_a_text_about_the_word_beats_one_that_mentions_it(client):
    mention = await add(client, "lease " + " ".join(f"filler{i}" for i in range(300)))
    about = await add(client, "a lease is renewed by the holder of the lease")
    assert [match["id"] for match in await query(client, "lease")] == [about, mention]


async def test_a_text_finds_itself_first_among_many_alike(client):
    texts = [f"deployment {i} of service s{i % 7} failed on host h{i % 11}" for i in range(60)]
    ids = [await add(client, text) for text in texts]
    for i in (0, 17, 59):
        assert (await query(client, texts[i], k=1))[0]["id"] == ids[i]


async def test_all_words_together_are_found_though_each_is_common(client, sql):
    """More rows have each word than may be candidates; the one that has both is among them."""
    sql(
        """INSERT INTO memories (tenant, space, content_sha, content, tags, metadata, words)
        SELECT 'default', '', encode(sha256(n::text::bytea), 'hex'), n::text, '{}', '{}',
               (CASE WHEN n %% 2 = 0 THEN '''alpha'':1' ELSE '''beta'':1' END)::tsvector
        FROM generate_series(1, 3000) AS n"""
    )
    both = await add(client, "beta, and at some distance from it alpha")
    assert (await query(client, "alpha beta", k=1))[0]["id"] == both


async def test_k_bounds_the_matches(client):
    for i in range(12):
        await add(client, f"lease {i}")
    assert len(await query(client, "lease")) == 8
    assert len(await query(client, "lease", k=1)) == 1
    assert len(await query(client, "lease", k=100)) == 12


async def test_all_the_asked_tags_must_be_there(client):
    one = await add(client, "lease 1", "space:a", "sha:1")
    two = await add(client, "lease 2", "space:a", "sha:2", 'it\'s \\ a {tag}, "quoted"')
    three = await add(client, "lease 3", "space:b", "sha:1")

    async def found(*tags: str) -> set[str]:
        return {match["id"] for match in await query(client, "lease", filters={"tags": list(tags)})}

    assert await found() == {one, two, three}
    assert await found("space:a") == {one, two}
    assert await found("space:a", "sha:1") == {one}
    assert await found("space:a", 'it\'s \\ a {tag}, "quoted"') == {two}
    assert await found("space:a", "space:b") == set()
    assert await found("space:") == set(), "a tag is matched whole"


@pytest.mark.parametrize("text", ["", "  ", "!?…", "'", "🎉", "nothing-like-it"])
async def test_a_query_without_a_known_word_has_no_matches(client, text):
    await add(client, "Renew the lease.")
    assert await query(client, text) == []


async def test_a_query_is_only_ever_words(client):
    memory_id = await add(client, "it's a & b | !c:* <-> 'quoted' \\ end")
    for text in ["a & !c", "'quoted", "c:*", "end\\'", "quoted' | 'x"]:
        assert [match["id"] for match in await query(client, text)] == [memory_id]


@pytest.mark.parametrize("character", ["x", "記", "😀", "ﷲ"], ids=["latin", "cjk", "emoji", "expanding"])
async def test_the_longest_content_comes_back_whole(client, character):
    content = "findme " + character * 199_983 + " the end."
    assert len(content) == 199_999
    memory_id = await add(client, content)
    (match,) = await query(client, "findme")
    assert match["content"] == content
    assert (await client.get(f"/memory/{memory_id}")).json()["content"] == content


async def test_text_with_more_words_than_an_index_entry_can_hold_is_stored(client):
    """Each ligature stands for four letters of two bytes; the words are all different."""
    ligatures = "ﷲﷳﷴﷵ"
    words = ["".join(ligatures[(i >> (2 * j)) % 4] for j in range(16)) for i in range(11_760)]
    content = " ".join(words)
    assert len(content) <= 200_000
    await add(client, content)
    (match,) = await query(client, words[1])
    assert match["content"] == content


async def test_a_query_may_be_as_long_as_a_content(client):
    content = " ".join(f"word{i}" for i in range(20_000))[:200_000]
    memory_id = await add(client, content)
    assert (await query(client, content))[0]["id"] == memory_id


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "query"),
        ({"query": 1}, "query"),
        ({"query": "x" * 200_001}, "query"),
        ({"query": "x", "k": 0}, "k"),
        ({"query": "x", "k": 101}, "k"),
        ({"query": "x", "k": "8"}, "k"),
        ({"query": "x", "k": True}, "k"),
        ({"query": "x", "k": 1.5}, "k"),
        ({"query": "x", "filters": []}, "filters"),
        ({"query": "x", "filters": {"tags": "a"}}, "filters.tags"),
        ({"query": "x", "filters": {"user_id": 1}}, "filters.user_id"),
    ],
)
async def test_an_invalid_query_names_its_field(refused, body, field):
    reply = await refused.post("/memory/query", json=body)
    assert (reply.status_code, reply.json()["error"]) == (400, "invalid_input")
    assert [detail["field"] for detail in reply.json()["details"]] == [field]


async def test_the_list_is_newest_first_and_paged(client):
    ids = [await add(client, f"memory {i}") for i in range(7)][::-1]

    async def page(params: str) -> list[str]:
        reply = await client.get(f"/memory/all{params}")
        assert reply.status_code == 200, reply.text
        return [item["id"] for item in reply.json()["items"]]

    assert await page("") == ids
    assert await page("?l=3") == ids[:3]
    assert await page("?l=3&u=3") == ids[3:6]
    assert await page("?l=1000&u=6") == ids[6:]
    assert await page("?u=7") == []

    (newest,) = (await client.get("/memory/all?l=1")).json()["items"]
    assert newest == (await client.get(f"/memory/{ids[0]}")).json()


@pytest.mark.parametrize("params", ["l=0", "l=1001", "l=x", "l=-1", "u=-1", "u=1e3", "u=" + "9" * 30])
async def test_a_bad_page_is_invalid_input(refused, params):
    reply = await refused.get(f"/memory/all?{params}")
    assert (reply.status_code, reply.json()["error"]) == (400, "invalid_input")
    assert reply.json()["details"][0]["field"] == params[0]


async def test_a_deleted_memory_is_gone_everywhere(client):
    memory_id = await add(client, "Renew the lease.")
    assert (await client.delete(f"/memory/{memory_id}")).json() == {"ok": True}
    assert await query(client, "lease") == []
    assert (await client.get("/memory/all")).json() == {"items": []}
    for reply in (await client.get(f"/memory/{memory_id}"), await client.delete(f"/memory/{memory_id}")):
        assert (reply.status_code, reply.json()) == (404, {"error": "not_found"})


@pytest.mark.parametrize(
    "memory_id", [UNKNOWN, "7", "a%00b", f"{{{UNKNOWN}}}", UNKNOWN.replace("-", ""), "x" * 3000]
)
async def test_an_unknown_or_malformed_id_is_not_found(refused, memory_id):
    for method in ("GET", "DELETE"):
        reply = await refused.request(method, f"/memory/{memory_id}")
        assert (reply.status_code, reply.json()) == (404, {"error": "not_found"})
