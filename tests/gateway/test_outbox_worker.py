"""The worker's flow: what it does with each answer, what counts as a try, and when it claims nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from engram.gateway.outbox_worker import OutboxWorker, calculate_backoff_with_jitter, new_worker_id
from engram.kernel.content import payload_sha
from engram.kernel.errors import DatabaseUnavailable
from engram.logbook import outbox
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio

SPACE = "private:ada"


async def parked(db: AsyncExecutor, *texts: str) -> list[int]:
    return [await db.run(outbox.enqueue_memory.query(text, SPACE)) for text in texts]


def rows(dsn: str) -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute("SELECT * FROM logbook.outbox_memory ORDER BY outbox_id").fetchall()


def audits(dsn: str) -> list[tuple[str, str]]:
    with connect(dsn) as connection:
        found = connection.execute(
            "SELECT action, reason FROM governance.write_audit ORDER BY audit_id"
        ).fetchall()
    return [(row["action"], row["reason"]) for row in found]


def make_due(dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET next_attempt_at = now()")


async def eventually_sent(worker: OutboxWorker) -> int:
    """Once the breaker has cooled down, a probe finds the server well again."""
    async with asyncio.timeout(5):
        while not (counts := await worker.run_once()).claimed:
            await asyncio.sleep(0.01)
    return counts.sent


@pytest.mark.parametrize(
    ("retry", "low", "high"),
    [
        (1, 84, 156),
        (2, 168, 312),
        (3, 336, 624),
        (4, 672, 1248),
        (5, 1344, 2496),
        (6, 2520, 4680),
        (60, 2520, 4680),
    ],
)
def test_the_back_off_of_the_specification(retry: int, low: int, high: int) -> None:
    drawn = [calculate_backoff_with_jitter(retry, 60, 3600, 0.3) for _ in range(500)]
    assert low <= min(drawn) < max(drawn) <= high


def test_worker_ids_are_never_the_same_twice() -> None:
    assert len({new_worker_id() for _ in range(100)}) == 100


async def test_parked_memories_are_delivered_with_space_hash_and_metadata(
    worker: OutboxWorker, db, backend, dsn
) -> None:
    await parked(db, "one", "two")
    counts = await worker.run_once()
    assert (counts.claimed, counts.sent) == (2, 2)
    assert [r["status"] for r in rows(dsn)] == ["sent", "sent"]
    assert audits(dsn) == [("allow", "outbox_flush_success")] * 2
    assert sorted(backend.contents()) == ["one", "two"]
    assert all(f"space:{SPACE}" in kept["tags"] for kept in backend.kept())
    assert (await worker.run_once()).claimed == 0


async def test_a_failure_of_the_server_is_a_try_with_back_off(worker: OutboxWorker, db, backend, dsn) -> None:
    await parked(db, "one")
    backend.faults.fail(Order(Fault.STATUS, 500))
    counts = await worker.run_once()
    assert (counts.claimed, counts.retried) == (1, 1)
    (row,) = rows(dsn)
    assert (row["status"], row["retry_count"], row["locked_by"]) == ("pending", 1, None)
    wait = row["next_attempt_at"] - row["updated_at"]
    assert timedelta(seconds=84) <= wait <= timedelta(seconds=156)
    assert audits(dsn) == [("retry", "outbox_flush_retry")]


async def test_retries_run_out(worker: OutboxWorker, db, backend, dsn) -> None:
    await parked(db, "one")
    backend.faults.fail(*[Order(Fault.STATUS, 500)] * 5)
    for _ in range(5):
        await worker.run_once()
        make_due(dsn)
    (row,) = rows(dsn)
    assert (row["status"], row["retry_count"]) == ("dead", 4)
    assert audits(dsn)[-1] == ("reject", "outbox_flush_dead")


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_refused_content_is_dead_at_once(worker: OutboxWorker, db, backend, dsn, status: int) -> None:
    await parked(db, "one", "two")
    backend.faults.fail(Order(Fault.STATUS, status))
    counts = await worker.run_once()
    assert (counts.dead, counts.sent) == (1, 1)
    assert sorted(r["status"] for r in rows(dsn)) == ["dead", "sent"]


ABOUT_US = [
    Order(Fault.STATUS, 401),
    Order(Fault.STATUS, 403),
    Order(Fault.STATUS, 404),
    Order(Fault.STATUS, 405),
    Order(Fault.STATUS, 301, headers={"location": "http://127.0.0.1:9/"}),
    Order(Fault.STATUS, 421),
    Order(Fault.STATUS, 429, {"retry_after": 30}),
]


@pytest.mark.parametrize("order", ABOUT_US, ids=lambda o: str(o.status))
async def test_a_refusal_of_us_is_not_a_try(worker: OutboxWorker, db, backend, dsn, order: Order) -> None:
    await parked(db, "one")
    backend.faults.fail(order)
    counts = await worker.run_once()
    assert (counts.claimed, counts.handed_back) == (1, 1)
    (row,) = rows(dsn)
    assert (row["status"], row["retry_count"], row["locked_by"]) == ("pending", 0, None)
    assert audits(dsn) == []


SILENCE = [Order(Fault.STATUS, 502), Order(Fault.STATUS, 503), Order(Fault.HANG), Order(Fault.DROP)]


@pytest.mark.parametrize("order", SILENCE, ids=lambda o: f"{o.fault.value}-{o.status}")
async def test_an_outage_is_not_a_try(worker: OutboxWorker, db, backend, dsn, order: Order) -> None:
    """The server fails the probe as well: it is down, whatever the row."""
    await parked(db, "one")
    backend.faults.fail(order)
    backend.faults.fail(Order(Fault.NONE), order, order, path="/memory/all")
    counts = await worker.run_once()
    assert (counts.claimed, counts.handed_back) == (1, 1)
    (row,) = rows(dsn)
    assert (row["status"], row["retry_count"]) == ("pending", 0)
    assert row["next_attempt_at"] > row["updated_at"], "it may still be applying the write"
    assert audits(dsn) == []


@pytest.mark.parametrize("order", SILENCE, ids=lambda o: f"{o.fault.value}-{o.status}")
async def test_a_server_that_fails_this_row_alone_meant_this_row(
    worker: OutboxWorker, db, backend, dsn, order
) -> None:
    await parked(db, "one")
    backend.faults.fail(order)
    counts = await worker.run_once()
    assert (counts.retried, counts.handed_back) == (1, 0)
    (row,) = rows(dsn)
    assert (row["status"], row["retry_count"], row["ambiguous"]) == ("pending", 1, True)
    assert row["next_attempt_at"] - row["updated_at"] >= timedelta(seconds=84)


@pytest.mark.parametrize("status", [402, 409, 418, 451])
async def test_an_answer_nobody_foresaw_is_tried_again(
    worker: OutboxWorker, db, backend, dsn, status: int
) -> None:
    await parked(db, "one")
    backend.faults.fail(Order(Fault.STATUS, status))
    assert (await worker.run_once()).retried == 1
    assert rows(dsn)[0]["status"] == "pending"


@pytest.mark.parametrize("answer", [{"id": "a\x00b"}, {"id": ""}, {"id": 7}, {}])
async def test_an_id_that_cannot_be_kept_does_not_hold_up_the_others(
    worker: OutboxWorker, db, backend, dsn, answer
) -> None:
    await parked(db, "one", "two", "three")
    backend.faults.fail(Order(Fault.STATUS, 200, answer))
    counts = await worker.run_once()
    assert (counts.sent, counts.retried) == (2, 1)


async def test_a_row_whose_content_is_being_written_waits_for_that(
    worker: OutboxWorker, db, backend, dsn
) -> None:
    """A script enqueues what a gateway is just sending: one of them delivers it."""
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO governance.write_audit (audit_id, target_space, action, status) VALUES (1, 'x', 'pending', 'pending')"
        )
        connection.execute(
            "INSERT INTO logbook.memories (target_space, payload_sha, payload_md, state, audit_id, intent_at, intent_seconds)"
            " VALUES (%s, %s, 'one', 'intent', 1, now(), 60)",
            [SPACE, payload_sha("one")],
        )
    await parked(db, "one")
    assert (await worker.run_once()).handed_back == 1
    assert backend.contents() == []


async def test_a_dead_row_remembers_that_it_may_have_arrived(
    worker: OutboxWorker, db, backend, dsn, settings
) -> None:
    await parked(db, "one")
    worker._settings = replace(settings, outbox_max_retries=1)
    backend.faults.fail(Fault.AFTER_500)
    assert (await worker.run_once()).dead == 1
    assert rows(dsn)[0]["ambiguous"]


async def test_a_database_that_blinks_does_not_cost_what_was_delivered(worker: OutboxWorker, db, dsn) -> None:
    await parked(db, "one")
    failures = iter([DatabaseUnavailable("gone"), DatabaseUnavailable("still gone")])

    class Blinking:
        async def run(self, query):
            if query.statement.name == "outbox.ack_many" and (failure := next(failures, None)):
                raise failure
            return await db.run(query)

    worker._db = Blinking()
    assert (await worker.run_once()).sent == 1
    assert rows(dsn)[0]["status"] == "sent"


async def test_retry_after_is_waited_out(worker: OutboxWorker, db, backend, dsn) -> None:
    await parked(db, "one")
    backend.faults.fail(Order(Fault.STATUS, 429, {"retry_after": 30}))
    await worker.run_once()
    (row,) = rows(dsn)
    assert timedelta(seconds=30) <= row["next_attempt_at"] - row["updated_at"] < timedelta(seconds=31)


async def test_nothing_is_claimed_while_the_server_is_down(
    worker: OutboxWorker, db, backend, client, dsn
) -> None:
    await parked(db, "one")
    client._http.base_url = "http://127.0.0.1:9"
    for _ in range(5):
        counts = await worker.run_once()
        assert (counts.probed, counts.claimed) == (False, 0)
    (row,) = rows(dsn)
    assert row["lease_token"] is None, "it was never leased"
    client._http.base_url = backend.url
    assert await eventually_sent(worker) == 1


async def test_a_rotated_key_kills_no_row(worker: OutboxWorker, db, backend, client, dsn) -> None:
    """/health is public: only an authenticated read tells that the key is wrong."""
    await parked(db, *[f"fact {n}" for n in range(5)])
    good = client._http.headers["x-api-key"]
    client._http.headers["x-api-key"] = "rotated"
    for _ in range(10):
        assert (await worker.run_once()).claimed == 0
    client._http.headers["x-api-key"] = good
    assert await eventually_sent(worker) == 5
    assert {r["retry_count"] for r in rows(dsn)} == {0}


@pytest.mark.parametrize("fault", [Fault.AFTER_HANG, Fault.AFTER_DROP, Fault.AFTER_500])
async def test_a_write_that_was_applied_before_it_failed_is_not_doubled(
    worker: OutboxWorker, db, backend, dsn, fault
) -> None:
    await parked(db, "one")
    backend.faults.fail(fault)
    await worker.run_once()
    assert backend.contents() == ["one"]
    (row,) = rows(dsn)
    assert row["ambiguous"]
    make_due(dsn)
    backend.faults.calls.clear()
    assert (await worker.run_once()).sent == 1
    assert backend.contents() == ["one"]
    assert "POST /memory/add" not in backend.faults.calls, "it was found, not added again"
    assert audits(dsn)[-1] == ("allow", "outbox_flush_dedup_hit")


async def test_content_that_another_write_brought_there_is_not_sent_again(
    worker: OutboxWorker, db, backend, dsn
) -> None:
    await parked(db, "one")
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.memories SET state = 'stored', memory_id = 'mem-7'")
    assert (await worker.run_once()).sent == 1
    assert backend.contents() == []
    assert rows(dsn)[0]["memory_id"] == "mem-7"
    assert audits(dsn) == [("allow", "outbox_flush_dedup_hit")]


async def test_a_lost_lease_is_a_conflict_and_makes_no_call(worker: OutboxWorker, db, backend, dsn) -> None:
    """The row is taken by another worker between claim and renewal."""
    await parked(db, "one")

    class Thief:
        """Runs every query, and steals the row right after it was claimed."""

        async def run(self, query):
            result = await db.run(query)
            if query.statement.name == "outbox.claim" and result:
                with connect(dsn) as connection:
                    connection.execute(
                        "UPDATE logbook.outbox_memory SET locked_by = 'thief',"
                        " lease_token = nextval('logbook.lease_token_seq')"
                    )
            return result

    worker._db = Thief()
    counts = await worker.run_once()
    assert (counts.claimed, counts.sent, counts.conflicts) == (1, 0, 1)
    assert backend.contents() == []
    assert audits(dsn) == [("conflict", "outbox_flush_conflict")]
    assert rows(dsn)[0]["locked_by"] == "thief"


async def test_a_settle_whose_answer_was_lost_is_recognised_as_our_own(worker: OutboxWorker, db, dsn) -> None:
    await parked(db, "one")

    class Forgetful:
        """The database settles, but says that it did not."""

        async def run(self, query):
            result = await db.run(query)
            return set() if query.statement.name == "outbox.ack_many" else result

    worker._db = Forgetful()
    counts = await worker.run_once()
    assert counts.conflicts == 0
    assert rows(dsn)[0]["status"] == "sent"
    assert audits(dsn) == [("allow", "outbox_flush_success")]


async def test_a_call_never_outlives_half_its_lease(db, client, settings) -> None:
    short = replace(settings, outbox_lease_seconds=4, openmemory_timeout_seconds=60)
    assert OutboxWorker(db, client, short)._call_seconds == 2


async def test_a_memory_the_server_swapped_for_a_similar_one_is_dead(
    worker: OutboxWorker, db, backend, dsn
) -> None:
    """`deduplicated` with somebody else's id: ours is not there."""
    await parked(db, "first")
    await worker.run_once()
    other = rows(dsn)[0]["memory_id"]
    await parked(db, "second")
    backend.faults.fail(Order(Fault.STATUS, 200, {"id": other, "deduplicated": True}))
    assert (await worker.run_once()).dead == 1
    assert "kept another memory" in rows(dsn)[1]["last_error"]
