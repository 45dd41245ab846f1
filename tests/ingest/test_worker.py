"""One task through the machine: every way it can end, on a real stream and real rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from engram.ingest import tasks
from engram.ingest.lifecycle import TASK
from engram.ingest.queue import Entry
from engram.ingest.sweeper import Sweeper
from engram.kernel.errors import (
    ConstraintViolated,
    DocumentRefused,
    EngramError,
    LeaseLost,
    RedisUnavailable,
)
from engram.kernel.metrics import REGISTRY

from .conftest import FakePipeline, Machine

pytestmark = pytest.mark.anyio


def counted(result: str) -> float:
    return REGISTRY.get_sample_value("ingest_task_process_total", {"result": result}) or 0.0


def failing(error: Exception):
    async def behave(work, lease):
        raise error

    return behave


async def test_a_task_succeeds_and_leaves_the_stream(machine: Machine) -> None:
    before = counted("succeeded")
    task_id = await machine.task()
    await machine.step()
    row = await machine.row(task_id)
    assert (row["status"], row["processed_segments"], row["total_segments"]) == ("SUCCEEDED", 3, 3)
    assert await machine.history(task_id) == [
        (None, "QUEUED", 0),
        ("QUEUED", "RUNNING", 0),
        ("RUNNING", "SUCCEEDED", 0),
    ]
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)
    assert counted("succeeded") == before + 1
    document = await machine.db.run(tasks.document("ann", row["document_id"]))
    assert document is not None
    assert (document["status"], document["segments"]) == ("READY", 3)


async def test_failures_are_retried_then_it_is_dead_with_one_dead_letter(machine: Machine) -> None:
    machine.pipeline.behave = failing(EngramError("the store is away"))
    task_id = await machine.task()
    for attempt in (1, 2):
        await machine.step()
        row = await machine.row(task_id)
        assert (row["status"], row["attempt_count"]) == ("RETRYING", attempt)
        assert row["last_error"] == row["error_message"] == "the store is away"
        assert await machine.queue.pending() == 1
    await machine.step()
    row = await machine.row(task_id)
    assert (row["status"], row["attempt_count"], row["next_retry_at"]) == ("DEAD", 3, None)
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)
    (letter,) = await machine.dead_letters()
    assert letter[b"taskId"].decode() == str(task_id)
    assert (letter[b"attemptCount"], letter[b"lastError"]) == (b"3", b"the store is away")
    assert all(TASK.allows(a, b) for a, b, _ in (await machine.history(task_id))[1:] if a)


async def test_without_a_dead_letter_stream_only_the_row_tells(machine: Machine) -> None:
    machine.queue.dlq = ""
    machine.pipeline.behave = failing(DocumentRefused("it is encrypted"))
    task_id = await machine.task()
    await machine.step()
    row = await machine.row(task_id)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("DEAD", 1, "it is encrypted")
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


async def test_a_defect_counts_one_attempt_and_tells_nothing_private(machine: Machine) -> None:
    machine.pipeline.behave = failing(KeyError("secret text of the document"))
    task_id = await machine.task()
    await machine.step()
    row = await machine.row(task_id)
    assert (row["status"], row["attempt_count"]) == ("RETRYING", 1)
    assert "secret" not in row["last_error"]


async def test_a_retry_waits_for_its_time_and_then_runs_without_the_stream(machine: Machine) -> None:
    patient = machine.another(ingest_base_backoff_ms=3_600_000, ingest_max_backoff_ms=7_200_000)
    patient.pipeline.behave = failing(EngramError("no"))
    task_id = await patient.task()
    await patient.step()
    row = await patient.row(task_id)
    assert 3590 < (row["next_retry_at"] - row["updated_at"]).total_seconds() < 3610
    await patient.step()
    assert (await patient.row(task_id))["attempt_count"] == 1
    # Late redelivery of the same entry: the row decides, not the stream.
    before = counted("not_due")
    _, entries = await patient.queue.claim_idle("somebody", 0, 10, "0-0")
    await patient.worker.serve(entries)
    assert counted("not_due") == before + 1
    assert await patient.queue.pending() == 1
    await machine.run_sql("UPDATE ingest.ingest_task SET next_retry_at = now() WHERE id = %s", task_id)
    machine.pipeline.behave = None
    await machine.step()
    assert (await machine.row(task_id))["status"] == "SUCCEEDED"
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


async def test_duplicates_run_once_and_are_taken_off(machine: Machine) -> None:
    task_id = await machine.task()
    await machine.queue.put([task_id, task_id])
    before = counted("skipped")
    await machine.step()
    await machine.step()
    assert machine.pipeline.seen == [task_id]
    assert counted("skipped") == before + 2
    # The row's own entry once more, when all is over.
    own = Entry((await machine.row(task_id))["stream_id"], task_id)
    await machine.worker.serve([own])
    await machine.settle()
    assert machine.pipeline.seen == [task_id]
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


async def test_an_entry_read_before_its_row_names_it_is_the_rows(machine: Machine) -> None:
    task_id = await machine.task(put=False)
    (entry,) = await machine.queue.put([task_id])
    await machine.step()
    assert (await machine.row(task_id))["status"] == "SUCCEEDED"
    # The upload comes late with its note: it changes nothing.
    assert await machine.db.run(tasks.put_on_stream([(task_id, "9-9")])) == []
    assert (await machine.row(task_id))["stream_id"] == entry


async def test_entries_that_are_not_ours_or_of_deleted_documents_go(machine: Machine) -> None:
    task_id = await machine.task()
    row = await machine.row(task_id)
    redis = await machine.queue._client()
    await redis.xadd(machine.queue.stream, {"taskId": "nonsense"})
    await redis.xadd(machine.queue.stream, {"hello": "world"})
    await machine.db.run(tasks.delete_document("ann", row["document_id"]))
    await machine.step()
    assert machine.pipeline.seen == []
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


async def test_a_lapsed_lease_is_a_failure_and_the_late_holder_settles_nothing(machine: Machine) -> None:
    gate = asyncio.Event()

    async def slow(work, lease):
        await gate.wait()
        return 1

    machine.pipeline.behave = slow
    task_id = await machine.task()
    await machine.worker.run_once()
    other = machine.another()
    assert await other.worker.count_lapsed() == 0
    await machine.lapse(task_id)
    assert await other.worker.count_lapsed() == 1
    row = await machine.row(task_id)
    assert (row["status"], row["attempt_count"]) == ("RETRYING", 1)
    assert "is gone" in row["last_error"]
    gate.set()
    await machine.settle()
    assert (await machine.row(task_id))["status"] == "RETRYING"
    machine.pipeline.behave = None
    await other.step()
    assert [(a, b) for a, b, _ in await machine.history(task_id)][-2:] == [
        ("RETRYING", "RUNNING"),
        ("RUNNING", "SUCCEEDED"),
    ]
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_nobody_settles_after_the_lease_or_for_another_holder(machine: Machine, fails: bool) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    works = []

    async def slow(work, lease):
        works.append(work)
        await gates[len(machine.pipeline.seen) - 1].wait()
        if fails:
            raise EngramError("late")
        return 1

    machine.pipeline.behave = slow
    task_id = await machine.task()
    await machine.worker.run_once()
    await asyncio.sleep(0)
    # Over, though nobody has noticed yet: the holder is too late.
    await machine.lapse(task_id)
    gates[0].set()
    await machine.settle()
    assert (await machine.row(task_id))["status"] == "RUNNING"
    other = machine.another()
    await other.worker.count_lapsed()
    await other.worker.run_once()
    second = await machine.row(task_id)
    assert (second["status"], second["attempt_count"]) == ("RUNNING", 1)
    # And while another holds it, the first one's token is worth nothing.
    first = second["lease_token"] - 1
    assert works[0].lease_token == first
    assert await machine.db.run(tasks.succeed([(works[0], 1)])) == []
    assert await machine.db.run(tasks.fail([tasks.Failure(task_id, first, "late", 0.0)], 3)) == []
    assert await machine.db.run(tasks.hand_back([(task_id, first)])) == []
    assert await machine.db.run(tasks.renew([(task_id, first)])) == []
    assert not await machine.db.run(tasks.progress(task_id, first, 1, 1))
    gates[1].set()
    await other.settle()
    expected = ("RETRYING", 2) if fails else ("SUCCEEDED", 1)
    row = await machine.row(task_id)
    assert (row["status"], row["attempt_count"]) == expected


async def test_a_document_that_kills_every_worker_ends_dead(machine: Machine) -> None:
    task_id = await machine.task()
    for attempt in (1, 2, 3):
        victim = machine.another()
        victim.pipeline = FakePipeline()
        entries = await machine.queue.take("victim", 1, 0.01)
        if entries:
            await machine.db.run(tasks.start("victim", [(task_id, entries[0].id)], 30.0))
        else:
            await machine.db.run(tasks.start_due("victim", 1, 30.0))
        await machine.lapse(task_id)
        await machine.worker.count_lapsed()
        assert (await machine.row(task_id))["attempt_count"] == attempt
    assert (await machine.row(task_id))["status"] == "DEAD"
    assert len(await machine.dead_letters()) == 1
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


async def test_a_task_longer_than_its_lease_is_not_run_twice_while_its_worker_lives(machine: Machine) -> None:
    short = machine.another(ingest_lease_seconds=60.0)
    gate = asyncio.Event()

    async def slow(work, lease):
        await gate.wait()
        return 1

    short.pipeline.behave = slow
    task_id = await short.task()
    await short.worker.run_once()
    other = machine.another(ingest_reclaim_idle_ms=0)
    other.worker._look_for_due_at = 0.0
    await short.reclaimer.beat()
    for _ in range(3):
        await short.worker.renew()
        await machine.run_sql(
            "UPDATE ingest.ingest_task SET locked_at = locked_at - interval '40 seconds' WHERE id = %s",
            task_id,
        )
        await other.worker.count_lapsed()
        await other.reclaimer.run_once()
    assert (await machine.row(task_id))["status"] == "RUNNING"
    gate.set()
    await short.settle()
    assert (await machine.row(task_id))["status"] == "SUCCEEDED"
    assert machine.pipeline.seen == [task_id]


async def test_a_worker_ends_a_run_whose_lease_it_lost(machine: Machine) -> None:
    ended = asyncio.Event()

    async def endless(work, lease):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    machine.pipeline.behave = endless
    task_id = await machine.task()
    await machine.worker.run_once()
    await asyncio.sleep(0)
    await machine.lapse(task_id)
    await machine.another().worker.count_lapsed()
    await machine.worker.renew()
    async with asyncio.timeout(5):
        await ended.wait()
    await machine.settle()
    assert (await machine.row(task_id))["attempt_count"] == 1


async def test_progress_after_the_lease_is_lost_raises(machine: Machine) -> None:
    lost: list[bool] = []

    async def behave(work, lease):
        await lease.progress(1, 9)
        await machine.lapse(work.task_id)
        await machine.another().worker.count_lapsed()
        with pytest.raises(LeaseLost):
            await lease.progress(2, 9)
        lost.append(True)
        raise LeaseLost("gone")

    machine.pipeline.behave = behave
    task_id = await machine.task()
    await machine.step()
    row = await machine.row(task_id)
    assert lost
    assert (row["status"], row["processed_segments"]) == ("RETRYING", 1)


async def test_asked_to_stop_it_hands_back_without_an_attempt(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.ingest.ingest_worker.GRACE_SECONDS", 0.05)
    begun = asyncio.Event()

    async def endless(work, lease):
        begun.set()
        await asyncio.Event().wait()

    machine.pipeline.behave = endless
    task_id = await machine.task()
    await machine.worker.run_once()
    await begun.wait()
    machine.stop.set()
    await machine.worker.finish()
    row = await machine.row(task_id)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("RETRYING", 0, None)
    assert await machine.queue.pending() == 1
    machine.pipeline.behave = None
    other = machine.another()
    await other.step()
    assert (await machine.row(task_id))["status"] == "SUCCEEDED"
    assert await machine.queue.pending() == 0


async def test_a_settled_task_whose_ack_was_lost_is_taken_off_later(machine: Machine) -> None:
    task_id = await machine.task()
    machine.pipeline.behave = failing(DocumentRefused("never"))
    (entry,) = await machine.queue.take("victim", 1, 0.01)
    await machine.worker.serve([entry])
    runs = [run.task for run in machine.worker._running.values()]
    await asyncio.wait(runs)
    await machine.worker._written(machine.worker._ended)  # and died before the ack
    assert (await machine.row(task_id))["status"] == "DEAD"
    assert await machine.queue.pending() == 1
    other = machine.another()
    await other.reclaimer.run_once()
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)
    assert len(await machine.dead_letters()) == 1
    assert "victim" not in {c.name for c in await machine.queue.consumers()}


async def test_the_reclaimer_serves_what_a_dead_consumer_read_and_leaves_the_living_alone(
    machine: Machine,
) -> None:
    dead, living = await machine.task(), await machine.task()
    await machine.queue.take("dead", 1, 0.01)
    alive = machine.another()
    await alive.reclaimer.beat()
    await machine.queue.take(alive.worker.worker_id, 1, 0.01)
    await machine.reclaimer.run_once()
    await machine.settle()
    assert (await machine.row(dead))["status"] == "SUCCEEDED"
    assert (await machine.row(living))["status"] == "QUEUED"
    names = {c.name for c in await machine.queue.consumers()}
    assert "dead" not in names
    assert alive.worker.worker_id in names
    # Idle for the configured time, it is served whoever has it.
    eager = machine.another(ingest_reclaim_idle_ms=0)
    await eager.reclaimer.run_once()
    await eager.settle()
    assert (await machine.row(living))["status"] == "SUCCEEDED"


async def test_a_consumer_with_something_pending_is_never_removed(machine: Machine) -> None:
    await machine.task()
    await machine.queue.take("busy", 1, 0.01)
    assert not await machine.queue.dismiss("busy")
    assert await machine.queue.pending() == 1


async def test_what_was_never_put_and_what_vanished_is_put_again(machine: Machine) -> None:
    sweeper = Sweeper(machine.db, machine.queue, "w")
    never, lost = await machine.task(put=False), await machine.task()
    redis = await machine.queue._client()
    await redis.delete(machine.queue.stream)
    assert await sweeper.rebuild() == 2
    assert await sweeper.rebuild() == 0
    await machine.step()
    assert {(await machine.row(t))["status"] for t in (never, lost)} == {"SUCCEEDED"}
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


async def test_a_redis_that_comes_back_empty_costs_a_running_task_nothing(machine: Machine) -> None:
    gate = asyncio.Event()

    async def slow(work, lease):
        await gate.wait()
        raise DocumentRefused("never")

    machine.pipeline.behave = slow
    task_id = await machine.task()
    await machine.worker.run_once()
    redis = await machine.queue._client()
    await redis.delete(machine.queue.stream)
    assert await Sweeper(machine.db, machine.queue).rebuild() == 1
    gate.set()
    await machine.settle()
    assert (await machine.row(task_id))["status"] == "DEAD"
    assert await machine.dead_letters() == []
    await machine.step()
    assert len(await machine.dead_letters()) == 1
    assert await machine.queue.length() == 0


async def test_what_a_lost_reply_had_is_taken_again_and_what_is_in_hand_is_not(machine: Machine) -> None:
    gate = asyncio.Event()

    async def slow(work, lease):
        await gate.wait()
        return 1

    machine.pipeline.behave = slow
    in_hand = await machine.task()
    await machine.worker.run_once()
    lost = [await machine.task() for _ in range(3)]
    reached = machine.queue._address
    async with losing_replies(reached() or "") as address:
        machine.queue._address, machine.queue._in_doubt = (lambda: address), True
        with pytest.raises(RedisUnavailable):
            await machine.worker.run_once()
    machine.queue._address = reached
    assert await machine.queue.pending() == 4, "Redis has given them out"
    gate.set()
    async with asyncio.timeout(20):
        while machine.queue._read_again is not None:
            await machine.step()
    assert sorted(machine.pipeline.seen) == sorted([in_hand, *lost]), "each once"
    assert (await machine.queue.length(), await machine.queue.pending()) == (0, 0)


@asynccontextmanager
async def losing_replies(address: str) -> AsyncIterator[str]:
    """In front of Redis: whatever names an entry that was read is not passed on, and the line is cut."""
    there = urlsplit(address)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(there.hostname, there.port)
        asks = asyncio.create_task(passed(reader, back_writer, None))
        await passed(back_reader, writer, b"taskId")
        asks.cancel()
        for each in (writer, back_writer):
            each.close()

    async def passed(source: asyncio.StreamReader, to: asyncio.StreamWriter, never: bytes | None) -> None:
        while (piece := await source.read(1 << 16)) and not (never and never in piece):
            to.write(piece)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield there._replace(netloc=f"{there.netloc.rpartition('@')[0]}@{host}:{port}".lstrip("@")).geturl()


async def test_it_runs_no_more_at_once_than_it_may(machine: Machine) -> None:
    few = machine.another(ingest_concurrency=2)
    gate, most = asyncio.Event(), 0

    async def slow(work, lease):
        nonlocal most
        most = max(most, len(few.worker._running))
        await gate.wait()
        return 1

    few.pipeline.behave = slow
    done = [await few.task() for _ in range(5)]
    await few.worker.run_once()
    await few.reclaimer.run_once()
    assert few.worker.room == 0
    gate.set()
    for _ in range(3):
        await few.settle()
        await few.step()
    assert most == 2
    assert {(await few.row(t))["status"] for t in done} == {"SUCCEEDED"}


async def test_retry_takes_dead_tasks_only_and_gives_all_attempts_back(machine: Machine) -> None:
    machine.pipeline.behave = failing(DocumentRefused("no"))
    task_id = await machine.task()
    assert await machine.db.run(tasks.retry("ann", task_id)) is None
    await machine.step()
    assert await machine.db.run(tasks.retry("bob", task_id)) is None
    assert await machine.db.run(tasks.retry("ann", task_id)) is not None
    row = await machine.row(task_id)
    assert (row["status"], row["attempt_count"], row["last_error"], row["stream_id"]) == (
        "QUEUED",
        0,
        None,
        None,
    )
    assert await Sweeper(machine.db, machine.queue).rebuild() == 1
    machine.pipeline.behave = None
    await machine.step()
    assert (await machine.row(task_id))["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    "broken",
    [
        "status = 'RUNNING'",
        "next_retry_at = now()",
        "status = 'DEAD'",
        "status = 'SUCCEEDED'",
        "status = 'LOST'",
        "last_error = 'x'",
        "attempt_count = -1",
        "locked_by = 'me', locked_at = now(), lease_seconds = 1, lease_token = 1",
    ],
)
async def test_the_schema_ties_columns_to_states(machine: Machine, broken: str) -> None:
    task_id = await machine.task(put=False)
    with pytest.raises(ConstraintViolated):
        await machine.run_sql(f"UPDATE ingest.ingest_task SET {broken} WHERE id = %s", task_id)
