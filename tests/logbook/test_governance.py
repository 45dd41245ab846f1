"""Settings of a project, and an audit trail that nobody can rewrite."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import psycopg
import pytest

from engram.kernel.errors import InputError
from engram.logbook import governance, outbox
from engram.logbook.config import Config
from engram.logbook.lifecycle import ACTIONS, AUDIT, audit_status
from engram.postgres.pool import connect
from support.processes import eventually

INSERT = (
    "INSERT INTO governance.write_audit (target_space, action, status, finalized_at, evidence_refs_json)"
    " VALUES ('private:ada', %s, %s, %s, %s) RETURNING audit_id"
)


def test_a_project_starts_closed(config: Config) -> None:
    found = governance.get_or_create_settings("payments", config=config)
    assert (found["project_key"], found["team_write_enabled"], found["policy_json"]) == (
        "payments",
        False,
        {},
    )


def test_settings_change_and_what_is_not_given_stays(config: Config) -> None:
    assert governance.upsert_settings("payments", True, {"max_chars": 10}, "ada", config=config)
    assert governance.upsert_settings("payments", False, None, "bob", config=config)
    found = governance.get_or_create_settings("payments", config=config)
    assert (found["team_write_enabled"], found["policy_json"], found["updated_by"]) == (
        False, {"max_chars": 10}, "bob",
    )  # fmt: skip


@pytest.mark.parametrize(
    "sabotage",
    [
        "UPDATE governance.write_audit SET reason = 'rewritten'",
        "UPDATE governance.write_audit SET status = 'pending', action = 'pending', finalized_at = NULL",
        "DELETE FROM governance.write_audit",
        "TRUNCATE governance.write_audit",
    ],
)
def test_a_final_audit_cannot_be_changed_or_removed(dsn: str, sabotage: str) -> None:
    with connect(dsn) as connection:
        connection.execute(INSERT, ["allow", "success", "2026-01-01", "{}"])
        with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
            connection.execute(sabotage)


def test_a_pending_audit_cannot_be_removed_either(dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute(INSERT, ["pending", "pending", None, "{}"])
        with pytest.raises(psycopg.errors.RestrictViolation):
            connection.execute("DELETE FROM governance.write_audit")


@pytest.mark.parametrize(
    ("action", "status", "finalized", "refs", "rule"),
    [
        ("allow", "pending", None, "{}", "write_audit_pending_is_pending"),
        ("pending", "success", "2026-01-01", "{}", "write_audit_pending_is_pending"),
        ("allow", "redirected", "2026-01-01", "{}", "write_audit_redirect_is_parked"),
        ("redirect", "success", "2026-01-01", '{"outbox_id": 1}', "write_audit_redirect_is_parked"),
        ("allow", "success", None, "{}", "write_audit_final_has_time"),
        ("approve", "success", "2026-01-01", "{}", "write_audit_action_known"),
    ],
)
def test_action_and_status_always_agree(
    dsn: str, action: str, status: str, finalized: str | None, refs: str, rule: str
) -> None:
    with connect(dsn) as connection, pytest.raises(psycopg.errors.CheckViolation) as refused:
        connection.execute(INSERT, [action, status, finalized, refs])
    assert refused.value.diag.constraint_name == rule


def test_every_action_has_a_status_the_lifecycle_knows() -> None:
    statuses = {action: audit_status(action) for action in ACTIONS}
    assert set(statuses.values()) == set(AUDIT.states)
    assert statuses["error"] == "failed"
    assert statuses["redirect"] == "redirected"


def test_the_schema_knows_exactly_the_actions_of_the_vocabulary(dsn: str) -> None:
    with connect(dsn) as connection:
        found = connection.execute(
            "SELECT pg_get_constraintdef(oid) AS said FROM pg_constraint WHERE conname = 'write_audit_action_known'"
        ).fetchone()
    assert found is not None
    assert set(found["said"].split("'")[1::2]) == set(ACTIONS)


@pytest.mark.parametrize("action", [a for a in ACTIONS if a != "pending"])
def test_an_audit_from_a_script_is_final_at_once(config: Config, action: str) -> None:
    refs = {"outbox_id": 7, "extra": {"correlation_id": "corr-1234"}}
    audit_id = governance.insert_write_audit("ada", "team:a", action, "because", "a" * 64, refs, config)
    (audit,) = governance.query_write_audit(config=config)
    assert (audit["audit_id"], audit["action"], audit["status"]) == (audit_id, action, audit_status(action))
    assert (audit["requested_space"], audit["evidence_refs_json"]) == ("team:a", refs)
    assert audit["finalized_at"] is not None
    assert not governance.finalize_write_audit(audit_id, "allow", config=config)


def test_a_pending_audit_is_finalised_once(config: Config) -> None:
    audit_id = governance.insert_write_audit(
        "ada", "team:a", "pending", None, "a" * 64, {"extra": {"a": 1}}, config
    )
    assert governance.finalize_write_audit(audit_id, "redirect", "parked", None, {"outbox_id": 3}, config)
    assert not governance.finalize_write_audit(audit_id, "allow", config=config)
    (audit,) = governance.query_write_audit(config=config)
    assert (audit["action"], audit["status"], audit["reason"]) == ("redirect", "redirected", "parked")
    assert audit["evidence_refs_json"] == {"outbox_id": 3, "extra": {"a": 1}}


@pytest.mark.parametrize("action", ["approve", "", "ALLOW"])
def test_an_action_outside_the_vocabulary_is_refused(config: Config, action: str) -> None:
    with pytest.raises(InputError, match="no audit action"):
        governance.insert_write_audit("ada", "team:a", action, config=config)


def test_pending_is_not_an_end(config: Config) -> None:
    with pytest.raises(InputError):
        governance.finalize_write_audit(1, "pending", config=config)


def test_audits_are_found_by_each_of_their_marks(config: Config) -> None:
    def add(actor: str, action: str, reason: str, correlation_id: str) -> int:
        return governance.insert_write_audit(
            actor, "team:a", action, reason, None, None, config, correlation_id=correlation_id
        )

    one = add("ada", "allow", "x", "corr-1")
    two = add("bob", "reject", "policy_reject:unknown_space", "corr-2")
    three = add("ada", "reject", "policy_reject:other", "corr-2")

    def ids(**kw: object) -> list[int]:
        return [a["audit_id"] for a in governance.query_write_audit(config=config, **kw)]

    assert ids() == [three, two, one]
    assert ids(limit=1) == [three]
    assert ids(actor="ada") == [three, one]
    assert ids(action="reject") == [three, two]
    assert ids(reason="policy_reject") == [three, two]
    assert ids(correlation_id="corr-2", actor="bob") == [two]
    assert ids(since="2999-01-01T00:00:00Z") == []
    assert ids(since=datetime(2020, 1, 1, tzinfo=UTC)) == [three, two, one]


def test_settings_keep_their_history(config: Config) -> None:
    governance.get_or_create_settings("payments", config=config)
    governance.get_or_create_settings("payments", config=config)
    governance.upsert_settings("payments", True, {"max_chars": 10}, "ada", config=config)
    governance.upsert_settings("payments", True, {"max_chars": 20}, "bob", config=config)
    newest, middle, first = governance.settings_history("payments", config=config)
    assert (newest["changed_by"], middle["changed_by"], first["changed_by"]) == ("bob", "ada", None)
    assert newest["before"]["policy_json"] == {"max_chars": 10}
    assert newest["after"]["policy_json"] == {"max_chars": 20}
    assert first["before"] is None


def test_invariants_name_both_sides(config: Config) -> None:
    assert all(row["ok"] for row in governance.invariants(config))
    outbox.enqueue_memory("a bare row", "team:a", config=config)
    broken = {
        row["name"]: (row["left"], row["right"]) for row in governance.invariants(config) if not row["ok"]
    }
    assert broken == {
        "redirects equal outbox rows": (0, 1),
        "every outbox row has its redirect audit": (1, 0),
    }


@pytest.mark.parametrize(
    ("uri", "ok"),
    [
        (f"memory://patch_blobs/git/1:abc/{'a' * 64}", True),
        (f"memory://attachments/12/{'a' * 64}", True),
        ("mr://project/123", False),
        (f"memory://attachments/../{'a' * 64}", False),
    ],
)
def test_an_evidence_uri_that_cannot_be_parsed_breaks_an_invariant(
    config: Config, uri: str, ok: bool
) -> None:
    refs = {"patches": [{"artifact_uri": uri}]}
    governance.insert_write_audit("ada", "team:a", "allow", None, None, refs, config)
    sums = {row["name"]: row["ok"] for row in governance.invariants(config)}
    assert sums["evidence URIs can be parsed"] is ok


def settings_of(row: dict) -> tuple:
    return row["team_write_enabled"], row["policy_json"], row["updated_by"]


def test_an_update_changes_what_is_given_and_returns_the_row(config: Config) -> None:
    opened = governance.update_settings("payments", True, updated_by="ada", config=config)
    assert settings_of(opened) == (True, {}, "ada")
    limited = governance.update_settings(
        "payments", policy_json={"max_chars": 10}, updated_by="bob", config=config
    )
    assert settings_of(limited) == (True, {"max_chars": 10}, "bob")
    closed = governance.update_settings("payments", False, updated_by="carol", config=config)
    assert settings_of(closed) == (False, {"max_chars": 10}, "carol")
    cleared = governance.update_settings("payments", policy_json={}, updated_by="eve", config=config)
    assert settings_of(cleared) == (False, {}, "eve")
    assert settings_of(governance.get_or_create_settings("payments", config)) == (False, {}, "eve")


def test_an_update_that_changes_nothing_leaves_no_trace(config: Config) -> None:
    first = governance.update_settings("payments", True, {"max_chars": 10}, "ada", config)
    again = governance.update_settings("payments", True, {"max_chars": 10}, "bob", config)
    assert again == first
    assert len(governance.settings_history("payments", config=config)) == 1


CHANGES = [(True, None), (None, {"max_chars": 10})]


@pytest.mark.parametrize("settled", [True, False], ids=["changed", "first-of-all"])
@pytest.mark.parametrize("changes", [CHANGES, CHANGES[::-1]], ids=["policy-last", "policy-first"])
def test_two_updates_at_once_keep_both_changes(
    config: Config, dsn: str, changes: list, settled: bool
) -> None:
    """The second waits for the first's row, and then sees what the first has made of it."""
    if settled:
        governance.update_settings("payments", False, {}, "root", config)
    with connect(dsn) as first, ThreadPoolExecutor(1) as threads:
        first.autocommit = False
        one = governance.update_settings.query("payments", *changes[0], "ada")
        first.execute(one.statement.text.encode(), one.params)
        second = threads.submit(governance.update_settings, "payments", *changes[1], "bob", config)
        wait_for_a_lock(dsn)
        first.commit()
        assert settings_of(second.result(10)) == (True, {"max_chars": 10}, "bob")


def wait_for_a_lock(dsn: str) -> None:
    """Until somebody in this database waits for somebody else's transaction."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with connect(dsn) as connection:
        eventually(lambda: connection.execute(waiting).fetchone(), "a blocked update", 10)


def test_the_audits_of_an_outbox_row_are_found(config: Config) -> None:
    for outbox_id, action in ((1, "redirect"), (2, "redirect"), (1, "retry"), (11, "redirect"), (1, "allow")):
        governance.insert_write_audit("ada", "team:a", action, None, None, {"outbox_id": outbox_id}, config)
    governance.insert_write_audit("ada", "team:a", "allow", config=config)
    found = governance.audits_of_outbox(1, config)
    assert [audit["action"] for audit in found] == ["redirect", "retry", "allow"]


def test_the_sums_count_each_uri_once_however_deep(config: Config) -> None:
    uri = f"memory://attachments/1/{'a' * 64}"
    refs = {"attachments": [{"artifact_uri": uri}], "extra": {"deeper": [[{"artifact_uri": uri}]]}}
    governance.insert_write_audit("ada", "team:a", "allow", None, None, refs, config)
    sums = {row["name"]: (row["left"], row["right"]) for row in governance.invariants(config)}
    assert sums["evidence URIs can be parsed"] == (2, 2)


@pytest.mark.parametrize("digits", [63, 65])
def test_a_hash_of_another_length_breaks_the_sum(config: Config, digits: int) -> None:
    refs = {"attachments": [{"artifact_uri": f"memory://attachments/1/{'a' * digits}"}]}
    governance.insert_write_audit("ada", "team:a", "allow", None, None, refs, config)
    sums = {row["name"]: row["ok"] for row in governance.invariants(config)}
    assert not sums["evidence URIs can be parsed"]
