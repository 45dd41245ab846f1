"""Governance: a project's settings with their history, and the audit trail of every write.

An audit is final as soon as its outcome is known, and a final audit can be
neither changed nor removed: the database refuses it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from engram.kernel.errors import InputError
from engram.logbook.config import Config
from engram.logbook.lifecycle import ACTIONS, audit_status
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, any_row, maybe_row, one_row, rows, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "governance.sql")

MOST_REASONS = 50


@primitive
def get_or_create_settings(project_key: str, config: Config | None = None) -> Query[dict[str, Any]]:
    """A project's settings; a project nobody configured is closed to team writes."""
    return Query(SQL["get_or_create_settings"], one_row, {"project_key": project_key})


@primitive
def read_settings(project_key: str, config: Config | None = None) -> Query[dict[str, Any] | None]:
    return Query(SQL["read_settings"], maybe_row, {"project_key": project_key})


@primitive
def upsert_settings(
    project_key: str,
    team_write_enabled: bool,
    policy_json: dict[str, Any] | None = None,
    updated_by: str | None = None,
    config: Config | None = None,
) -> Query[bool]:
    """Change a project's settings; `policy_json` None leaves the policy as it is."""
    params = {
        "project_key": project_key,
        "team_write_enabled": team_write_enabled,
        "policy_json": None if policy_json is None else Jsonb(policy_json),
        "updated_by": updated_by,
    }
    return Query(SQL["upsert_settings"], any_row, params)


@primitive
def update_settings(
    project_key: str,
    team_write_enabled: bool | None = None,
    policy_json: dict[str, Any] | None = None,
    updated_by: str | None = None,
    config: Config | None = None,
) -> Query[dict[str, Any]]:
    """Change what is given and leave the rest; the settings as they are then."""
    params = {
        "project_key": project_key,
        "team_write_enabled": team_write_enabled,
        "policy_json": None if policy_json is None else Jsonb(policy_json),
        "updated_by": updated_by,
    }
    return Query(SQL["update_settings"], one_row, params)


@primitive
def settings_history(
    project_key: str, limit: int = 100, config: Config | None = None
) -> Query[list[dict[str, Any]]]:
    """Who changed what, from what to what, newest first."""
    return Query(SQL["settings_history"], rows, {"project_key": project_key, "limit": limit})


@primitive
def insert_write_audit(
    actor_user_id: str | None,
    target_space: str,
    action: str,
    reason: str | None = None,
    payload_sha: str | None = None,
    evidence_refs_json: dict[str, Any] | None = None,
    config: Config | None = None,
    *,
    requested_space: str | None = None,
    memory_id: str | None = None,
    correlation_id: str | None = None,
) -> Query[int]:
    """One audit row; its status follows from its action. `pending` is to be finalised later."""
    _check_action(action)
    params = {
        "actor_user_id": actor_user_id,
        "requested_space": requested_space or target_space,
        "target_space": target_space,
        "action": action,
        "reason": reason,
        "status": audit_status(action),
        "payload_sha": payload_sha,
        "memory_id": memory_id,
        "correlation_id": correlation_id,
        "evidence_refs_json": Jsonb(evidence_refs_json or {}),
    }
    return Query(SQL["insert_audit"], scalar, params)


@primitive
def finalize_write_audit(
    audit_id: int,
    action: str,
    reason: str | None = None,
    memory_id: str | None = None,
    evidence_refs_json: dict[str, Any] | None = None,
    config: Config | None = None,
) -> Query[bool]:
    """A pending audit becomes final. False: it was final already, or never was."""
    _check_action(action)
    if action == "pending":
        raise InputError("pending is not an end", fields={"action": "must be a final action"})
    params = {
        "audit_id": audit_id,
        "action": action,
        "status": audit_status(action),
        "reason": reason,
        "memory_id": memory_id,
        "evidence_refs_json": Jsonb(evidence_refs_json or {}),
    }
    return Query(SQL["finalize_audit"], any_row, params)


@primitive
def query_write_audit(
    since: str | datetime | None = None,
    limit: int = 100,
    actor: str | None = None,
    action: str | None = None,
    config: Config | None = None,
    *,
    reason: str | None = None,
    correlation_id: str | None = None,
) -> Query[list[dict[str, Any]]]:
    """Audits, newest first. `reason` matches by its beginning: "openmemory_write_failed"."""
    params = {
        "since": since,
        "limit": limit,
        "actor": actor,
        "action": action,
        "reason": reason,
        "correlation_id": correlation_id,
    }
    return Query(SQL["query_audit"], rows, params)


@primitive
def audits_of_outbox(outbox_id: int, config: Config | None = None) -> Query[list[dict[str, Any]]]:
    """What was decided about an outbox row, in the order it happened."""
    return Query(SQL["audits_of_outbox"], rows, {"outbox_id": outbox_id})


@primitive
def report(
    since: datetime | None = None, last_seconds: float | None = None, config: Config | None = None
) -> Query[dict[str, Any]]:
    """The numbers of the reliability report: since a time, of the last so many seconds, or of everything.

    `by_reason` is a list of pairs, most frequent first; what is beyond
    `MOST_REASONS` is summed as "(other)", so every breakdown adds up to the total.
    """
    params = {"since": since, "last_seconds": last_seconds, "most_reasons": MOST_REASONS}
    return Query(SQL["report"], one_row, params)


@primitive
def invariants(config: Config | None = None) -> Query[list[dict[str, Any]]]:
    """Each sum that must hold, with both sides and whether they agree."""
    return Query(SQL["invariants"], rows)


def _check_action(action: str) -> None:
    if action not in ACTIONS:
        raise InputError(
            f"{action!r} is no audit action", fields={"action": f"must be one of {', '.join(ACTIONS)}"}
        )
