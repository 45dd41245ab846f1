"""The worker's flow: what it does with each answer, what counts as a try, and when it claims nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from psycopg.conninfo import make_conninfo

from engram.assembly.parts import open_client
from engram.gateway import outbox_worker
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.outbox_worker import OutboxWorker, calculate_backoff_with_jitter, new_worker_id
from engram.kernel import metrics
from engram.kernel.content import payload_sha
from engram.kernel.errors import DatabaseTimeout, DatabaseUnavailable
from engram.logbook import kv, memories, outbox
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import async_pool, connect
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


def pass_time(dsn: str, minutes: int) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET next_attempt_at = next_attempt_at - make_interval(mins => %(m)s),"
            " locked_at = locked_at - make_interval(mins => %(m)s)",
            {"m": minutes},
        )


def alerts(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = (record.getMessage() for record in caplog.records)
    return [event.removeprefix("alert.") for event in said if event.startswith("alert.")]


def wait_long(client: OpenMemoryClient) -> None:
    """However slow this machine is today, no call times out."""
    client._http.timeout = client._timeout = 60.0


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


class Watched:
    """The database, with a word in between: `before` and `after` are called with a statement's name."""

    def __init__(self, db: AsyncExecutor, before=lambda name: None, after=lambda name, answer: None) -> None:
        self.statements: list[str] = []
        self._db, self._before, self._after = db, before, after

    async def run(self, query):
        name = query.statement.name
        self.statements.append(name)
        self._before(name)
        try:
            answer = await self._db.run(query)
        except Exception as error:
            self._after(name, error)
            raise
        self._after(name, answer)
        return answer


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


async def test_retries_run_out(worker: OutboxWorker, db, backend, dsn, caplog) -> None:
    await parked(db, "one")
    backend.faults.fail(*[Order(Fault.STATUS, 500)] * 5)
    for _ in range(5):
        await worker.run_once()
        make_due(dsn)
    (row,) = rows(dsn)
    assert (row["status"], row["retry_count"]) == ("dead", 4)
    assert audits(dsn)[-1] == ("reject", "outbox_flush_dead")
    assert alerts(caplog) == ["outbox_dead"]


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_refused_content_is_dead_at_once_and_raises_an_alert(
    worker: OutboxWorker, db, backend, dsn, caplog, status: int
) -> None:
    await parked(db, "one", "two")
    backend.faults.fail(Order(Fault.STATUS, status, {"error": "no good", "content": "two, quoted"}))
    buried = metrics.OUTBOX_DEAD._value.get()
    counts = await worker.run_once()
    assert (counts.dead, counts.sent) == (1, 1)
    assert sorted(r["status"] for r in rows(dsn)) == ["dead", "sent"]
    (dead,) = [r for r in rows(dsn) if r["status"] == "dead"]
    assert f"answered {status}" in dead["last_error"]
    assert "no good" in dead["last_error"]
    assert metrics.OUTBOX_DEAD._value.get() == buried + 1
    assert alerts(caplog) == ["outbox_dead"]
    (alert,) = [r for r in caplog.records if r.getMessage() == "alert.outbox_dead"]
    told = alert.fields  # type: ignore[attr-defined]
    assert (told["outbox_id"], told["reason"]) == (dead["outbox_id"], "refused")
    assert told["next"] == f"engram outbox show {dead['outbox_id']}"
    assert "quoted" not in str(told), "what the server says may quote the memory"


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


SILENCE = [
    Order(Fault.STATUS, 502),
    Order(Fault.STATUS, 503),
    pytest.param(Order(Fault.HANG), marks=pytest.mark.impatient),
    Order(Fault.DROP),
]


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


@pytest.mark.parametrize("where", ["body", "header"])
async def test_retry_after_is_waited_out_by_the_row_and_by_the_worker(
    worker: OutboxWorker, db, backend, dsn, where: str
) -> None:
    await parked(db, "one")
    order = Order(Fault.STATUS, 429, {"retry_after": 30})
    if where == "header":
        order = Order(Fault.STATUS, 429, {"error": "slow down"}, headers={"retry-after": "30"})
    backend.faults.fail(order)
    await worker.run_once()
    (row,) = rows(dsn)
    assert timedelta(seconds=30) <= row["next_attempt_at"] - row["updated_at"] < timedelta(seconds=31)
    await parked(db, "two")
    asked = len(backend.faults.calls)
    assert (await worker.run_once()).claimed == 0, "the server wants to be left alone"
    assert len(backend.faults.calls) == asked
    worker._paused_until = 0.0
    pass_time(dsn, minutes=1)
    assert (await worker.run_once()).sent == 2


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


@pytest.mark.parametrize("noticed", ["before-a-claim", "in-a-call"])
async def test_a_rotated_key_kills_no_row_and_raises_one_alert(
    worker: OutboxWorker, db, backend, client, dsn, caplog, noticed: str
) -> None:
    """/health is public: only an authenticated read tells that the key is wrong."""
    if noticed == "in-a-call":
        await parked(db, "when the key was right")
        assert (await worker.run_once()).sent == 1
    await parked(db, *[f"fact {n}" for n in range(5)])
    good = client._http.headers["x-api-key"]
    client._http.headers["x-api-key"] = "rotated"
    for _ in range(10):
        assert (await worker.run_once()).sent == 0
        await asyncio.sleep(0.01)
    assert alerts(caplog) == ["openmemory_unauthorized"]
    client._http.headers["x-api-key"] = good
    assert await eventually_sent(worker) == 5
    assert {(r["status"], r["retry_count"]) for r in rows(dsn)} == {("sent", 0)}
    client._http.headers["x-api-key"] = "rotated again"
    await parked(db, "one more")
    await worker.run_once()
    assert alerts(caplog) == ["openmemory_unauthorized"] * 2, "it had been well in between"


async def test_a_key_that_may_only_read_raises_one_alert(
    worker: OutboxWorker, db, backend, dsn, caplog
) -> None:
    """The probe is answered, the add is refused, every time."""
    await parked(db, "one")
    backend.faults.fail(*[Order(Fault.STATUS, 403)] * 50)
    async with asyncio.timeout(10):
        while backend.faults.calls.count("POST /memory/add") < 3:
            await worker.run_once()
            await asyncio.sleep(0.01)
    assert alerts(caplog) == ["openmemory_unauthorized"]
    assert [(r["status"], r["retry_count"]) for r in rows(dsn)] == [("pending", 0)]


async def test_a_wrong_address_kills_no_row_and_raises_one_alert(
    worker: OutboxWorker, db, backend, client, dsn, caplog
) -> None:
    await parked(db, "one")
    client._http.base_url = f"{backend.url}/elsewhere"
    for _ in range(5):
        assert (await worker.run_once()).sent == 0
    assert alerts(caplog) == ["openmemory_wrong_url"]
    client._http.base_url = backend.url
    assert await eventually_sent(worker) == 1


@pytest.mark.parametrize("how", ["no-connection", "503-from-everything", "hangs"])
async def test_two_hours_of_outage_kill_no_row_and_count_no_try(
    worker: OutboxWorker, db, backend, client, dsn, how: str
) -> None:
    await parked(db, "before the outage")
    assert (await worker.run_once()).sent == 1
    await parked(db, *[f"fact {n}" for n in range(10)])
    worker._call_seconds = client._timeout = 0.05
    if how == "no-connection":
        client._http.base_url = "http://127.0.0.1:9"
    else:
        order = Order(Fault.STATUS, 503) if how == "503-from-everything" else Order(Fault.HANG)
        backend.faults.fail(*[order] * 1000, path="*")
    for _ in range(24):
        await worker.run_once()
        pass_time(dsn, minutes=5)
    waiting = rows(dsn)[1:]
    assert {(r["status"], r["retry_count"], r["locked_by"]) for r in waiting} == {("pending", 0, None)}
    assert not [a for a in audits(dsn) if a[0] in ("retry", "reject")]
    backend.faults.reset()
    client._http.base_url = backend.url
    worker._call_seconds = client._timeout = 5.0
    pass_time(dsn, minutes=5)
    assert await eventually_sent(worker) == 10
    assert sorted(backend.contents()) == sorted(["before the outage", *(f"fact {n}" for n in range(10))])


@pytest.mark.parametrize(
    "fault",
    [pytest.param(Fault.AFTER_HANG, marks=pytest.mark.impatient), Fault.AFTER_DROP, Fault.AFTER_500],
)
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
    with connect(dsn) as connection:
        found = connection.execute("SELECT evidence_refs_json AS refs FROM governance.write_audit").fetchone()
    assert found is not None
    assert found["refs"]["outbox_id"] == rows(dsn)[0]["outbox_id"]
    assert found["refs"]["extra"] == {"status": "pending", "locked_by": "thief", "worker_id": "w1"}


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


async def test_a_call_never_outlives_half_its_lease_nor_a_probe_the_rest(db, client, settings) -> None:
    short = replace(settings, outbox_lease_seconds=4, openmemory_timeout_seconds=60)
    assert OutboxWorker(db, client, short)._call_seconds == 2
    assert OutboxWorker(db, client, short)._probe_seconds == 1


async def test_a_probe_that_hangs_is_given_up(worker: OutboxWorker, db, backend, client) -> None:
    await parked(db, "one")
    wait_long(client)
    worker._probe_seconds = 0.05
    backend.faults.fail(Fault.HANG, path="/memory/all")
    assert not (await worker.run_once()).probed
    assert (await worker.run_once()).sent == 1


async def test_a_stop_does_not_wait_for_a_probe(worker: OutboxWorker, db, backend, client) -> None:
    wait_long(client)
    worker._probe_seconds = 30.0
    backend.faults.fail(Fault.WAIT, path="/memory/all")
    running = asyncio.create_task(worker.run_once())
    await until(lambda: "GET /memory/all" in backend.faults.calls)
    worker._stop.set()
    async with asyncio.timeout(5):
        assert (await running).claimed == 0
    backend.faults.let_go.set()


async def test_a_row_that_is_handed_back_does_not_keep_the_others_from_being_delivered(
    worker: OutboxWorker, db, backend, dsn
) -> None:
    await parked(db, "waits")
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.memories SET state = 'intent', audit_id = 1, intent_at = now(), intent_seconds = 3600"
        )
    await db.run(outbox.enqueue_many.query([(f"fact {n}", SPACE) for n in range(40)]))
    counts = await worker.drain()
    assert (counts.sent, counts.handed_back) == (40, 1)
    assert "waits" not in backend.contents()


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


async def test_a_batch_costs_three_statements(worker: OutboxWorker, db) -> None:
    await parked(db, *[f"fact {n}" for n in range(10)])
    worker._db = watched = Watched(db)
    assert (await worker.run_once()).sent == 10
    assert watched.statements == ["outbox.claim", "outbox.renew_many", "outbox.ack_many"]


async def test_a_memory_forgotten_after_the_claim_is_not_sent(worker: OutboxWorker, db, backend, dsn) -> None:
    await parked(db, "one", "two")

    def forget(name: str, answer: object) -> None:
        if name == "outbox.claim":
            with connect(dsn) as connection:
                query = memories.forget.query(1, "ada")
                connection.execute(query.statement.text.encode(), query.params)

    worker._db = Watched(db, after=forget)
    counts = await worker.run_once()
    assert (counts.sent, counts.handed_back) == (1, 1)
    assert backend.contents() == ["two"]
    forgotten = rows(dsn)[0]
    assert forgotten["forgotten_at"] is not None
    assert (forgotten["status"], forgotten["locked_by"], forgotten["retry_count"]) == ("pending", None, 0)
    worker._db = db
    assert (await worker.run_once()).claimed == 0


async def test_a_hundred_rows_and_one_that_the_server_will_never_take(
    worker: OutboxWorker, db, backend, dsn, caplog
) -> None:
    poison = "x" * 200_001
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO logbook.outbox_memory (target_space, payload_sha, payload_md) VALUES (%s, %s, %s)",
            [SPACE, payload_sha(poison), poison],
        )
        connection.execute(
            "INSERT INTO logbook.memories (target_space, payload_sha, payload_md, state, outbox_id)"
            " SELECT target_space, payload_sha, payload_md, 'parked', outbox_id FROM logbook.outbox_memory"
        )
    await db.run(outbox.enqueue_many.query([(f"fact {n}", SPACE) for n in range(99)]))
    counts = await worker.drain()
    assert (counts.claimed, counts.sent, counts.dead, counts.handed_back) == (100, 99, 1, 0)
    assert sorted(backend.contents()) == sorted(f"fact {n}" for n in range(99))
    assert [r["status"] for r in rows(dsn)] == ["dead"] + ["sent"] * 99
    assert alerts(caplog) == ["outbox_dead"]


async def test_lanes_share_the_slots(worker: OutboxWorker, db, backend, client) -> None:
    """While a batch is being called, the next are claimed; and no more calls are made for that."""
    rows = 10 * outbox_worker.LANES
    await db.run(outbox.enqueue_many.query([(f"fact {n}", SPACE) for n in range(rows)]))
    worker._db = watched = Watched(db)
    wait_long(client)
    worker._call_seconds = 30.0
    backend.faults.fail(*[Fault.WAIT] * rows)
    draining = asyncio.create_task(worker.drain())
    await until(lambda: watched.statements.count("outbox.renew_many") == outbox_worker.LANES)
    await until(lambda: backend.faults.calls.count("POST /memory/add") == 10)
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert backend.faults.calls.count("POST /memory/add") == 10
    backend.faults.let_go.set()
    counts = await draining
    assert (counts.claimed, counts.sent) == (rows, rows)
    assert len(backend.contents()) == rows


async def test_a_row_that_waited_long_for_its_slot_renews_before_it_is_sent(
    db, backend, settings, dsn
) -> None:
    """Its call would not fit into what is left of half the lease."""
    short = replace(settings, outbox_batch_size=1, outbox_lease_seconds=4, openmemory_timeout_seconds=30.0)
    async with open_client(short) as client:
        worker = OutboxWorker(db, client, short, worker_id="w1")
        await parked(db, "one", "two")
        worker._db = watched = Watched(db)
        backend.faults.fail(Fault.HANG)
        first, second = await asyncio.gather(worker.run_once(), worker.run_once())
    assert (first.sent + second.sent, first.retried + second.retried) == (1, 1)
    assert watched.statements.count("outbox.renew_many") == 3
    assert sorted(r["status"] for r in rows(dsn)) == ["pending", "sent"]


def locked_out(dsn: str) -> str:
    """Waits for a lock end soon, as they all do in the end."""
    return make_conninfo(dsn, options="-c lock_timeout=100")


async def test_a_row_that_the_database_times_out_on_is_handed_back_and_audited(
    worker: OutboxWorker, backend, dsn
) -> None:
    """Somebody has locked one row of the batch: it alone goes back, and no try is counted."""
    async with async_pool(locked_out(dsn)) as pool:
        db = AsyncExecutor(pool)
        await parked(db, "one", "two", "three")
        failed_alone = 0
        with connect(dsn) as other:

            def lock(name: str, answer: object) -> None:
                nonlocal failed_alone
                if name == "outbox.claim":
                    other.execute("BEGIN")
                    other.execute("SELECT FROM logbook.outbox_memory WHERE payload_md = 'one' FOR UPDATE")
                elif name == "outbox.renew_many" and isinstance(answer, DatabaseTimeout):
                    failed_alone += 1
                elif name == "outbox.release_many" and isinstance(answer, DatabaseTimeout):
                    other.execute("ROLLBACK")

            worker._db = Watched(db, after=lock)
            counts = await worker.run_once()
    assert failed_alone == 2, "with the others, and by itself"
    assert (counts.claimed, counts.sent, counts.handed_back, counts.conflicts) == (3, 2, 1, 0)
    assert sorted(backend.contents()) == ["three", "two"]
    row = rows(dsn)[0]
    assert (row["status"], row["retry_count"], row["locked_by"]) == ("pending", 0, None)
    assert ("retry", "outbox_flush_db_timeout") in audits(dsn)
    assert len(audits(dsn)) == 3


async def test_a_database_that_was_away_before_the_call_hands_the_rows_back_with_an_audit(
    worker: OutboxWorker, db, backend, dsn
) -> None:
    await parked(db, "one", "two")
    failures = iter([DatabaseUnavailable("gone")])

    def blink(name: str) -> None:
        if name == "outbox.renew_many" and (failure := next(failures, None)):
            raise failure

    worker._db = Watched(db, before=blink)
    counts = await worker.run_once()
    assert (counts.handed_back, counts.sent) == (2, 0)
    assert backend.contents() == []
    assert audits(dsn) == [("retry", "outbox_flush_db_error")] * 2
    assert {(r["status"], r["retry_count"], r["locked_by"]) for r in rows(dsn)} == {("pending", 0, None)}
    assert (await worker.run_once()).sent == 2


async def test_a_row_that_cannot_be_settled_does_not_hold_up_the_others(
    worker: OutboxWorker, db, backend, dsn
) -> None:
    """The server answers an id that no index of ours can take."""
    await parked(db, "one", "two", "three")
    backend.faults.fail(Order(Fault.STATUS, 200, {"id": secrets.token_hex(20_000)}))
    counts = await worker.run_once()
    assert (counts.sent, counts.handed_back) == (2, 1)
    (row,) = [r for r in rows(dsn) if r["status"] == "pending"]
    assert (row["retry_count"], row["locked_by"], row["ambiguous"]) == (0, None, True)
    assert row["next_attempt_at"] - row["updated_at"] >= timedelta(seconds=84)
    assert sorted(audits(dsn)) == [("allow", "outbox_flush_success")] * 2 + [
        ("retry", "outbox_flush_db_error")
    ]
    make_due(dsn)
    assert (await worker.run_once()).sent == 1
    assert sorted(backend.contents()) == ["one", "three", "two"]


async def test_a_delivered_row_that_is_locked_is_settled_when_it_can_be_and_the_others_at_once(
    worker: OutboxWorker, backend, dsn
) -> None:
    async with async_pool(locked_out(dsn)) as pool:
        db = AsyncExecutor(pool)
        await parked(db, "one", "two", "three")
        with connect(dsn) as other:
            settled = 0

            def lock(name: str) -> None:
                if name == "outbox.ack_many" and not settled and other.info.transaction_status.name == "IDLE":
                    other.execute("BEGIN")
                    other.execute("SELECT FROM logbook.outbox_memory WHERE payload_md = 'one' FOR UPDATE")

            def unlock(name: str, answer: object) -> None:
                nonlocal settled
                if name == "outbox.ack_many" and isinstance(answer, set):
                    settled += len(answer)
                    if settled == 2:
                        other.execute("ROLLBACK")

            worker._db = Watched(db, before=lock, after=unlock)
            counts = await worker.run_once()
    assert (counts.sent, counts.conflicts) == (3, 0)
    assert audits(dsn) == [("allow", "outbox_flush_success")] * 3


@pytest.fixture
def stop(worker: OutboxWorker, client: OpenMemoryClient) -> asyncio.Event:
    wait_long(client)
    worker._call_seconds = 30.0
    return worker._stop


async def test_a_stop_gives_calls_in_hand_a_moment_and_settles_them(
    worker: OutboxWorker, db, backend, dsn, stop
) -> None:
    await parked(db, "one", "two")
    backend.faults.fail(Fault.WAIT, Fault.WAIT)
    running = asyncio.create_task(worker.run_once())
    await until(lambda: backend.faults.calls.count("POST /memory/add") == 2)
    stop.set()
    backend.faults.let_go.set()
    assert (await running).sent == 2
    assert {r["status"] for r in rows(dsn)} == {"sent"}
    await parked(db, "three")
    assert (await worker.run_once()).claimed == 0, "nothing new is claimed"


async def test_a_stop_hands_back_what_was_not_answered_in_time(
    worker: OutboxWorker, db, backend, dsn, stop, monkeypatch
) -> None:
    monkeypatch.setattr(outbox_worker, "GRACE_SECONDS", 0.05)
    await parked(db, "one", "two")
    backend.faults.fail(Fault.WAIT, Fault.AFTER_HANG)
    running = asyncio.create_task(worker.run_once())
    await until(lambda: backend.faults.calls.count("POST /memory/add") == 2)
    stop.set()
    counts = await running
    assert (counts.handed_back, counts.conflicts) == (2, 0)
    for row in rows(dsn):
        assert (row["status"], row["retry_count"], row["locked_by"]) == ("pending", 0, None)
        assert row["ambiguous"], "the server may have it"
        assert row["next_attempt_at"] - row["updated_at"] >= timedelta(seconds=30)
    assert audits(dsn) == []


async def test_a_stop_hands_back_rows_that_were_not_sent_as_if_nothing_had_been(
    db, client, backend, settings, dsn, monkeypatch
) -> None:
    monkeypatch.setattr(outbox_worker, "GRACE_SECONDS", 0.05)
    narrow = replace(settings, outbox_batch_size=1, openmemory_timeout_seconds=30.0)
    wait_long(client)
    worker = OutboxWorker(db, client, narrow, worker_id="w1")
    worker._db = watched = Watched(db)
    await parked(db, "one", "two")
    backend.faults.fail(Fault.WAIT, Fault.WAIT)
    draining = asyncio.create_task(worker.drain())
    await until(lambda: watched.statements.count("outbox.renew_many") == 2)
    await until(lambda: backend.faults.calls.count("POST /memory/add") == 1)
    worker._stop.set()
    assert (await draining).handed_back == 2
    assert sorted((r["ambiguous"], r["retry_count"], r["locked_by"]) for r in rows(dsn)) == [
        (False, 0, None),
        (True, 0, None),
    ]
    untouched = next(r for r in rows(dsn) if not r["ambiguous"])
    assert untouched["next_attempt_at"] <= untouched["updated_at"], "it is due at once"
    assert backend.faults.calls.count("POST /memory/add") == 1


async def test_a_slot_that_becomes_free_after_a_stop_is_not_used(db, client, backend, settings, dsn) -> None:
    narrow = replace(settings, outbox_batch_size=1, openmemory_timeout_seconds=30.0)
    wait_long(client)
    worker = OutboxWorker(db, client, narrow, worker_id="w1")
    worker._db = watched = Watched(db)
    await parked(db, "one", "two")
    backend.faults.fail(Fault.WAIT)
    draining = asyncio.create_task(worker.drain())
    await until(lambda: watched.statements.count("outbox.renew_many") == 2)
    await until(lambda: backend.faults.calls.count("POST /memory/add") == 1)
    worker._stop.set()
    backend.faults.let_go.set()
    counts = await draining
    assert (counts.sent, counts.handed_back) == (1, 1)
    assert len(backend.contents()) == 1


async def test_a_heartbeat_says_who_is_alive_and_old_ones_go(worker: OutboxWorker, db, dsn) -> None:
    await parked(db, "one")
    await worker.run_once()
    await db.run(kv.put_value.query("worker.heartbeat", "outbox:long-gone", {}))
    await db.run(kv.put_value.query("worker.heartbeat", "outbox:just-gone", {}))
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.kv SET updated_at = now() - interval '25 hours' WHERE key = 'outbox:long-gone'"
        )
    await worker.beat()
    await worker.beat()
    found = await db.run(kv.list_values.query("worker.heartbeat"))
    assert [row["key"] for row in found] == ["outbox:just-gone", "outbox:w1"]
    value = found[1]["value_json"]
    assert value["counts"]["sent"] == 1
    assert set(value) == {"at", "pid", "host", "counts"}


async def test_what_waits_can_be_seen_from_outside(worker: OutboxWorker, db, dsn) -> None:
    await parked(db, "one", "two", "three")
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET created_at = now() - interval '1 hour'")
        connection.execute("UPDATE logbook.outbox_memory SET forgotten_at = now() WHERE payload_md = 'three'")
    await worker.measure()
    assert metrics.OUTBOX_PENDING._value.get() == 2
    assert 3600 <= metrics.OUTBOX_OLDEST_SECONDS._value.get() < 3700
