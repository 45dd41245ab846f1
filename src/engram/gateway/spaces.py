"""Memory spaces: `private:<actor>`, `team:<project>`, `org:<name>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPACE = re.compile(r"(?P<kind>private|team|org):(?P<name>[^\s:/\\\x00-\x1f\x7f][^\s\x00-\x1f\x7f]{0,127})")


@dataclass(frozen=True, slots=True)
class Space:
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def shared(self) -> bool:
        return self.kind != "private"


def parse_space(text: str) -> Space | None:
    """None for anything outside the three kinds.

    >>> str(parse_space("team:payments"))
    'team:payments'
    >>> parse_space("public:everyone") is None
    True
    """
    match = _SPACE.fullmatch(text)
    return Space(match["kind"], match["name"]) if match else None


def private_space(actor: str) -> Space:
    return Space("private", actor)


def team_space(project_key: str) -> Space:
    return Space("team", project_key)
