"""A state machine is data: one table of transitions per entity.

The guards, the diagram in the documentation and the tests all come from the
same table, so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engram.kernel.errors import StateConflict


@dataclass(frozen=True, slots=True)
class Transition:
    event: str
    source: str
    target: str


class StateMachine:
    """The states of one entity, what each means, and the ways between them.

    A state that no transition leaves to another state is terminal.
    """

    def __init__(
        self,
        entity: str,
        *,
        initial: Iterable[str],
        meanings: Mapping[str, str],
        transitions: Iterable[tuple[str, str, str]],
    ) -> None:
        self.entity = entity
        self.initial = tuple(initial)
        self.meanings = dict(meanings)
        self.transitions = tuple(Transition(*t) for t in transitions)
        self._check()

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.meanings)

    @property
    def terminal(self) -> frozenset[str]:
        left = {t.source for t in self.transitions if t.source != t.target}
        return frozenset(s for s in self.states if s not in left)

    def allows(self, source: str, target: str) -> bool:
        return any(t.source == source and t.target == target for t in self.transitions)

    def sources(self, event: str) -> tuple[str, ...]:
        """The states in which `event` may happen."""
        return tuple(dict.fromkeys(t.source for t in self.transitions if t.event == event))

    def require(self, source: str, target: str) -> None:
        """Raise `StateConflict` unless `source -> target` is in the table."""
        if not self.allows(source, target):
            ways = sorted({t.target for t in self.transitions if t.source == source})
            raise StateConflict(
                f"{self.entity}: {source} -> {target} is not a transition",
                hint=f"from {source} it may become {', '.join(ways)}" if ways else f"{source} is final",
                context={"entity": self.entity, "from": source, "to": target},
            )

    def mermaid(self) -> str:
        """The diagram that the documentation shows."""
        lines = ["stateDiagram-v2"]
        lines += [f"    [*] --> {state}" for state in self.initial]
        lines += [f"    {t.source} --> {t.target}: {t.event}" for t in self.transitions]
        lines += [f"    {state} --> [*]" for state in self.states if state in self.terminal]
        return "\n".join(lines) + "\n"

    def _check(self) -> None:
        named = {s for t in self.transitions for s in (t.source, t.target)} | set(self.initial)
        unknown = named - set(self.states)
        if unknown:
            raise ValueError(f"{self.entity}: states without a meaning: {sorted(unknown)}")
        reached = set(self.initial)
        while grown := {t.target for t in self.transitions if t.source in reached} - reached:
            reached |= grown
        if reached != set(self.states):
            raise ValueError(f"{self.entity}: unreachable states: {sorted(set(self.states) - reached)}")
