"""Vectors that are late, refused, of another model or not to be had: nothing is lost, nothing waits."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engram.kernel.errors import EmbeddingFailed
from engram.memory.vectors import BATCH
from engram.postgres.pool import connect
from engram.search.embeddings import LocalEmbedder
from memory.conftest import Server, connecting_to
from memory.embedding_service import KEY, EmbeddingService, running

pytestmark = pytest.mark.anyio

CAR = "We take the car to the mechanic every spring."
INSERT = """
INSERT INTO memories (tenant, space, content_sha, content, tags, metadata, words)
SELECT 'default', '', encode(sha256(n::text::bytea), 'hex'), 'The car number ' || n, '{}', '{}', ''
FROM generate_series(1, %s) AS n"""


@pytest.fixture
def dsn(fresh_dsn: str) -> str:
    """A database of the test's own: which model there is, is told by its schema."""
    return fresh_dsn


@pytest.fixture
def service():
    with running() as service:
        yield service


async def add(client, content: str, **more: Any) -> str:
    reply = await client.post("/memory/add", json={"content": content, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def found(client, text: str, **more: Any) -> list[str]:
    reply = await client.post("/memory/query", json={"query": text, **more})
    assert reply.status_code == 200, reply.text
    return [match["id"] for match in reply.json()["matches"]]


async def health(client) -> dict[str, Any]:
    return (await client.get("/health")).json()


def waiting(sql) -> int:
    return sql("SELECT count(*) AS n FROM memories WHERE to_embed")[0]["n"]


async def test_health_says_that_vectors_are_there(client):
    told = await health(client)
    assert (told["ok"], told["vectors"]) == (True, "ready")
    assert "words_only_because" not in told


async def test_without_pgvector_it_goes_by_words_and_says_so(postgres, dsn, in_process, caplog):
    name = dsn.rpartition("dbname=")[2].strip("'")
    with connect(postgres.dsn("postgres")) as admin:
        admin.execute(f"ALTER DATABASE {name} SET extension_control_path = '/nowhere'".encode())
    with caplog.at_level(logging.WARNING):
        async with in_process() as client:
            told = await health(client)
            assert (told["ok"], told["vectors"]) == (True, "off")
            assert told["words_only_because"] == "this PostgreSQL has no pgvector"
            memory_id = await add(client, CAR)
            assert await found(client, "mechanics") == [memory_id]
            assert await found(client, "automobile") == []
            changed = await client.patch(f"/memory/{memory_id}", json={"content": "The bike is new."})
            assert changed.status_code == 200
            assert await found(client, "bikes") == [memory_id]
            (match,) = (await client.post("/memory/query", json={"query": "bike"})).json()["matches"]
            assert match["score"] == 1.0
    assert "memory.words_only" in caplog.messages


async def test_a_role_that_may_not_create_the_extension_is_told(dsn, sql):
    sql("CREATE ROLE modest LOGIN")
    sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO modest")
    sql("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO modest")
    try:
        async with connecting_to(dsn.replace("user='engram'", "user='modest'"))() as client:
            told = await health(client)
            assert told["vectors"] == "off"
            assert told["words_only_because"] == "this role may not run CREATE EXTENSION vector"
            await add(client, CAR)
            assert len(await found(client, "mechanic")) == 1
    finally:
        sql("DROP OWNED BY modest")
        sql("DROP ROLE modest")


async def test_once_pgvector_is_there_what_was_stored_without_it_gets_its_vector(
    postgres, dsn, sql, in_process, until
):
    name = dsn.rpartition("dbname=")[2].strip("'")
    with connect(postgres.dsn("postgres")) as admin:
        admin.execute(f"ALTER DATABASE {name} SET extension_control_path = '/nowhere'".encode())
        async with in_process() as client:
            memory_id = await add(client, CAR)
        admin.execute(f"ALTER DATABASE {name} RESET extension_control_path".encode())
    async with in_process() as client:
        await until(lambda: _nothing_waits(sql))
        assert await found(client, "automobile") == [memory_id]


async def _nothing_waits(sql) -> bool:
    return waiting(sql) == 0


async def test_a_service_is_asked_in_openais_way(service: EmbeddingService, in_process, sql):
    async with in_process(embedder=service.embedder()) as client:
        memory_id = await add(client, "The doctor is in.")
        assert await found(client, "physician") == [memory_id]
    assert service.calls == [["The doctor is in."], ["physician"]]
    assert service.keys == {f"Bearer {KEY}"}
    assert sql("SELECT model, dimensions FROM embedding_model") == [{"model": "stand-in", "dimensions": 256}]


async def test_adds_that_come_at_once_share_a_call(service: EmbeddingService, in_process, sql, until):
    async with in_process(embedder=service.embedder()) as client:
        service.let_go.clear()

        async def asked() -> bool:
            return len(service.calls) == 1

        first = asyncio.create_task(add(client, "number 0"))
        await until(asked)
        others = [asyncio.create_task(add(client, f"number {n}")) for n in range(1, 21)]
        for _ in range(50):
            await asyncio.sleep(0)
        service.let_go.set()
        await asyncio.gather(first, *others)
    assert [len(call) for call in service.calls] == [1, 20]
    assert waiting(sql) == 0


async def test_while_the_service_is_down_everything_goes_by_words_and_later_catches_up(
    service: EmbeddingService, in_process, sql, until, caplog
):
    async with in_process(embedder=service.embedder()) as client:
        service.down = True
        with caplog.at_level(logging.WARNING):
            ids = [await add(client, f"The doctor is in, {n}.") for n in range(5)]
            assert set(await found(client, "doctor")) == set(ids)
            assert await found(client, "physician") == []
        assert (await health(client))["vectors"] == "resting"
        assert waiting(sql) == 5
        assert caplog.messages.count("memory.vectors_resting") == 1, "once for an outage"
        assert KEY not in caplog.text
        service.down = False
        # The background task looks again by itself; a new memory without a vector makes it look now.
        await add(client, "Wake up.")
        await until(lambda: _nothing_waits(sql))
        assert (await health(client))["vectors"] == "ready"
        assert set(await found(client, "physician")) == set(ids)


async def test_changed_content_is_not_found_by_what_it_meant_before(
    service: EmbeddingService, in_process, sql
):
    async with in_process(embedder=service.embedder()) as client:
        memory_id = await add(client, "The doctor is in.")
        assert await found(client, "physician") == [memory_id]
        service.down = True
        reply = await client.patch(f"/memory/{memory_id}", json={"content": "Coffee is out."})
        assert reply.status_code == 200
        assert sql("SELECT embedding IS NULL AS none FROM memories") == [{"none": True}]


async def test_a_service_that_hangs_keeps_nobody_waiting(service: EmbeddingService, in_process, sql):
    async with in_process(embedder=service.embedder()) as client:
        service.let_go.clear()
        async with asyncio.timeout(5):
            await add(client, CAR)
            await add(client, "And another.")
        assert waiting(sql) == 2
        service.let_go.set()


async def test_a_service_that_is_down_at_the_start_delays_nothing(
    service: EmbeddingService, in_process, sql, until
):
    service.down = True
    async with in_process(embedder=service.embedder()) as client:
        assert (await health(client))["vectors"] == "resting"
        memory_id = await add(client, "The doctor is in.")
        assert await found(client, "doctor") == [memory_id]
        service.down = False
        await add(client, "Wake up.")

        async def ready() -> bool:
            return (await health(client))["vectors"] == "ready" and waiting(sql) == 0

        await until(ready)
        assert await found(client, "physician") == [memory_id]


async def test_a_text_that_is_refused_does_not_keep_the_others_from_theirs(
    service: EmbeddingService, in_process, sql, until, caplog
):
    service.refuses = "unspeakable"
    sql(INSERT, 5)
    sql("UPDATE memories SET content = 'unspeakable' WHERE content = 'The car number 3'")
    with caplog.at_level(logging.WARNING):
        async with in_process(embedder=service.embedder()) as client:
            await until(lambda: _nothing_waits(sql))
            assert len(await found(client, "automobile", k=10)) == 4
            bad = await add(client, "unspeakable things of a doctor")
            good = await add(client, "A doctor.")
            await until(lambda: _nothing_waits(sql))
            assert await found(client, "physician") == [good]
            assert bad in await found(client, "unspeakable")
            assert (await health(client))["vectors"] == "ready"
    assert caplog.messages.count("memory.no_vector") == 2


async def test_another_model_means_new_vectors_for_everything(
    service: EmbeddingService, in_process, sql, until
):
    async with in_process(embedder=service.embedder("one")) as client:
        memory_id = await add(client, "The doctor is in.")
    service.dimensions = 320
    async with in_process(embedder=service.embedder("two")) as client:
        await until(lambda: _nothing_waits(sql))
        assert await found(client, "physician") == [memory_id]
    assert sql("SELECT model, dimensions FROM embedding_model") == [{"model": "two", "dimensions": 320}]
    assert sql("SELECT vector_dims(embedding) AS n FROM memories") == [{"n": 320}]


async def test_a_model_that_changes_under_the_server_is_begun_anew(
    service: EmbeddingService, in_process, sql, until
):
    async with in_process(embedder=service.embedder()) as client:
        first = await add(client, "The doctor is in.")
        service.dimensions = 320
        second = await add(client, "The doctor is out.")

        async def anew() -> bool:
            return (await health(client))["vectors"] == "ready" and waiting(sql) == 0

        await until(anew)
        assert set(await found(client, "physician")) == {first, second}
    assert sql("SELECT DISTINCT vector_dims(embedding) AS n FROM memories") == [{"n": 320}]


async def test_vectors_too_long_for_an_index_are_not_kept(service: EmbeddingService, in_process):
    service.dimensions = 4001
    async with in_process(embedder=service.embedder()) as client:
        told = await health(client)
        assert told["vectors"] == "off"
        assert "4001" in told["words_only_because"]
        await add(client, CAR)
        assert len(await found(client, "mechanic")) == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        [],
        {},
        {"data": 7},
        {"data": [{"index": 0, "embedding": "x"}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}] * 2},
        {"data": []},
    ],
)
async def test_nonsense_from_the_service_is_a_failure_that_may_pass(service: EmbeddingService, nonsense):
    embedder = service.embedder()
    service.nonsense = nonsense
    with pytest.raises(EmbeddingFailed) as failure:
        await embedder.embed(["one"])
    assert failure.value.retryable
    await embedder.shut()


async def test_a_service_that_is_not_there_is_a_failure_that_may_pass(service: EmbeddingService):
    embedder = service.embedder()
    embedder._url = "http://127.0.0.1:9/v1/embeddings"
    with pytest.raises(EmbeddingFailed, match="cannot be reached") as failure:
        await embedder.embed(["one"])
    assert failure.value.retryable
    await embedder.shut()


async def test_the_model_makes_one_row_for_each_text_whatever_their_lengths():
    embedder = LocalEmbedder()
    texts = ["a car", "word " * 3000, "租约", "automobile", "🎉", "a car"]
    rows = await embedder.embed(texts)
    assert rows.shape == (6, 256) == (6, await embedder.dimensions())
    assert all(abs(float(row @ row) - 1) < 1e-3 for row in rows)
    assert float(rows[0] @ rows[5]) > 0.999
    assert float(rows[0] @ rows[3]) > 0.4 > float(rows[0] @ rows[2])
    assert float((await embedder.embed([""]))[0].sum()) == 0.0
    await embedder.shut()


async def test_memories_from_before_get_their_vectors_in_the_background(in_process, sql, until, caplog):
    sql(INSERT, 3 * BATCH)
    with caplog.at_level(logging.INFO):
        async with in_process() as client:
            await until(lambda: _nothing_waits(sql))
            assert len(await found(client, "automobile", k=100)) == 100

            async def told() -> bool:
                return "memory.vectors_filled" in caplog.messages

            await until(told)
    filling = [r.fields for r in caplog.records if r.message == "memory.vectors_filling"]
    assert filling[0] == {"done": BATCH, "left": 2 * BATCH}


async def test_a_content_that_changes_while_its_vector_is_made_does_not_get_the_old_one(
    service: EmbeddingService, in_process, sql, until
):
    sql(INSERT, 1)
    service.let_go.clear()

    async def asked() -> bool:
        return bool(service.calls)

    async with in_process(embedder=service.embedder()) as client:
        await until(asked)
        (row,) = sql("SELECT id FROM memories")
        sql("UPDATE memories SET content = 'The doctor is in.', content_sha = repeat('a', 64)")
        service.let_go.set()
        await until(lambda: _nothing_waits(sql))
        assert await found(client, "automobile") == []
        assert await found(client, "physician") == [str(row["id"])]


@pytest.mark.crash
def test_filling_that_was_killed_half_way_goes_on(dsn, sql, eventually, tmp_path: Path):
    sql(INSERT, 4 * BATCH)
    server = Server(dsn, failpoint="vectors.after_fill:2", log=str(tmp_path / "server.log"))
    process = server.launch()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert waiting(sql) == 2 * BATCH
    done = {
        row["id"]: row["embedding"]
        for row in sql("SELECT id, embedding::text FROM memories WHERE NOT to_embed")
    }

    server.failpoint = ""
    server.start()
    eventually(lambda: waiting(sql) == 0)
    asked = {"query": "automobile", "k": 100}
    assert len(httpx2.post(f"{server.url}/memory/query", json=asked).json()["matches"]) == 100
    server.kill()
    kept = {row["id"]: row["embedding"] for row in sql("SELECT id, embedding::text FROM memories")}
    assert {key: kept[key] for key in done} == done, "what was done is not done again"
    lines = [
        json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines() if line[0] == "{"
    ]
    assert any(line["event"] == "memory.vectors_filling" for line in lines)
