"""Reconcile repairs what the contract allows, reports the rest, and never touches an outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engram.gateway.erasing import Eraser
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.reconcile_outbox import Findings, Reconciler
from engram.kernel.content import payload_sha
from engram.logbook import governance, outbox, repairs, writes
from engram.logbook.config import Config
from engram.logbook.writes import Write
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.backend import Backend

pytestmark = pytest.mark.anyio


@pytest.fixture
def reconciler(db: AsyncExecutor, client: OpenMemoryClient) -> Reconciler:
    return Reconciler(db, Eraser(db, client))


def run_sql(dsn: str, sql: str, *params: Any) -> list[dict[str, Any]]:
    with connect(dsn) as connection:
        done = connection.execute(sql.encode(), params)
        return done.fetchall() if done.description else []


def pass_the_grace(dsn: str) -> None:
    run_sql(
        dsn,
        "UPDATE logbook.outbox_memory SET created_at = created_at - interval '2 minutes',"
        " updated_at = updated_at - interval '2 minutes'",
    )


def audits(config: Config, **kw: Any) -> list[tuple[str, str | None]]:
    found = governance.query_write_audit(config=config, **kw)
    return sorted((row["action"], row["reason"]) for row in found)


def outcomes(dsn: str) -> list[dict[str, Any]]:
    """What reconcile must never change."""
    return run_sql(
        dsn,
        "SELECT outbox_id, status, retry_count, payload_md, payload_sha, target_space, memory_id"
        " FROM logbook.outbox_memory ORDER BY outbox_id",
    )


async def test_nothing_to_do_is_said_as_such(reconciler: Reconciler) -> None:
    found = await reconciler.run_whole(repair=True)
    assert (found.repaired, found.violated) == (0, False)
    assert len(found.invariants) >= 4


async def test_a_bare_row_gets_its_redirect_audit_once(
    reconciler: Reconciler, config: Config, dsn: str
) -> None:
    outbox_id = outbox.enqueue_memory("A fact.", "team:a", config=config)
    before = outcomes(dsn)
    assert (await reconciler.run_whole(repair=True)).missing_redirects == 0, "its script is about to write it"
    pass_the_grace(dsn)
    assert (await reconciler.run_whole(repair=False)).missing_redirects == 1
    assert audits(config) == [], "a report changes nothing"
    found = await reconciler.run_whole(repair=True)
    assert (found.missing_redirects, found.violated) == (1, False)
    assert audits(config) == [("redirect", "outbox_enqueued")]
    (audit,) = governance.query_write_audit(config=config)
    assert audit["evidence_refs_json"]["outbox_id"] == outbox_id
    assert (await reconciler.run_whole(repair=True)).repaired == 0
    assert outcomes(dsn) == before


async def test_rows_settled_by_the_bare_primitives_get_their_audits(
    reconciler: Reconciler, config: Config, dsn: str
) -> None:
    for text in ("sent", "dead", "deduplicated"):
        outbox.enqueue_memory(text, "team:a", config=config)
    rows = {row["payload_md"]: row for row in outbox.claim_outbox("w1", config=config)}
    assert outbox.ack_sent(rows["sent"]["outbox_id"], "w1", "mem-1", config)
    assert outbox.mark_dead_by_worker(rows["dead"]["outbox_id"], "w1", "refused", config)
    hit = rows["deduplicated"]
    outbox.ack_many(
        "w1",
        [outbox.Sent(hit["outbox_id"], hit["lease_token"], "mem-2", "outbox_flush_dedup_hit")],
        config,
    )
    before = outcomes(dsn)
    assert (await reconciler.run_whole(repair=True)).repaired == 0
    pass_the_grace(dsn)
    found = await reconciler.run_whole(repair=True)
    assert (found.missing_redirects, found.missing_audits) == (3, 2)
    assert audits(config) == [
        ("allow", "outbox_flush_dedup_hit"),
        ("allow", "outbox_flush_success"),
        ("redirect", "outbox_enqueued"),
        ("redirect", "outbox_enqueued"),
        ("redirect", "outbox_enqueued"),
        ("reject", "outbox_flush_dead"),
    ]
    assert not found.violated
    assert (await reconciler.run_whole(repair=True)).repaired == 0, "either flush reason satisfies a sent row"
    assert outcomes(dsn) == before


async def test_many_at_once_write_each_audit_once(db: AsyncExecutor, config: Config, dsn: str) -> None:
    outbox.enqueue_many([(f"fact {n}", "team:a") for n in range(40)], config)
    for row in outbox.claim_outbox("w1", 20, config=config):
        outbox.ack_sent(row["outbox_id"], "w1", f"mem-{row['outbox_id']}", config)
    pass_the_grace(dsn)
    found = await asyncio.gather(*(Reconciler(db).run_whole(repair=True) for _ in range(6)))
    assert sum(one.missing_redirects for one in found) == 40
    assert len(audits(config, action="redirect")) == 40
    pass_the_grace(dsn)
    await Reconciler(db).run_whole(repair=True)
    assert len(audits(config, reason="outbox_flush_success", limit=100)) == 20


async def test_a_row_is_repaired_as_it_was_seen_or_not_at_all(config: Config, dsn: str) -> None:
    outbox.enqueue_memory("A fact.", "team:a", config=config)
    pass_the_grace(dsn)
    seen = repairs.parked_without_audit(config=config)
    assert repairs.write_redirect_audits(seen, config)
    assert not repairs.write_redirect_audits(seen, config), "the other reconcile came first"


async def test_a_row_that_changed_after_the_look_is_left_to_the_next(config: Config, dsn: str) -> None:
    outbox_id = outbox.enqueue_memory("A fact.", "team:a", config=config)
    pass_the_grace(dsn)
    parked = repairs.parked_without_audit(config=config)
    outbox.claim_outbox("w1", config=config)
    assert not repairs.write_redirect_audits(parked, config)
    outbox.ack_sent(outbox_id, "w1", "m1", config=config)
    pass_the_grace(dsn)
    settled = repairs.settled_without_audit(config=config)
    assert [found for found, _ in settled] == [outbox_id]
    run_sql(dsn, "UPDATE logbook.outbox_memory SET updated_at = now()")
    assert not repairs.write_settled_audits(settled, config)
    assert governance.query_write_audit(config=config) == []


@pytest.mark.parametrize("reason", ["outbox_flush_success", "outbox_flush_dedup_hit"])
async def test_a_sent_row_has_its_audit_whichever_way_it_was_sent(
    config: Config, dsn: str, reason: str
) -> None:
    outbox_id = outbox.enqueue_memory("A fact.", "team:a", config=config)
    outbox.claim_outbox("w1", config=config)
    assert outbox.ack_many("w1", [outbox.Sent(outbox_id, None, "m1", reason)], config)
    pass_the_grace(dsn)
    assert repairs.settled_without_audit(config=config) == []


async def test_an_audit_written_after_the_look_is_not_written_twice(config: Config, dsn: str) -> None:
    outbox_id = outbox.enqueue_memory("A fact.", "team:a", config=config)
    pass_the_grace(dsn)
    seen = repairs.parked_without_audit(config=config)
    governance.insert_write_audit(
        "ada", "team:a", "redirect", "by a script", evidence_refs_json={"outbox_id": outbox_id}, config=config
    )
    assert not repairs.write_redirect_audits(seen, config)
    assert all(row["ok"] for row in governance.invariants(config))


async def test_a_stale_lock_is_cleared_after_a_second_lease(
    reconciler: Reconciler, worker: OutboxWorker, config: Config, dsn: str, backend: Backend
) -> None:
    outbox_id = outbox.enqueue_memory("A fact.", "team:a", config=config)
    outbox.claim_outbox("gone", 1, 60, config)
    run_sql(dsn, "UPDATE logbook.outbox_memory SET locked_at = now() - interval '119 seconds'")
    (row,) = run_sql(dsn, "SELECT outbox_id, lease_token FROM logbook.outbox_memory")
    assert (await reconciler.run_whole(repair=False)).stale_locks == 0, "its second lease is not over"
    assert repairs.clear_stale_locks([(row["outbox_id"], row["lease_token"])], config) == set()
    run_sql(dsn, "UPDATE logbook.outbox_memory SET locked_at = now() - interval '121 seconds'")
    assert (await reconciler.run_whole(repair=False)).stale_locks == 1
    assert (await reconciler.run_whole(repair=True)).stale_locks == 1
    row = outbox.get(outbox_id, config) or {}
    assert (row["status"], row["locked_by"], row["retry_count"]) == ("pending", None, 0)
    assert row["ambiguous"], "whoever had it may have delivered it"
    (audit,) = governance.query_write_audit(action="stale", config=config)
    assert audit["reason"] == "outbox_stale"
    assert audit["evidence_refs_json"]["outbox_id"] == outbox_id
    assert audit["evidence_refs_json"]["extra"]["locked_by"] == "gone"
    assert (await worker.run_once()).sent == 1
    assert backend.contents() == ["A fact."]


async def test_a_settle_that_comes_after_its_lock_was_cleared_is_a_conflict(config: Config, dsn: str) -> None:
    outbox_id = outbox.enqueue_memory("A fact.", "team:a", config=config)
    (late,) = outbox.claim_outbox("late", 1, 60, config)
    run_sql(dsn, "UPDATE logbook.outbox_memory SET locked_at = now() - interval '1 hour'")
    assert repairs.clear_stale_locks([(outbox_id, late["lease_token"])], config) == {outbox_id}
    assert not outbox.ack_sent(outbox_id, "late", "m1", config, lease_token=late["lease_token"])
    assert outbox.record_conflicts("late", [(outbox_id, late["lease_token"])], config) == {outbox_id}
    (audit,) = governance.query_write_audit(action="conflict", config=config)
    assert audit["evidence_refs_json"]["outbox_id"] == outbox_id
    (taken,) = outbox.claim_outbox("new", 1, 60, config)
    assert outbox.ack_sent(outbox_id, "new", "m1", config, lease_token=taken["lease_token"])


async def test_a_lock_that_somebody_took_over_meanwhile_is_left_alone(config: Config, dsn: str) -> None:
    outbox.enqueue_memory("A fact.", "team:a", config=config)
    outbox.claim_outbox("gone", 1, 60, config)
    run_sql(dsn, "UPDATE logbook.outbox_memory SET locked_at = now() - interval '1 hour'")
    (stale,) = repairs.stale_locks(config=config)
    (taken,) = outbox.claim_outbox("new", 1, 60, config)
    assert repairs.clear_stale_locks([(stale["outbox_id"], stale["lease_token"])], config) == set()
    # Even a new lease that ran out in its turn is another lease than the one that was seen.
    run_sql(dsn, "UPDATE logbook.outbox_memory SET locked_at = now() - interval '1 hour'")
    assert repairs.clear_stale_locks([(stale["outbox_id"], stale["lease_token"])], config) == set()
    assert repairs.clear_stale_locks([(taken["outbox_id"], taken["lease_token"])], config)


async def test_an_abandoned_write_is_parked_after_twice_its_deadline(
    reconciler: Reconciler, db: AsyncExecutor, dsn: str, config: Config
) -> None:
    write = Write(
        payload_md="A fact.",
        payload_sha=payload_sha("A fact."),
        requested_space="private:ada",
        target_space="private:ada",
        actor_user_id="ada",
        correlation_id="corr-0123456789abcdef",
        evidence_refs_json={},
    )
    await db.run(writes.begin(write, deadline_seconds=10))
    run_sql(dsn, "UPDATE logbook.memories SET intent_at = now() - interval '19 seconds'")
    assert (await reconciler.run_whole(repair=True)).abandoned_writes == 0
    run_sql(dsn, "UPDATE logbook.memories SET intent_at = now() - interval '21 seconds'")
    assert (await reconciler.run_whole(repair=False)).abandoned_writes == 1
    assert (await reconciler.run_once()) == 1
    assert audits(config) == [("redirect", "openmemory_write_failed:outcome_unknown")]


async def test_a_redirect_without_its_row_is_reported_and_left(
    reconciler: Reconciler, config: Config, dsn: str
) -> None:
    audit_id = governance.insert_write_audit(
        "ada", "team:a", "redirect", "by hand", evidence_refs_json={"outbox_id": 4711}, config=config
    )
    found = await reconciler.run_whole(repair=True)
    assert found.violated
    assert [row["audit_id"] for row in found.redirects_without_row] == [audit_id]
    assert found.repaired == 0


async def test_the_background_pass_goes_through_the_outbox_page_by_page(
    db: AsyncExecutor, config: Config, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.enqueue_many([(f"fact {n}", "team:a") for n in range(25)], config)
    pass_the_grace(dsn)
    for name in ("parked_without_audit", "settled_without_audit", "last_of_page"):
        _in_pages_of(monkeypatch, name, 10)
    reconciler = Reconciler(db)
    assert [await reconciler.run_once() for _ in range(5)] == [10, 10, 5, 0, 0]


def _in_pages_of(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    whole = getattr(repairs, name)

    class Small:
        def query(self, after_id: int) -> Any:
            return whole.query(after_id, size)

    monkeypatch.setattr(repairs, name, Small())


def test_what_was_found_and_what_was_broken_are_told_apart() -> None:
    assert Findings(stale_locks=1, missing_audits=2).repaired == 3
    assert not Findings(stale_locks=1).violated
    assert Findings(invariants=[{"ok": True}, {"ok": False}]).violated
