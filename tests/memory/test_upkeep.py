"""The index over vectors: built when it pays, rebuilt when outgrown, and never in the way of a right answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engram.memory import store
from engram.memory.arrays import Reals
from engram.memory.connections import memory_pool
from engram.memory.requests import Filters, Search
from engram.memory.search import HybridSearch
from engram.memory.upkeep import Upkeep, lists_for
from engram.memory.vectors import Vectors
from engram.postgres import AsyncExecutor
from engram.search.embeddings import LocalEmbedder

pytestmark = pytest.mark.anyio

FROM = 400


@pytest.fixture
def dsn(fresh_dsn: str) -> str:
    return fresh_dsn


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[AsyncExecutor]:
    async with memory_pool(dsn) as pool:
        yield AsyncExecutor(pool)


@pytest.fixture
async def vectors(db: AsyncExecutor) -> AsyncIterator[Vectors]:
    vectors = Vectors(db, LocalEmbedder())
    assert await vectors.run_once() == 1
    yield vectors
    await vectors.embedder.shut()


@pytest.fixture
def upkeep(dsn: str, db: AsyncExecutor, vectors: Vectors) -> Upkeep:
    return Upkeep(dsn, db, vectors, index_from=FROM)


async def filled(
    db: AsyncExecutor, vectors: Vectors, count: int, tenant: str = "default", *tags: str
) -> None:
    """So many memories about a car, each a little different."""
    texts = [f"car {n} and its engine, wheel {n * 7}" for n in range(count)]
    rows = await vectors.embedder.embed(texts)
    for start in range(0, count, 100):
        await asyncio.gather(
            *(
                db.run(store.add(tenant, text, tags, {}, vector=Reals(row)))
                for text, row in zip(texts[start : start + 100], rows[start : start + 100], strict=True)
            )
        )


def indexes(sql) -> list[tuple[str, bool]]:
    found = sql(
        "SELECT relname, indisvalid FROM pg_index JOIN pg_class ON oid = indexrelid"
        " WHERE relname LIKE 'memories_near_%%' ORDER BY 1"
    )
    return [(row["relname"], row["indisvalid"]) for row in found]


async def nearest(db, vectors, text: str, tags: list[str], limit: int, tenant: str = "default") -> list[Any]:
    vector = await vectors.of(text)
    return await db.run(store.nearest(tenant, vector, 0.2, Filters(tags=tags), limit))


async def test_a_small_table_has_no_index_and_a_larger_one_gets_it(db, vectors, upkeep, sql):
    await filled(db, vectors, FROM)
    await upkeep.run_once()
    assert indexes(sql) == [], "nothing is known of the table before it is analysed"
    sql("ANALYZE memories")
    await upkeep.run_once()
    assert indexes(sql) == [(f"memories_near_{lists_for(FROM)}", True)]
    await upkeep.run_once()
    assert indexes(sql) == [(f"memories_near_{lists_for(FROM)}", True)]


async def test_below_the_limit_nothing_is_built(db, vectors, upkeep, sql):
    await filled(db, vectors, FROM - 1)
    sql("ANALYZE memories")
    await upkeep.run_once()
    assert indexes(sql) == []


async def test_an_outgrown_index_is_replaced(db, vectors, upkeep, sql):
    await filled(db, vectors, FROM)
    sql("ANALYZE memories")
    await upkeep.run_once()
    sql("UPDATE pg_class SET reltuples = %s WHERE oid = 'memories'::regclass", 4 * FROM - 100)
    await upkeep.run_once()
    assert indexes(sql) == [(f"memories_near_{lists_for(FROM)}", True)], "not yet"
    sql("UPDATE pg_class SET reltuples = %s WHERE oid = 'memories'::regclass", 5 * FROM)
    await upkeep.run_once()
    assert indexes(sql) == [(f"memories_near_{lists_for(5 * FROM)}", True)]


async def test_what_a_dead_builder_left_half_done_is_built_anew(db, vectors, upkeep, sql):
    await filled(db, vectors, FROM)
    sql("ANALYZE memories")
    await upkeep.run_once()
    name = indexes(sql)[0][0]
    sql("UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s::regclass", name)
    await upkeep.run_once()
    assert indexes(sql) == [(name, True)]


async def test_one_that_was_replaced_but_not_removed_is_removed(db, vectors, upkeep, sql):
    await filled(db, vectors, FROM)
    sql("ANALYZE memories")
    await upkeep.run_once()
    sql(
        "CREATE INDEX memories_near_3 ON memories USING ivfflat (embedding halfvec_cosine_ops) WITH (lists = 3)"
    )
    await upkeep.run_once()
    assert indexes(sql) == [(f"memories_near_{lists_for(FROM)}", True)]


async def test_of_two_at_once_one_builds(dsn, db, vectors, sql):
    await filled(db, vectors, FROM)
    sql("ANALYZE memories")
    await asyncio.gather(*(Upkeep(dsn, db, vectors, index_from=FROM).run_once() for _ in range(3)))
    assert indexes(sql) == [(f"memories_near_{lists_for(FROM)}", True)]


async def test_through_the_index_a_rare_tag_still_gets_all_its_matches(db, vectors, upkeep, sql):
    """The 20 of the rare tag are among the farthest: the scan has to go on to the end."""
    await filled(db, vectors, 1500, "default", "space:big")
    await filled(db, vectors, 300, "somebody", "space:small")
    texts = [f"The doctor has {n} patients and a car." for n in range(20)]
    for text in texts:
        await db.run(store.add("default", text, ["space:small"], {}, vector=await vectors.of(text)))
    sql("ANALYZE memories")
    await upkeep.run_once()
    assert indexes(sql)
    async with db.pool.connection() as connection:
        for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
            await connection.execute(f"SET {setting} = off".encode())
        query = store.nearest("default", await vectors.of("car"), 0.0, Filters(tags=["space:small"]), 50)
        plan = await connection.execute(b"EXPLAIN " + query.statement.text.encode(), query.params)
        assert "memories_near_" in str(await plan.fetchall())
        found = await connection.execute(query.statement.text, query.params)
        assert len(await found.fetchall()) == 20
        for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
            await connection.execute(f"RESET {setting}".encode())


async def test_with_the_index_most_of_the_nearest_are_found(db, vectors, upkeep, sql):
    await filled(db, vectors, 1500)
    exact = {row["id"] for row in await nearest(db, vectors, "car 700", [], 20)}
    sql("ANALYZE memories")
    await upkeep.run_once()
    found = {row["id"] for row in await nearest(db, vectors, "car 700", [], 20)}
    assert len(found) == 20
    assert len(found & exact) >= 14


async def test_a_build_that_fails_is_told_and_tried_again(db, vectors, upkeep, sql, caplog):
    await filled(db, vectors, FROM)
    sql("ANALYZE memories")
    sql("CREATE TABLE memories_near_25 ()")
    await upkeep.run_once()
    assert "memory.index_failed" in caplog.messages
    sql("DROP TABLE memories_near_25")
    await upkeep.run_once()
    assert indexes(sql) == [("memories_near_25", True)]


async def test_how_common_words_and_tags_are_is_known_after_analyze(db, vectors, upkeep, sql):
    await upkeep.run_once()
    assert upkeep.frequencies.rows is None
    await filled(db, vectors, 200, "default", "space:a", "x")
    await filled(db, vectors, 50, "default", "space:b")
    sql("ANALYZE memories")
    await upkeep.run_once()
    known = upkeep.frequencies
    assert known.rows == 250
    assert known.words["car"] == 1.0
    assert known.tags["space:a"] == known.tags["x"] == 0.8
    assert known.passing(["space:b"]) == pytest.approx(0.2)


async def test_words_that_are_common_elsewhere_still_find_what_a_filter_leaves(db, vectors, upkeep, sql):
    """Both words are common, and the one that is looked up first is not among what the filter lets through."""
    for start in range(0, 600, 100):
        some = range(start, start + 100)
        await asyncio.gather(*(db.run(store.add("t", f"alpha beta {n}", [], {})) for n in some))
    await asyncio.gather(*(db.run(store.add("t", f"beta {n}", [], {"kind": "RULE"})) for n in range(12)))
    sql("ANALYZE memories")
    await upkeep.run_once()
    asked = Search("alpha beta", 10, Filters(metadata={"kind": "RULE"}))
    assert len(await HybridSearch(db, vectors, upkeep).by_words("t", asked)) >= 10
