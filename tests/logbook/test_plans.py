"""What is run all the time uses its index, however large the tables are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import Connection

from engram.logbook import memories, outbox
from engram.postgres.pool import connect
from engram.postgres.query import Query

FILL = """
INSERT INTO logbook.outbox_memory (target_space, payload_sha, payload_md, status, next_attempt_at)
SELECT 'team:a', encode(sha256(convert_to('fact' || n, 'UTF8')), 'hex'), 'fact ' || n,
       CASE WHEN n %% 10 < %(settled)s THEN 'sent' ELSE 'pending' END, now() - n * interval '1 second'
FROM generate_series(%(first)s::int, %(last)s::int) n
"""
WAYS = ["not-analysed", "analysed", "settled-then-a-burst"]


def nodes(plan: dict) -> Iterator[dict]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def filled(connection: Connection, settled: int, way: str) -> None:
    """20,000 rows, and what the planner knows of them: nothing, all, or how it was before most came.

    Pages cost what they do on somebody else's server, as it comes.
    """
    connection.execute("SET random_page_cost = 4")
    connection.execute("ALTER TABLE logbook.outbox_memory SET (autovacuum_enabled = false)")
    if way == "settled-then-a-burst":
        connection.execute(FILL, {"settled": 10, "first": 20001, "last": 40000})
        connection.execute("ANALYZE logbook.outbox_memory")
    connection.execute(FILL, {"settled": settled, "first": 1, "last": 20000})
    if way == "analysed":
        connection.execute("ANALYZE logbook.outbox_memory")


def explained(connection: Connection, query: Query[Any], how: str = "FORMAT JSON") -> list[dict]:
    statement = f"EXPLAIN ({how}) {query.statement.text}".encode()
    found = connection.execute(statement, query.params).fetchone()
    assert found is not None
    return list(nodes(found["QUERY PLAN"][0]["Plan"]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settled", [0, 9], ids=["all-pending", "mostly-settled"])
@pytest.mark.parametrize("limit", [10, 500])
def test_a_claim_uses_the_index_of_due_rows_in_order(dsn: str, way: str, settled: int, limit: int) -> None:
    with connect(dsn) as connection:
        filled(connection, settled, way)
        plan = explained(connection, outbox.claim_outbox.query("w1", limit, 60))
    assert [node["Node Type"] for node in plan if node.get("Index Name") == "outbox_due"] == ["Index Scan"]
    assert {node["Node Type"] for node in plan} & {"Sort", "Incremental Sort", "Seq Scan"} == set()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settle", ["ack_many", "fail_many", "dead_many", "release_many", "renew_many"])
def test_a_settle_reads_its_own_rows_and_no_others(dsn: str, way: str, settle: str) -> None:
    made: dict[str, Callable[[int, int], Any]] = {
        "ack_many": lambda i, token: outbox.Sent(i, token, f"m{i}"),
        "fail_many": lambda i, token: outbox.Failed(i, token, "no", delay=1.0),
        "dead_many": lambda i, token: outbox.Dead(i, token, "no"),
        "release_many": lambda i, token: outbox.Released(i, token),
        "renew_many": lambda i, token: (i, token),
    }
    with connect(dsn) as connection:
        filled(connection, 0, way)
        claim = outbox.claim_outbox.query("w1", 500, 60)
        claimed = connection.execute(claim.statement.text.encode(), claim.params).fetchall()
        asked = [made[settle](row["outbox_id"], row["lease_token"]) for row in claimed]
        plan = explained(connection, getattr(outbox, settle).query("w1", asked), "ANALYZE, FORMAT JSON")
    assert len(claimed) == 500
    assert max(passed_by(node) for node in plan) <= 1000


def passed_by(node: dict) -> float:
    """How many rows a step looked at, all its rounds together."""
    dropped = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    return (node["Actual Rows"] + dropped) * node["Actual Loops"]


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
        plan = explained(connection, query, "ANALYZE, FORMAT JSON")
    assert "memories_parked_words" in {node.get("Index Name") for node in plan}
    assert max(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in plan) < 100
