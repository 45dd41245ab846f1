"""What is run all the time uses its index, however large the tables are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engram.logbook import memories, outbox
from engram.postgres.pool import connect

FILL = """
INSERT INTO logbook.outbox_memory (target_space, payload_sha, payload_md, status, next_attempt_at)
SELECT 'team:a', encode(sha256(convert_to('fact' || n, 'UTF8')), 'hex'), 'fact ' || n,
       CASE WHEN n %% 10 < %(settled)s THEN 'sent' ELSE 'pending' END, now() - n * interval '1 second'
FROM generate_series(1, 20000) n
"""


def nodes(plan: dict) -> Iterator[dict]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@pytest.mark.parametrize("analysed", [False, True], ids=["not-analysed", "analysed"])
@pytest.mark.parametrize("settled", [0, 9], ids=["all-pending", "mostly-settled"])
def test_a_claim_uses_the_index_of_due_rows_in_order(dsn: str, analysed: bool, settled: int) -> None:
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE logbook.outbox_memory SET (autovacuum_enabled = false)")
        connection.execute(FILL, {"settled": settled})
        if analysed:
            connection.execute("ANALYZE logbook.outbox_memory")
        query = outbox.claim_outbox.query("w1", 10, 60)
        found = connection.execute(
            f"EXPLAIN (FORMAT JSON) {query.statement.text}".encode(), query.params
        ).fetchone()
    assert found is not None
    plan = list(nodes(found["QUERY PLAN"][0]["Plan"]))
    assert "outbox_due" in {node.get("Index Name") for node in plan}
    assert {node["Node Type"] for node in plan} & {
        "Sort",
        "Incremental Sort",
        "Seq Scan",
        "Bitmap Heap Scan",
    } == set()


STORED = """
INSERT INTO logbook.memories (target_space, payload_sha, payload_md, state, memory_id, words)
SELECT 'team:a', encode(sha256(convert_to('fact' || n, 'UTF8')), 'hex'), 'fact ' || n, 'stored', 'm' || n,
       '''webhook'':1'::tsvector
FROM generate_series(1, 20000) n
"""


@pytest.mark.parametrize("analysed", [False, True], ids=["not-analysed", "analysed"])
def test_a_search_of_parked_memories_does_not_pass_by_the_stored_ones(dsn: str, analysed: bool) -> None:
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE logbook.memories SET (autovacuum_enabled = false)")
        connection.execute(STORED.encode())
        if analysed:
            connection.execute("ANALYZE logbook.memories")
        query = memories.search_unasked.query("webhook", ["team:a"], 10)
        found = connection.execute(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {query.statement.text}".encode(), query.params
        ).fetchone()
    assert found is not None
    plan = list(nodes(found["QUERY PLAN"][0]["Plan"]))
    assert "memories_parked_words" in {node.get("Index Name") for node in plan}
    assert max(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in plan) < 100
