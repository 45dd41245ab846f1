"""Settings of a project, and an audit trail that nobody can rewrite."""

from __future__ import annotations

import psycopg
import pytest

from engram.logbook import governance
from engram.logbook.config import Config
from engram.logbook.lifecycle import AUDIT, audit_status
from engram.postgres.pool import connect

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
        ("redirect", "redirected", "2026-01-01", "{}", "write_audit_redirect_names_row"),
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
    actions = ["pending", "allow", "redirect", "reject", "error", "dedup", "retry", "conflict", "stale"]
    statuses = {action: audit_status(action) for action in actions}
    assert set(statuses.values()) == set(AUDIT.states)
    assert statuses["error"] == "failed"
    assert statuses["redirect"] == "redirected"
