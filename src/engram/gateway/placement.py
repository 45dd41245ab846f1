"""Whose settings judge a write, and where one that is no memory may go.

Evidence and events have no audit of their own, so what a memory would be
rejected for is simply refused here. A diverted one is kept, and its writer is
told where.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engram.gateway import policy
from engram.gateway.callers import Caller
from engram.gateway.inputs import actor_problem, refuse
from engram.gateway.spaces import parse_space, private_space
from engram.kernel.errors import Forbidden
from engram.kernel.logs import fields
from engram.logbook import governance
from engram.postgres.executors import AsyncExecutor

log = logging.getLogger(__name__)

LOGGED_PROBLEMS = 10
CLOSED: dict[str, Any] = {"team_write_enabled": False, "policy_json": {}}


@dataclass(frozen=True, slots=True)
class Placed:
    """`rule` names what diverted it from `requested`."""

    space: str
    requested: str
    rule: str | None = None

    def told(self, space: str) -> str:
        """Where it is, and why not where it was wanted. `space` is where it was found to be."""
        if space == self.requested:
            return f"in {space}"
        return f"in {space} instead of {self.requested} ({self.rule or 'by an earlier try'})"


class Placement:
    def __init__(self, db: AsyncExecutor, project_key: str) -> None:
        self._db = db
        self._project = project_key

    async def place(self, caller: Caller, requested: str | None) -> Placed:
        """By default the caller's own space; a shared one if the caller and its project's policy allow it."""
        refuse({"actor_user_id": actor_problem(caller.actor)})
        wanted = requested or str(private_space(caller.actor))
        caller.check_writable(wanted)
        decision = policy.decide_who(wanted, caller.actor, await self._settings_of(wanted))
        tell_problems(wanted, decision)
        if decision.target is None:
            raise Forbidden(f"{caller.actor} may not write to {wanted} ({decision.rule})")
        return Placed(str(decision.target), wanted, decision.rule)

    async def _settings_of(self, wanted: str) -> dict[str, Any]:
        project = governing_project(wanted, self._project)
        if project is None:
            return CLOSED
        return await self._db.run(governance.read_settings.query(project)) or CLOSED


def governing_project(requested_space: str, own_project: str) -> str | None:
    """The project whose settings judge a write there. None: no settings are asked."""
    space = parse_space(requested_space)
    if space is None or not space.shared:
        return None
    return space.name if space.kind == "team" else own_project


def tell_problems(requested_space: str, decision: policy.Decision) -> None:
    """A policy that cannot be read holds writes up: its project's administrator must know."""
    if decision.problems:
        problems = dict(islice(decision.problems.items(), LOGGED_PROBLEMS))
        log.error("policy.invalid", extra=fields(requested_space=requested_space, problems=problems))
