"""The two commits of a store: what each leaves behind, and who wins when several finish one write."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from engram.kernel.content import payload_sha
from engram.logbook import outbox, writes
from engram.logbook.writes import Parked, Write
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect

pytestmark = pytest.mark.anyio

WRITE = Write(
    payload_md="Deploy on Tuesdays.",
    payload_sha=payload_sha("Deploy on Tuesdays."),
    requested_space="private:ada",
    target_space="private:ada",
    actor_user_id="ada",
    correlation_id="corr-0123456789abcdef",
    evidence_refs_json={"extra": {"correlation_id": "corr-0123456789abcdef"}},
    kind="FACT",
    meta_json={"source": "test"},
)


def park(audit_id: int, **kw):
    return writes.park(
        audit_id, reason="openmemory_write_failed:connection", error="refused", ambiguous=False, **kw
    )


def table(dsn: str, name: str) -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute(f"SELECT * FROM {name} ORDER BY 1".encode()).fetchall()


def age(dsn: str, seconds: float) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.memories SET intent_at = intent_at - make_interval(secs => %s)", [seconds]
        )


async def test_commit_one_leaves_a_pending_audit_and_the_whole_payload(db: AsyncExecutor, dsn: str) -> None:
    begun = await db.run(writes.begin(WRITE, deadline_seconds=8))
    assert begun.disposition == "fresh"
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["audit_id"], audit["action"], audit["status"]) == (begun.audit_id, "pending", "pending")
    assert (audit["actor_user_id"], audit["correlation_id"]) == ("ada", WRITE.correlation_id)
    (memory,) = table(dsn, "logbook.memories")
    assert (memory["state"], memory["payload_md"], memory["meta_json"]) == (
        "intent", WRITE.payload_md, {"source": "test"},
    )  # fmt: skip


async def test_finishing_makes_audit_and_memory_final_together(db: AsyncExecutor, dsn: str) -> None:
    begun = await db.run(writes.begin(WRITE, deadline_seconds=8))
    assert await db.run(writes.finish_stored(begun.audit_id, "mem-1"))
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["status"], audit["memory_id"]) == ("allow", "success", "mem-1")
    assert audit["finalized_at"] is not None
    (memory,) = table(dsn, "logbook.memories")
    assert (memory["state"], memory["memory_id"]) == ("stored", "mem-1")
    assert not await db.run(writes.finish_stored(begun.audit_id, "mem-2")), "a write is finished once"


async def test_parking_makes_row_audit_and_memory_agree(db: AsyncExecutor, dsn: str) -> None:
    begun = await db.run(writes.begin(WRITE, deadline_seconds=8))
    parked = await db.run(park(begun.audit_id))
    (audit,) = table(dsn, "governance.write_audit")
    (row,) = table(dsn, "logbook.outbox_memory")
    (memory,) = table(dsn, "logbook.memories")
    assert parked == Parked(row["outbox_id"], "pending", None, True)
    assert (audit["action"], audit["status"]) == ("redirect", "redirected")
    assert audit["reason"] == "openmemory_write_failed:connection"
    assert audit["evidence_refs_json"] == {
        "outbox_id": row["outbox_id"],
        "extra": {"correlation_id": WRITE.correlation_id},
    }
    assert (memory["state"], memory["outbox_id"]) == ("parked", row["outbox_id"])
    for column in ("payload_md", "payload_sha", "target_space", "kind", "meta_json", "actor_user_id",
                   "correlation_id"):  # fmt: skip
        assert row[column] == memory[column]


async def test_a_repeat_of_stored_content_is_allowed_with_its_memory(db: AsyncExecutor, dsn: str) -> None:
    first = await db.run(writes.begin(WRITE, deadline_seconds=8))
    await db.run(writes.finish_stored(first.audit_id, "mem-1"))
    again = await db.run(writes.begin(WRITE, deadline_seconds=8))
    assert (again.disposition, again.memory_id) == ("stored", "mem-1")
    audit = table(dsn, "governance.write_audit")[-1]
    assert (audit["action"], audit["status"], audit["memory_id"]) == ("allow", "success", "mem-1")
    assert len(table(dsn, "logbook.memories")) == 1


async def test_a_repeat_of_parked_content_is_told_its_outbox_row(db: AsyncExecutor, dsn: str) -> None:
    first = await db.run(writes.begin(WRITE, deadline_seconds=8))
    parked = await db.run(park(first.audit_id))
    assert parked is not None
    again = await db.run(writes.begin(WRITE, deadline_seconds=8))
    assert (again.disposition, again.outbox_id) == ("parked", parked.outbox_id)
    audit = table(dsn, "governance.write_audit")[-1]
    assert (audit["action"], audit["evidence_refs_json"]["outbox_id"]) == ("dedup", parked.outbox_id)
    assert len(table(dsn, "logbook.outbox_memory")) == 1


async def test_the_same_content_in_another_space_is_another_memory(db: AsyncExecutor) -> None:
    first = await db.run(writes.begin(WRITE, deadline_seconds=8))
    other = replace(WRITE, target_space="private:bob", actor_user_id="bob")
    second = await db.run(writes.begin(other, deadline_seconds=8))
    assert second.disposition == "fresh"
    assert second.memory_record_id != first.memory_record_id


async def test_a_twin_in_flight_gets_no_audit_until_the_outcome_is_known(db: AsyncExecutor, dsn: str) -> None:
    first = await db.run(writes.begin(WRITE, deadline_seconds=8))
    twin = await db.run(writes.begin(WRITE, deadline_seconds=8))
    assert (twin.disposition, twin.audit_id, twin.overdue) == ("in_flight", first.audit_id, False)
    assert len(table(dsn, "governance.write_audit")) == 1
    age(dsn, 9)
    assert (await db.run(writes.begin(WRITE, deadline_seconds=8))).overdue


async def test_content_whose_row_is_dead_is_tried_anew(db: AsyncExecutor, dsn: str) -> None:
    first = await db.run(writes.begin(WRITE, deadline_seconds=8))
    parked = await db.run(park(first.audit_id))
    assert parked is not None
    (claimed,) = await db.run(outbox.claim_outbox.query("w1", 1, 60))
    await db.run(outbox.dead_many.query("w1", [outbox.Dead(parked.outbox_id, claimed["lease_token"], "422")]))
    again = await db.run(writes.begin(WRITE, deadline_seconds=8))
    assert again.disposition == "fresh"
    assert again.memory_record_id == first.memory_record_id
    anew = await db.run(park(again.audit_id))
    assert anew is not None
    assert anew.fresh
    assert anew.outbox_id != parked.outbox_id
    assert [r["status"] for r in table(dsn, "logbook.outbox_memory")] == ["dead", "pending"]


async def test_parking_that_meets_a_waiting_row_is_a_repeat(db: AsyncExecutor, dsn: str) -> None:
    begun = await db.run(writes.begin(WRITE, deadline_seconds=8))
    bare = await db.run(outbox.enqueue_memory.query(WRITE.payload_md, WRITE.target_space))
    parked = await db.run(park(begun.audit_id))
    assert parked == Parked(bare, "pending", None, False)
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["status"]) == ("dedup", "success")
    (memory,) = table(dsn, "logbook.memories")
    assert (memory["state"], memory["outbox_id"]) == ("parked", bare)


async def test_parking_that_meets_a_sent_row_finds_the_memory_stored(db: AsyncExecutor, dsn: str) -> None:
    begun = await db.run(writes.begin(WRITE, deadline_seconds=8))
    bare = await db.run(outbox.enqueue_memory.query(WRITE.payload_md, WRITE.target_space))
    (claimed,) = await db.run(outbox.claim_outbox.query("w1", 1, 60))
    await db.run(outbox.ack_many.query("w1", [outbox.Sent(bare, claimed["lease_token"], "mem-1")]))
    parked = await db.run(park(begun.audit_id))
    assert parked == Parked(bare, "sent", "mem-1", False)
    (memory,) = table(dsn, "logbook.memories")
    assert (memory["state"], memory["memory_id"]) == ("stored", "mem-1")


async def test_an_abandoned_intent_is_parked_only_when_its_time_is_up(db: AsyncExecutor, dsn: str) -> None:
    begun = await db.run(writes.begin(WRITE, deadline_seconds=8))
    assert await db.run(writes.park_abandoned(begun.audit_id)) is None
    assert await db.run(writes.overdue(times=2, limit=10)) == []
    age(dsn, 9)
    assert await db.run(writes.overdue(times=2, limit=10)) == []
    age(dsn, 8)
    (found,) = await db.run(writes.overdue(times=2, limit=10))
    assert found["audit_id"] == begun.audit_id
    parked = await db.run(writes.park_abandoned(begun.audit_id))
    assert parked is not None
    (row,) = table(dsn, "logbook.outbox_memory")
    assert row["ambiguous"], "nobody knows what the memory server did"


async def test_of_a_gateway_and_a_reconciler_one_finishes_the_write(
    db: AsyncExecutor, dsn: str, scale: float
) -> None:
    outcomes: Counter[str] = Counter()
    for n in range(int(40 * scale)):
        text = f"fact {n}"
        begun = await db.run(
            writes.begin(
                replace(WRITE, payload_md=text, payload_sha=payload_sha(text)), deadline_seconds=0.001
            )
        )
        finished, parked = await asyncio.gather(
            db.run(writes.finish_stored(begun.audit_id, f"mem-{n}")),
            db.run(writes.park_abandoned(begun.audit_id)),
        )
        assert finished is not (parked is not None)
        row = await db.run(writes.outcome(begun.audit_id))
        assert row is not None
        assert (row["state"], row["action"]) == (("stored", "allow") if finished else ("parked", "redirect"))
        outcomes[row["state"]] += 1
    redirects = [a for a in table(dsn, "governance.write_audit") if a["action"] == "redirect"]
    assert len(redirects) == len(table(dsn, "logbook.outbox_memory")) == outcomes["parked"]


async def test_racing_begins_of_one_content_give_one_owner(db: AsyncExecutor, dsn: str, scale: float) -> None:
    for n in range(int(10 * scale)):
        text = f"fact {n}"
        write = replace(WRITE, payload_md=text, payload_sha=payload_sha(text))
        begun = await asyncio.gather(*(db.run(writes.begin(write, deadline_seconds=8)) for _ in range(16)))
        assert Counter(b.disposition for b in begun) == {"fresh": 1, "in_flight": 15}
        assert len({b.audit_id for b in begun}) == 1
    assert len(table(dsn, "governance.write_audit")) == int(10 * scale)
