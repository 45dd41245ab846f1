"""The outbox's contract: who may claim, who may settle, and what a settle does."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from engram.kernel.content import payload_sha
from engram.kernel.errors import OutboxInvalid
from engram.logbook import lifecycle, outbox
from engram.logbook.config import Config
from engram.logbook.outbox import Dead, Failed, Released, Sent
from engram.postgres.pool import connect

SPACE = "team:payments"


def later(config: Config, seconds: float) -> None:
    """Move time: everything a lease or a due time is measured from happened `seconds` earlier."""
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET locked_at = locked_at - make_interval(secs => %(s)s),"
            " next_attempt_at = next_attempt_at - make_interval(secs => %(s)s)",
            {"s": seconds},
        )


def row(config: Config, outbox_id: int) -> dict:
    found = outbox.get(outbox_id, config)
    assert found is not None
    return found


def audits(config: Config) -> list[dict]:
    with connect(config.postgres_dsn) as connection:
        return connection.execute("SELECT * FROM governance.write_audit ORDER BY audit_id").fetchall()


def memory_of(config: Config, outbox_id: int) -> dict:
    with connect(config.postgres_dsn) as connection:
        found = connection.execute(
            "SELECT * FROM logbook.memories WHERE outbox_id = %s", [outbox_id]
        ).fetchone()
    assert found is not None
    return found


def test_enqueued_content_waits_as_pending(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, None, "connection refused", config=config)
    found = row(config, outbox_id)
    assert (found["status"], found["retry_count"], found["last_error"]) == (
        "pending",
        0,
        "connection refused",
    )
    assert found["payload_sha"] == payload_sha("a fact")
    assert memory_of(config, outbox_id)["state"] == "parked"


def test_the_same_content_keeps_its_id_in_each_space(config: Config) -> None:
    first = outbox.enqueue_memory("a fact", SPACE, config=config)
    assert outbox.enqueue_memory("a fact", SPACE, config=config) == first
    assert outbox.enqueue_memory("a fact", "team:other", config=config) != first


def test_a_hundred_simultaneous_enqueues_of_one_content_make_one_row(config: Config) -> None:
    with ThreadPoolExecutor(16) as threads:
        ids = list(threads.map(lambda _: outbox.enqueue_memory("a fact", SPACE, config=config), range(100)))
    assert len(set(ids)) == 1
    assert outbox.stats(config)["pending"] == 1


@pytest.mark.parametrize(("payload", "space"), [("", SPACE), ("  \n", SPACE), ("a\x00b", SPACE), ("a", " ")])
def test_what_cannot_be_queued_is_refused_by_field(config: Config, payload: str, space: str) -> None:
    with pytest.raises(OutboxInvalid) as refused:
        outbox.enqueue_memory(payload, space, config=config)
    assert refused.value.context["fields"]


def test_a_claim_leases_due_rows_oldest_first(config: Config) -> None:
    ids = [outbox.enqueue_memory(f"fact {n}", SPACE, config=config) for n in range(5)]
    claimed = outbox.claim_outbox("w1", limit=3, lease_seconds=60, config=config)
    assert [c["outbox_id"] for c in claimed] == ids[:3]
    assert {c["locked_by"] for c in claimed} == {"w1"}
    assert {c["lease_seconds"] for c in claimed} == {60}
    assert len({c["lease_token"] for c in claimed}) == 3


def test_a_leased_row_is_not_claimed_again_until_its_own_lease_is_over(config: Config) -> None:
    outbox.enqueue_memory("a fact", SPACE, config=config)
    (first,) = outbox.claim_outbox("w1", lease_seconds=60, config=config)
    later(config, 59)
    assert outbox.claim_outbox("w2", lease_seconds=1, config=config) == []
    later(config, 2)
    (second,) = outbox.claim_outbox("w2", lease_seconds=1, config=config)
    assert second["lease_token"] > first["lease_token"]
    assert second["ambiguous"], "the first holder may have delivered"


def test_a_row_that_is_not_due_is_not_claimed(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    outbox.claim_outbox("w1", config=config)
    assert outbox.fail_retry(outbox_id, "w1", "busy", datetime.now(UTC) + timedelta(hours=1), config=config)
    assert outbox.claim_outbox("w1", config=config) == []
    later(config, 3601)
    assert [c["outbox_id"] for c in outbox.claim_outbox("w1", config=config)] == [outbox_id]


def test_two_claims_at_once_share_no_row(config: Config) -> None:
    for n in range(60):
        outbox.enqueue_memory(f"fact {n}", SPACE, config=config)
    barrier = threading.Barrier(6)

    def drain(worker: str) -> list[int]:
        barrier.wait()
        got: list[int] = []
        while batch := outbox.claim_outbox(worker, limit=5, config=config):
            got += [c["outbox_id"] for c in batch]
        return got

    with ThreadPoolExecutor(6) as threads:
        shares = list(threads.map(drain, [f"w{n}" for n in range(6)]))
    everything = [i for share in shares for i in share]
    assert len(everything) == len(set(everything)) == 60


def test_a_claim_does_not_wait_for_rows_that_another_transaction_has_locked(config: Config) -> None:
    first = outbox.enqueue_memory("a fact", SPACE, config=config)
    second = outbox.enqueue_memory("another", SPACE, config=config)
    with connect(config.postgres_dsn) as other, other.transaction():
        other.execute("SELECT FROM logbook.outbox_memory WHERE outbox_id = %s FOR UPDATE", [first])
        assert [c["outbox_id"] for c in outbox.claim_outbox("w1", config=config)] == [second]


def test_an_ack_settles_row_and_memory_together(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", config=config)
    assert outbox.ack_sent(outbox_id, "w1", "mem-1", config=config, lease_token=claimed["lease_token"])
    found = row(config, outbox_id)
    assert (found["status"], found["memory_id"], found["locked_by"], found["locked_at"]) == (
        "sent", "mem-1", None, None,
    )  # fmt: skip
    assert found["lease_token"] == claimed["lease_token"], "the token stays, to recognise one's own settle"
    memory = memory_of(config, outbox_id)
    assert (memory["state"], memory["memory_id"]) == ("stored", "mem-1")
    assert audits(config) == [], "single forms write no audit"


def test_check_dedup_answers_for_sent_rows_only(config: Config) -> None:
    sha = payload_sha("a fact")
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    assert outbox.check_dedup(SPACE, sha, config=config) is None
    outbox.claim_outbox("w1", config=config)
    outbox.ack_sent(outbox_id, "w1", "mem-1", config=config)
    found = outbox.check_dedup(SPACE, sha, config=config)
    assert found is not None
    assert (found["outbox_id"], found["memory_id"]) == (outbox_id, "mem-1")
    assert outbox.check_dedup("team:other", sha, config=config) is None


def test_a_failed_try_counts_and_waits(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    outbox.claim_outbox("w1", config=config)
    due = datetime.now(UTC) + timedelta(minutes=2)
    assert outbox.fail_retry(outbox_id, "w1", "500", due.isoformat(), config=config)
    found = row(config, outbox_id)
    assert (found["status"], found["retry_count"], found["last_error"]) == ("pending", 1, "500")
    assert found["next_attempt_at"] == due
    assert found["locked_by"] is None


UNWAITABLE: list[Any] = [
    "infinity", "-infinity", " +Infinity", "20000-01-01 00:00Z", "0001-01-01 00:00+02", "1969-12-31 23:59Z",
    "2026-01-01 BC", "soon", "", 5, datetime.min.replace(tzinfo=timezone(timedelta(hours=2))),
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-2))),
]  # fmt: skip


@pytest.mark.parametrize("never", UNWAITABLE)
def test_a_retry_at_no_moment_is_refused(config: Config, never: Any) -> None:
    """Such a row would break every later claim that reads it."""
    outbox_id = outbox.enqueue_memory("text", "team:x", config=config)
    (row,) = outbox.claim_outbox("w1", config=config)
    with pytest.raises(OutboxInvalid, match="not a moment"):
        outbox.fail_retry(outbox_id, "w1", "500", never, config=config)
    assert outbox.ack_sent(outbox_id, "w1", "m1", config=config, lease_token=row["lease_token"])


@pytest.mark.parametrize("never", [1e12, float("inf"), float("-inf"), float("nan"), -1e12, 10**400, "5m"])
def test_a_delay_that_nobody_waits_for_is_refused(config: Config, never: Any) -> None:
    outbox_id = outbox.enqueue_memory("text", "team:x", config=config)
    outbox.claim_outbox("w1", config=config)
    for refused in (
        lambda: outbox.fail_many("w1", [Failed(outbox_id, None, "500", delay=never)], config),
        lambda: outbox.release_many("w1", [Released(outbox_id, None, delay=never)], config),
        lambda: outbox.release_lease(outbox_id, "w1", never, config=config),
    ):
        with pytest.raises(OutboxInvalid, match="cannot be waited for"):
            refused()
    assert outbox.release_lease(outbox_id, "w1", config=config)


@pytest.mark.parametrize("odd", ["infinity", "-infinity", "20000-01-01 00:00Z", "0044-03-15 12:00Z BC"])
def test_no_statement_writes_a_time_that_cannot_be_read(config: Config, odd: str) -> None:
    """Whatever it is given: what it writes, Python can read."""
    ids = outbox.enqueue_many([("one", SPACE), ("two", SPACE), ("three", SPACE)], config)
    outbox.claim_outbox("w1", config=config)
    fail = outbox.fail_many.query("w1", [Failed(ids[0], None, "500")])
    release = outbox.release_many.query("w1", [Released(ids[1], None)])
    with connect(config.postgres_dsn) as connection:
        connection.execute(fail.statement.text.encode(), {**fail.params, "next_attempts": [odd]})
        connection.execute(release.statement.text.encode(), {**release.params, "delays": [1e12]})
    times = [row(config, outbox_id)["next_attempt_at"].year for outbox_id in ids]
    assert times[0] == (1970 if odd.endswith("BC") or odd.startswith("-") else 9999)
    assert times[1] == 9999


@pytest.mark.parametrize("odd", ["-infinity", "0044-03-15 12:00Z BC"])
def test_a_time_that_somebody_else_wrote_does_not_hold_up_the_others(config: Config, odd: str) -> None:
    ids = outbox.enqueue_many([("one", SPACE), ("two", SPACE)], config)
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET next_attempt_at = %s WHERE outbox_id = %s", [odd, ids[0]]
        )
    assert {found["outbox_id"] for found in outbox.claim_outbox("w1", config=config)} == set(ids)
    assert outbox.ack_many("w1", [Sent(outbox_id, None, "m1") for outbox_id in ids], config) == set(ids)


def test_times_and_delays_of_any_form_go_together(config: Config) -> None:
    ids = outbox.enqueue_many([(f"fact {n}", SPACE) for n in range(7)], config)
    outbox.claim_outbox("w1", config=config)
    due = datetime(2030, 5, 6, 7, 8, 9, tzinfo=UTC)
    forms: list[Any] = [due, due.replace(tzinfo=None), due.astimezone(timezone(timedelta(hours=2))),
                        "2030-05-06T07:08:09Z", "2030-05-06 07:08:09", " 2030-05-06 09:08:09.0+02 ", None]  # fmt: skip
    failed = [Failed(i, None, "500", delay=d, next_attempt_at=at)
              for i, at, d in zip(ids, forms, [0, 1.5, 2, 0.0, 1, 3, 4], strict=True)]  # fmt: skip
    assert outbox.fail_many("w1", failed, config) == set(ids)
    assert [row(config, outbox_id)["next_attempt_at"] for outbox_id in ids][:-1] == [due] * 6
    with connect(config.postgres_dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET next_attempt_at = now()")
    outbox.claim_outbox("w2", config=config)
    assert outbox.release_many(
        "w2", [Released(i, None, delay=n % 2 or 0.5) for n, i in enumerate(ids)], config
    )


@pytest.mark.parametrize("wrong", ["1", 1.0, None, 1 << 63])
def test_what_is_no_id_or_token_is_refused_by_name(config: Config, wrong: Any) -> None:
    for refused in (
        lambda: outbox.ack_sent(wrong, "w1", config=config),
        lambda: outbox.ack_many("w1", [Sent(2, None, "m"), Sent(wrong, None, "m")], config),
        lambda: outbox.renew_many("w1", [(wrong, None), (2, None)], config),
    ):
        with pytest.raises(OutboxInvalid, match="outbox_id"):
            refused()
    if wrong is not None:
        with pytest.raises(OutboxInvalid, match="lease_token"):
            outbox.ack_sent(1, "w1", config=config, lease_token=wrong)


def test_an_error_that_cannot_be_stored_is_kept_as_well_as_it_can(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, last_error="bad\x00 and \ud800", config=config)
    assert row(config, outbox_id)["last_error"].startswith("bad")


def test_dead_is_final(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    outbox.claim_outbox("w1", config=config)
    assert outbox.mark_dead_by_worker(outbox_id, "w1", "422", config=config)
    assert row(config, outbox_id)["status"] == "dead"
    later(config, 3600)
    assert outbox.claim_outbox("w1", config=config) == []
    assert not outbox.ack_sent(outbox_id, "w1", "mem-1", config=config)
    assert outbox.enqueue_memory("a fact", SPACE, config=config) != outbox_id


def settles(config: Config, outbox_id: int, worker: str, token: int | None) -> list[bool]:
    soon = datetime.now(UTC)
    return [
        outbox.ack_sent(outbox_id, worker, "mem", config=config, lease_token=token),
        outbox.fail_retry(outbox_id, worker, "no", soon, config=config, lease_token=token),
        outbox.mark_dead_by_worker(outbox_id, worker, "no", config=config, lease_token=token),
    ]


def test_only_the_holder_settles(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    assert settles(config, outbox_id, "w1", None) == [False] * 3, "nobody holds it"
    outbox.claim_outbox("w1", config=config)
    assert settles(config, outbox_id, "w2", None) == [False] * 3
    assert not outbox.renew_lease(outbox_id, "w2", config=config)
    assert row(config, outbox_id)["status"] == "pending"


def test_a_lease_that_is_over_settles_nothing_even_before_anyone_took_the_row(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", lease_seconds=30, config=config)
    later(config, 31)
    assert settles(config, outbox_id, "w1", claimed["lease_token"]) == [False] * 3


def test_a_holder_may_renew_late_while_nobody_has_taken_the_row(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", lease_seconds=30, config=config)
    later(config, 31)
    assert outbox.renew_lease(outbox_id, "w1", config=config, lease_token=claimed["lease_token"])
    assert outbox.ack_sent(outbox_id, "w1", "mem", config=config, lease_token=claimed["lease_token"])


def test_a_bulk_renewal_judges_each_row_and_tells_what_is_known_of_its_memory(config: Config) -> None:
    ids = [outbox.enqueue_memory(f"fact {n}", SPACE, config=config) for n in range(5)]
    tokens = {
        c["outbox_id"]: c["lease_token"] for c in outbox.claim_outbox("w1", lease_seconds=30, config=config)
    }
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET forgotten_at = now() WHERE outbox_id = %s", [ids[1]]
        )
        connection.execute(
            "UPDATE logbook.memories SET state = 'stored', memory_id = 'mem-2' WHERE outbox_id = %s", [ids[2]]
        )
        connection.execute("DELETE FROM logbook.memories WHERE outbox_id = %s", [ids[4]])
    later(config, 31)
    (taken,) = outbox.claim_outbox("w2", limit=1, config=config)
    assert taken["outbox_id"] == ids[0]
    renewed = outbox.renew_many("w1", tokens.items(), config)
    assert set(renewed) == set(ids[1:]), "late is allowed, but not for a row that was taken"
    assert [renewed[i].forgotten for i in ids[1:]] == [True, False, False, False]
    assert [renewed[i].state for i in ids[1:]] == ["parked", "stored", "parked", None]
    assert renewed[ids[2]].memory_id == "mem-2"
    assert renewed[ids[3]].delivery_key == memory_of(config, ids[3])["delivery_key"]
    assert outbox.ack_sent(ids[3], "w1", "mem", config=config, lease_token=tokens[ids[3]])
    assert outbox.renew_many("w1", [(ids[3], tokens[ids[3]])], config) == {}, "it is settled"
    assert outbox.renew_many("w1", [], config) == {}


def test_a_bulk_renewal_needs_the_holder_and_the_token(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (stale,) = outbox.claim_outbox("pod-0", lease_seconds=30, config=config)
    later(config, 31)
    (fresh,) = outbox.claim_outbox("pod-0", lease_seconds=30, config=config)
    assert outbox.renew_many("pod-0", [(outbox_id, stale["lease_token"])], config) == {}
    assert outbox.renew_many("pod-1", [(outbox_id, fresh["lease_token"])], config) == {}
    before = row(config, outbox_id)["locked_at"]
    assert set(outbox.renew_many("pod-0", [(outbox_id, fresh["lease_token"])], config)) == {outbox_id}
    assert row(config, outbox_id)["locked_at"] > before


def test_a_renewal_tells_how_long_another_write_of_the_content_may_take(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", config=config)
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "UPDATE logbook.memories SET state = 'intent', audit_id = 1, intent_at = now(), intent_seconds = 60"
        )
    renewed = outbox.renew_many("w1", [(outbox_id, claimed["lease_token"])], config)[outbox_id]
    assert renewed.state == "intent"
    assert 50 < renewed.intent_left_seconds <= 60


def test_a_stale_owner_is_refused_while_the_new_owner_is_running(config: Config) -> None:
    """The same worker id twice (a restarted pod): only the token tells them apart."""
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (stale,) = outbox.claim_outbox("pod-0", lease_seconds=30, config=config)
    later(config, 31)
    (fresh,) = outbox.claim_outbox("pod-0", lease_seconds=30, config=config)
    assert settles(config, outbox_id, "pod-0", stale["lease_token"]) == [False] * 3
    assert not outbox.renew_lease(outbox_id, "pod-0", config=config, lease_token=stale["lease_token"])
    assert row(config, outbox_id)["status"] == "pending"
    assert outbox.ack_sent(outbox_id, "pod-0", "mem", config=config, lease_token=fresh["lease_token"])


def test_a_settled_row_is_settled_once(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", config=config)
    results: list[bool] = []
    barrier = threading.Barrier(8)

    def ack(_: int) -> None:
        barrier.wait()
        results.append(
            outbox.ack_sent(outbox_id, "w1", "mem", config=config, lease_token=claimed["lease_token"])
        )

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ack, range(8)))
    assert sorted(results) == [False] * 7 + [True]


def test_bulk_settles_judge_each_row_and_audit_what_they_settled(config: Config) -> None:
    ids = [outbox.enqueue_memory(f"fact {n}", SPACE, config=config) for n in range(4)]
    tokens = {c["outbox_id"]: c["lease_token"] for c in outbox.claim_outbox("w1", config=config)}
    sent = [Sent(i, tokens[i], f"mem-{i}") for i in ids[:2]] + [Sent(ids[2], tokens[ids[2]] - 99, "mem-x")]
    assert outbox.ack_many("w1", sent, config) == set(ids[:2])
    failed = [Failed(ids[2], tokens[ids[2]], "500", delay=60)]
    assert outbox.fail_many("w1", failed, config) == {ids[2]}
    assert outbox.dead_many("w1", [Dead(ids[3], tokens[ids[3]], "422")], config) == {ids[3]}
    told = [(a["action"], a["reason"], a["evidence_refs_json"]["outbox_id"]) for a in audits(config)]
    assert sorted(told) == sorted(
        [
            ("allow", "outbox_flush_success", ids[0]),
            ("allow", "outbox_flush_success", ids[1]),
            ("retry", "outbox_flush_retry", ids[2]),
            ("reject", "outbox_flush_dead", ids[3]),
        ]
    )


def test_the_delay_of_a_failed_try_is_measured_by_the_database(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", config=config)
    outbox.fail_many("w1", [Failed(outbox_id, claimed["lease_token"], "500", delay=90)], config)
    found = row(config, outbox_id)
    assert found["next_attempt_at"] - found["updated_at"] == timedelta(seconds=90)


def test_a_released_row_is_free_again_and_counts_no_try(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", config=config)
    back = Released(outbox_id, claimed["lease_token"], "connection refused", delay=5, ambiguous=True)
    assert outbox.release_many("w1", [back], config) == {outbox_id}
    found = row(config, outbox_id)
    assert (found["retry_count"], found["locked_by"], found["ambiguous"]) == (0, None, True)
    assert outbox.claim_outbox("w2", config=config) == []
    later(config, 6)
    assert len(outbox.claim_outbox("w2", config=config)) == 1


def test_a_row_handed_back_is_audited_if_there_is_a_reason_and_only_by_its_holder(config: Config) -> None:
    ids = [outbox.enqueue_memory(f"fact {n}", SPACE, config=config) for n in range(3)]
    tokens = {c["outbox_id"]: c["lease_token"] for c in outbox.claim_outbox("w1", config=config)}
    back = [
        Released(ids[0], tokens[ids[0]], "timed out", reason="outbox_flush_db_timeout"),
        Released(ids[1], tokens[ids[1]]),
        Released(ids[2], tokens[ids[2]] - 99, reason="outbox_flush_db_error"),
    ]
    assert outbox.release_many("w1", back, config) == {ids[0], ids[1]}
    (audit,) = audits(config)
    assert (audit["action"], audit["reason"]) == ("retry", "outbox_flush_db_timeout")
    assert audit["evidence_refs_json"]["outbox_id"] == ids[0]
    assert {row(config, i)["retry_count"] for i in ids} == {0}


def test_a_forgotten_row_waits_for_nothing(config: Config) -> None:
    ids = [outbox.enqueue_memory(f"fact {n}", SPACE, config=config) for n in range(3)]
    later(config, 60)
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET forgotten_at = now(), created_at = now() - interval '1 day'"
            " WHERE outbox_id = %s",
            [ids[0]],
        )
    stats = outbox.stats(config)
    assert (stats["pending"], stats["due"]) == (2, 2)
    assert stats["oldest_pending_seconds"] < 3600
    assert outbox.backlog(config)["pending"] == 2
    assert outbox.backlog(config)["oldest_pending_seconds"] < 3600


def test_a_refused_settle_is_a_conflict_unless_it_was_our_own(config: Config) -> None:
    ids = [outbox.enqueue_memory(f"fact {n}", SPACE, config=config) for n in range(2)]
    first = {
        c["outbox_id"]: c["lease_token"] for c in outbox.claim_outbox("w1", lease_seconds=30, config=config)
    }
    outbox.ack_sent(ids[0], "w1", "mem", config=config, lease_token=first[ids[0]])
    later(config, 31)
    outbox.claim_outbox("w2", config=config)
    assert outbox.record_conflicts("w1", first.items(), config) == {ids[1]}
    (audit,) = audits(config)
    assert (audit["action"], audit["reason"]) == ("conflict", "outbox_flush_conflict")
    assert audit["evidence_refs_json"] == {
        "outbox_id": ids[1],
        "extra": {"status": "pending", "locked_by": "w2", "worker_id": "w1"},
    }


def test_a_conflict_keeps_the_evidence_of_the_write(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET evidence_refs_json ="
            ' \'{"patches": [1], "extra": {"correlation_id": "corr-1"}}\''
        )
    outbox.record_conflicts("w1", [(outbox_id, 7)], config)
    (audit,) = audits(config)
    assert audit["evidence_refs_json"] == {
        "patches": [1],
        "outbox_id": outbox_id,
        "extra": {"correlation_id": "corr-1", "status": "pending", "locked_by": None, "worker_id": "w1"},
    }


def test_the_schema_knows_exactly_the_states_of_the_lifecycle(dsn: str) -> None:
    checks = {"outbox_status_known": lifecycle.OUTBOX, "memories_state_known": lifecycle.MEMORY,
              "write_audit_status_known": lifecycle.AUDIT}  # fmt: skip
    with connect(dsn) as connection:
        for name, machine in checks.items():
            found = connection.execute(
                "SELECT pg_get_constraintdef(oid) AS said FROM pg_constraint WHERE conname = %s", [name]
            ).fetchone()
            assert found is not None
            named = set(found["said"].split("'")[1::2])
            assert named == set(machine.states), name


def test_a_lease_is_handed_back_by_its_holder_only(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", config=config)
    assert not outbox.release_lease(outbox_id, "w2", config=config)
    assert not outbox.release_lease(outbox_id, "w1", config=config, lease_token=claimed["lease_token"] - 1)
    assert outbox.release_lease(outbox_id, "w1", 60, config, lease_token=claimed["lease_token"])
    assert row(config, outbox_id)["retry_count"] == 0
    assert outbox.claim_outbox("w2", config=config) == [], "not before its time"
    later(config, 61)
    assert len(outbox.claim_outbox("w2", config=config)) == 1


def dead_row(config: Config, text: str = "a fact") -> int:
    outbox_id = outbox.enqueue_memory(text, SPACE, config=config)
    (claimed,) = outbox.claim_outbox("w1", config=config)
    outbox.mark_dead_by_worker(outbox_id, "w1", "422", config, lease_token=claimed["lease_token"])
    return outbox_id


def test_requeueing_a_dead_row_makes_a_new_one_with_its_own_redirect(config: Config) -> None:
    dead = dead_row(config)
    requeued = outbox.requeue(dead, "ada", config)
    assert requeued is not None
    assert requeued.fresh
    anew = row(config, requeued.outbox_id)
    assert (anew["status"], anew["requeued_from"], anew["retry_count"]) == ("pending", dead, 0)
    assert row(config, dead)["status"] == "dead", "terminal is terminal"
    (audit,) = audits(config)
    assert (audit["action"], audit["actor_user_id"]) == ("redirect", "ada")
    assert audit["evidence_refs_json"]["outbox_id"] == requeued.outbox_id
    assert memory_of(config, requeued.outbox_id)["state"] == "parked"
    again = outbox.requeue(dead, "ada", config)
    assert again is not None
    assert (again.outbox_id, again.fresh) == (requeued.outbox_id, False)
    assert len(audits(config)) == 1


def test_only_a_dead_row_is_requeued(config: Config) -> None:
    assert outbox.requeue(outbox.enqueue_memory("a fact", SPACE, config=config), config=config) is None
    assert outbox.requeue(10_000, config=config) is None


def test_simultaneous_requeues_make_one_row(config: Config) -> None:
    dead = dead_row(config)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: outbox.requeue(dead, "ada", config), range(8)))
    assert len({r.outbox_id for r in found if r}) == 1
    assert sum(r.fresh for r in found if r) == 1
    assert len(audits(config)) == 1


def test_rows_are_listed_by_status_space_age_and_text(config: Config) -> None:
    dead = dead_row(config, "The Webhook failed.")
    other = outbox.enqueue_memory("Deploy on Tuesdays.", "team:other", config=config)

    def ids(**kw: object) -> list[int]:
        return [r["outbox_id"] for r in outbox.list_rows(config=config, **kw)]

    assert ids() == [dead, other]
    assert ids(status="dead") == [dead]
    assert ids(target_space="team:other") == [other]
    assert ids(text="webhook") == [dead]
    assert ids(text="422") == [dead], "errors are searched too"
    assert ids(text="%") == []
    assert ids(older_than_seconds=3600) == []
    assert ids(older_than_seconds=0) == [dead, other]
    assert ids(limit=1, after_id=dead) == [other]


def test_many_are_queued_in_one_statement_and_keep_their_order(config: Config) -> None:
    first = outbox.enqueue_memory("fact 1", SPACE, config=config)
    ids = outbox.enqueue_many(
        [("fact 2", SPACE), ("fact 1", SPACE), ("fact 2", SPACE), ("fact 3", "team:b")], config
    )
    assert ids[1] == first
    assert ids[0] == ids[2]
    assert len(set(ids)) == 3
    assert [row(config, i)["payload_md"] for i in ids] == ["fact 2", "fact 1", "fact 2", "fact 3"]
    assert {memory_of(config, i)["state"] for i in ids} == {"parked"}
    assert outbox.enqueue_many([], config) == []


def test_the_functions_have_the_specifications_signatures() -> None:
    expected = {
        "enqueue_memory": ["payload_md", "target_space", "item_id", "last_error"],
        "check_dedup": ["target_space", "payload_sha"],
        "claim_outbox": ["worker_id", "limit", "lease_seconds"],
        "ack_sent": ["outbox_id", "worker_id", "memory_id"],
        "fail_retry": ["outbox_id", "worker_id", "error", "next_attempt_at"],
        "mark_dead_by_worker": ["outbox_id", "worker_id", "error"],
        "renew_lease": ["outbox_id", "worker_id"],
    }
    for name, parameters in expected.items():
        signature = inspect.signature(getattr(outbox, name))
        assert list(signature.parameters)[: len(parameters) + 1] == [*parameters, "config"]
    claim = inspect.signature(outbox.claim_outbox).parameters
    assert (claim["limit"].default, claim["lease_seconds"].default) == (10, 60)


def test_a_plain_script_needs_only_postgres_dsn(dsn: str) -> None:
    script = (
        "from engram.logbook import outbox, governance\n"
        "i = outbox.enqueue_memory('a fact', 'team:a', None, None)\n"
        "print([r['outbox_id'] for r in outbox.claim_outbox('w1')] == [i], outbox.ack_sent(i, 'w1', 'm'),\n"
        "      governance.get_or_create_settings('p')['team_write_enabled'])\n"
    )
    env = {"PATH": "/usr/bin", "POSTGRES_DSN": dsn, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=env, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("True True False\n", "")
