"""`governance_update`: who may write to a project's shared spaces, and what.

Only what is given changes, in one statement, so two changes at once are both
kept. Who changed what is in `governance.settings_history`, not in the audit of
writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engram.gateway.callers import Caller
from engram.gateway.inputs import project_space
from engram.gateway.placement import CLOSED
from engram.gateway.policy import validate_policy
from engram.kernel.errors import Forbidden
from engram.logbook import governance
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

RECENT_CHANGES = 10


@dataclass(frozen=True, slots=True)
class GovernanceRequest:
    """`project_key` None: this gateway's own project. What is None stays as it is."""

    caller: Caller
    correlation_id: str
    project_key: str | None = None
    team_write_enabled: bool | None = None
    policy_json: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """One entry of the history, newest first. `before` is null for the first."""

    changed_at: str
    changed_by: str | None
    before: dict[str, Any] | None
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GovernanceReply:
    """The settings as they are after the call, and the last changes."""

    ok: bool
    project_key: str
    team_write_enabled: bool
    policy_json: dict[str, Any]
    updated_by: str | None
    updated_at: str | None
    correlation_id: str
    message: str
    history: list[SettingsChange] = field(default_factory=list)


class Governing:
    def __init__(self, db: AsyncExecutor, project_key: str) -> None:
        self._db = db
        self._project = project_key

    async def update(self, request: GovernanceRequest) -> GovernanceReply:
        project = self._project if request.project_key is None else request.project_key
        _require_right(request.caller, project)
        if request.policy_json is not None:
            validate_policy(request.policy_json)
        if request.team_write_enabled is None and request.policy_json is None:
            found = await self._db.run(governance.read_settings.query(project))
            said = "nothing was given, so nothing changed"
        else:
            found = await self._db.run(_change(request, project))
            said = f"these are the settings of {project} now"
        history = await self._db.run(governance.settings_history.query(project, RECENT_CHANGES))
        return _reply(request, project, found or CLOSED, history, said)


def _change(request: GovernanceRequest, project: str) -> Any:
    return governance.update_settings.query(
        project, request.team_write_enabled, request.policy_json, request.caller.actor
    )


def _require_right(caller: Caller, project_key: str) -> None:
    """An administrator governs what it can see."""
    if not caller.may_read(project_space(project_key)):
        raise Forbidden(
            f"{caller.actor} may not govern {project_key}", hint=f"its token leaves out team:{project_key}"
        )


def _reply(
    request: GovernanceRequest, project: str, settings: Row, history: list[Row], said: str
) -> GovernanceReply:
    updated_at = settings.get("updated_at")
    return GovernanceReply(
        ok=True,
        project_key=project,
        team_write_enabled=settings["team_write_enabled"],
        policy_json=settings["policy_json"],
        updated_by=settings.get("updated_by"),
        updated_at=updated_at.isoformat() if updated_at else None,
        history=[_entry(row) for row in history],
        correlation_id=request.correlation_id,
        message=said,
    )


def _entry(row: Row) -> SettingsChange:
    return SettingsChange(
        changed_at=row["changed_at"].isoformat(),
        changed_by=row["changed_by"],
        before=None if row["before"] is None else _governed(row["before"]),
        after=_governed(row["after"]),
    )


def _governed(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("team_write_enabled", "policy_json")}
