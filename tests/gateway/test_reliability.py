"""The report says exactly what the tables say, and nothing that is private."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest

from engram.gateway.memory_store import MemoryStore
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.reliability import reliability_report
from engram.gateway.store_reply import StoreRequest
from engram.kernel.errors import InputError
from engram.logbook import governance, outbox
from engram.logbook.config import Config
from engram.logbook.lifecycle import ACTIONS, AUDIT
from engram.logbook.uri import build_evidence_refs_json, split_evidence_refs
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.backend import Backend
from support.faults import Fault, Order

SHA = "a" * 64


def audit(
    config: Config, action: str = "allow", reason: str | None = None, refs: list[str] | None = None
) -> int:
    evidence = build_evidence_refs_json(**split_evidence_refs(refs or []))
    return governance.insert_write_audit("ada", "private:ada", action, reason, None, evidence, config)


def age(dsn: str, outbox_id: int, seconds: int) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET created_at = now() - make_interval(secs => %s) WHERE outbox_id = %s",
            [seconds, outbox_id],
        )


def backdated(dsn: str, action: str, hours: float) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO governance.write_audit (created_at, target_space, action, status, finalized_at)"
            " VALUES (now() - make_interval(secs => %s), 'team:a', %s, 'success', now())",
            [hours * 3600, action],
        )


def test_nothing_was_written_yet(config: Config) -> None:
    report = reliability_report(config=config)
    assert (report.total_writes, report.success_rate, report.evidence.coverage) == (0, None, None)
    assert report.by_action == dict.fromkeys(ACTIONS, 0)
    assert report.by_status == dict.fromkeys(AUDIT.states, 0)
    assert (report.by_reason, report.since) == ({}, None)
    assert report.outbox.oldest_pending_seconds == report.outbox.pending_age_p95_seconds == 0
    assert report.message == f"0 writes; all {len(report.invariants)} invariants hold"


def test_every_breakdown_adds_up_to_the_total(config: Config) -> None:
    for action, reason, times in (
        ("allow", None, 3),
        ("allow", "outbox_flush_success", 2),
        ("reject", "policy_reject:unknown_space", 1),
        ("pending", None, 1),
        ("error", "boom", 1),
    ):
        for _ in range(times):
            audit(config, action, reason)
    report = reliability_report(config=config)
    assert (report.total_writes, report.success_rate) == (8, 5 / 8)
    assert {k: v for k, v in report.by_action.items() if v} == {
        "allow": 5, "reject": 1, "pending": 1, "error": 1,
    }  # fmt: skip
    assert report.by_status == {"pending": 1, "success": 6, "redirected": 0, "failed": 1}
    assert list(report.by_reason.items())[:2] == [("(none)", 4), ("outbox_flush_success", 2)]
    for breakdown in (report.by_action, report.by_status, report.by_reason):
        assert sum(breakdown.values()) == report.total_writes


@pytest.mark.anyio
async def test_it_agrees_with_what_the_gateway_did(
    store: MemoryStore, worker: OutboxWorker, db: AsyncExecutor, dsn: str, backend: Backend
) -> None:
    async def kept(text: str, **kw: object) -> None:
        await store.store(StoreRequest(text, "ada", "corr-0000000000000001", **kw))

    await kept("A fact.", evidence_refs=["mr://project/1"])
    await kept("Another.", target_space="nowhere:x")
    backend.faults.fail(Order(Fault.STATUS, 503), Order(Fault.STATUS, 503))
    await kept("Parked.", evidence_refs=[f"memory://attachments/1/{SHA}"])
    await kept("Parked too.")
    before = await db.run(reliability_report.query())
    assert (before.total_writes, before.by_action["allow"], before.by_action["redirect"]) == (4, 1, 2)
    assert (before.outbox.pending, before.outbox.sent) == (2, 0)
    assert (before.evidence.stores, before.evidence.with_evidence, before.evidence.coverage) == (4, 2, 0.5)
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET next_attempt_at = now()")
    await worker.run_once()
    after = await db.run(reliability_report.query())
    assert (after.outbox.pending, after.outbox.sent) == (0, 2)
    assert after.by_reason["outbox_flush_success"] == 2
    assert (after.total_writes, after.success_rate) == (6, 3 / 6)
    assert after.evidence == before.evidence, "a delivery is not another store"
    assert all(invariant.ok for invariant in after.invariants)


@pytest.mark.parametrize(
    ("refs", "counted"),
    [
        ([f"memory://attachments/1/{SHA}"], 1),
        ([f"memory://patch_blobs/git/1:abc/{SHA}"], 1),
        (["mr://project/123"], 1),
        ([], 0),
    ],
)
def test_any_kind_of_evidence_counts(config: Config, refs: list[str], counted: int) -> None:
    audit(config, refs=refs)
    evidence = reliability_report(config=config).evidence
    assert (evidence.stores, evidence.with_evidence, evidence.coverage) == (1, counted, counted)


@pytest.mark.parametrize("reason", ["outbox_flush_success", "outbox_requeued", "memory_forget"])
def test_deliveries_and_forgetting_are_no_stores(config: Config, reason: str) -> None:
    audit(config, reason=reason, refs=["mr://project/1"])
    assert reliability_report(config=config).evidence.stores == 0


def test_the_outbox_is_shown_as_it_stands(config: Config, dsn: str) -> None:
    ids = [outbox.enqueue_memory(f"fact {n}", "team:a", config=config) for n in range(23)]
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET status = 'sent' WHERE outbox_id = %s", [ids[20]])
        connection.execute("UPDATE logbook.outbox_memory SET status = 'dead' WHERE outbox_id = %s", [ids[21]])
        connection.execute(
            "UPDATE logbook.outbox_memory SET forgotten_at = now() WHERE outbox_id = %s", [ids[22]]
        )
        connection.execute(
            "UPDATE logbook.outbox_memory SET next_attempt_at = now() + interval '1 hour' WHERE outbox_id = %s",
            [ids[0]],
        )
    for n in range(20):
        age(dsn, ids[n], 100 * (n + 1))
    shown = reliability_report(config=config).outbox
    assert (shown.pending, shown.due, shown.sent, shown.dead, shown.forgotten) == (20, 19, 1, 1, 1)
    assert shown.oldest_pending_seconds == pytest.approx(2000, abs=30)
    assert shown.pending_age_p50_seconds == pytest.approx(1050, abs=30)
    assert shown.pending_age_p95_seconds == pytest.approx(1905, abs=30)


@pytest.mark.parametrize(
    ("since", "total"), [("90m", 1), ("5400s", 1), ("24h", 2), ("7d", 3), ("1w", 3), (None, 4)]
)
def test_since_counts_the_audits_from_there_on(
    config: Config, dsn: str, since: str | None, total: int
) -> None:
    for hours in (1, 20, 100, 1000):
        backdated(dsn, "allow", hours)
    report = reliability_report(since, config)
    assert report.total_writes == sum(report.by_action.values()) == total
    by_name = {i.name: i.left for i in report.invariants}
    assert by_name["report counts every audit by a known action"] == 4, "the sums are of everything"


def test_since_may_be_a_moment(config: Config, dsn: str) -> None:
    for hours in (1, 20):
        backdated(dsn, "allow", hours)
    moment = datetime.now(UTC) - timedelta(hours=5)
    for text in (
        moment.isoformat(),
        moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        moment.replace(tzinfo=None).isoformat(),
        moment.astimezone().isoformat(),
    ):
        report = reliability_report(text, config)
        assert report.total_writes == 1
        assert datetime.fromisoformat(report.since or "").tzinfo is not None
    assert reliability_report("2020-01-01", config).total_writes == 2
    assert reliability_report("2999-01-01", config).total_writes == 0


@pytest.mark.parametrize(
    "since",
    ["", "yesterday", "24", "h", "-5h", "99999999999h", "999999999w", "2026-13-01", "0001-01-01T00:00+14:00"],
)
def test_a_time_that_is_none_is_refused_by_name(config: Config, since: str) -> None:
    with pytest.raises(InputError) as refused:
        reliability_report(since, config)
    assert set(refused.value.context["fields"]) == {"since"}


def test_words_that_are_not_engrams_own_are_not_shown(config: Config) -> None:
    for reason in ("my password is hunter2", "hunter2!", "x" * 65, "memory_forget:a b", "Über", "a\nb"):
        audit(config, reason=reason)
    report = reliability_report(config=config)
    assert report.by_reason == {"(other)": 6}
    shown = json.dumps(asdict(report))
    assert "hunter2" not in shown
    assert "ada" not in shown


def test_only_the_most_frequent_reasons_are_named(config: Config) -> None:
    for n in range(governance.MOST_REASONS + 5):
        audit(config, reason=f"reason_{n:03}")
    audit(config, reason="reason_054")
    report = reliability_report(config=config)
    assert next(iter(report.by_reason.items())) == ("reason_054", 2)
    assert len(report.by_reason) == governance.MOST_REASONS + 1
    assert report.by_reason["(other)"] == 5
    assert sum(report.by_reason.values()) == report.total_writes


def test_a_sum_that_does_not_hold_is_named(config: Config) -> None:
    outbox.enqueue_memory("a bare row", "team:a", config=config)
    report = reliability_report(config=config)
    broken = [invariant.name for invariant in report.invariants if not invariant.ok]
    assert broken == ["redirects equal outbox rows", "every outbox row has its redirect audit"]
    assert all(name in report.message for name in broken)


def test_all_numbers_are_of_one_moment(config: Config) -> None:
    """However fast others write meanwhile."""
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            audit(config, reason="busy")

    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(write) for _ in range(4)]
        try:
            for _ in range(20):
                report = reliability_report(config=config)
                known = {i.name: i.left for i in report.invariants}
                assert known["report counts every audit by a known action"] == report.total_writes
                assert report.by_reason.get("busy", 0) == report.by_action["allow"] == report.total_writes
        finally:
            stop.set()
        for writer in writers:
            writer.result(10)
    assert report.total_writes > 0
