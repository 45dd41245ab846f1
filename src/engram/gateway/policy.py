"""What governance says about a write, before anything happens. Pure.

A write to a shared space passes the rules in order; the first that fails
diverts it to the actor's private space, where it is kept but not shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engram.gateway.spaces import Space, parse_space, private_space


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the write goes. `rule` names what diverted or rejected it."""

    target: Space | None
    rule: str | None = None

    @property
    def rejected(self) -> bool:
        return self.target is None

    @property
    def diverted(self) -> bool:
        return self.target is not None and self.rule is not None


def decide(requested_space: str, actor: str, settings: Mapping[str, Any]) -> Decision:
    space = parse_space(requested_space)
    if space is None:
        return Decision(None, "unknown_space")
    if not space.shared:
        return Decision(space) if space.name == actor else Decision(None, "private_space_of_another")
    if not settings["team_write_enabled"]:
        return Decision(private_space(actor), "team_write_disabled")
    return Decision(space)
