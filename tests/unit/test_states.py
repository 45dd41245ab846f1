"""A state machine is one table; guard, diagram and checks come from it."""

from __future__ import annotations

import pytest

from engram.kernel.errors import StateConflict
from engram.kernel.states import StateMachine, Transition

MEANINGS = {"new": "made", "open": "being worked on", "done": "finished"}
WAYS = [("start", "new", "open"), ("touch", "open", "open"), ("finish", "open", "done")]


@pytest.fixture
def ticket() -> StateMachine:
    return StateMachine("ticket", initial=["new"], meanings=MEANINGS, transitions=WAYS)


def test_every_pair_is_allowed_exactly_if_it_is_in_the_table(ticket: StateMachine) -> None:
    in_table = {(source, target) for _, source, target in WAYS}
    for source in ticket.states:
        for target in ticket.states:
            assert ticket.allows(source, target) == ((source, target) in in_table)


def test_require_passes_what_the_table_has(ticket: StateMachine) -> None:
    for _, source, target in WAYS:
        ticket.require(source, target)


def test_a_refusal_says_what_may_be(ticket: StateMachine) -> None:
    with pytest.raises(StateConflict) as refused:
        ticket.require("open", "new")
    assert refused.value.message == "ticket: open -> new is not a transition"
    assert refused.value.hint == "from open it may become done, open"
    assert refused.value.context == {"entity": "ticket", "from": "open", "to": "new"}


def test_a_refusal_in_a_final_state_says_so(ticket: StateMachine) -> None:
    with pytest.raises(StateConflict, match="done is final"):
        ticket.require("done", "open")


def test_terminal_is_what_nothing_leaves(ticket: StateMachine) -> None:
    assert ticket.terminal == {"done"}


def test_a_state_that_only_leads_to_itself_is_terminal() -> None:
    lamp = StateMachine("lamp", initial=["on"], meanings={"on": "lit"}, transitions=[("glow", "on", "on")])
    assert lamp.terminal == {"on"}


def test_sources_of_an_event_once_each_in_order() -> None:
    machine = StateMachine(
        "ticket",
        initial=["new"],
        meanings=MEANINGS,
        transitions=[*WAYS, ("drop", "open", "done"), ("drop", "new", "done"), ("drop", "open", "new")],
    )
    assert machine.sources("drop") == ("open", "new")
    assert machine.sources("explode") == ()


def test_transitions_are_values(ticket: StateMachine) -> None:
    assert ticket.transitions[0] == Transition(event="start", source="new", target="open")


def test_a_state_without_a_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ticket: states without a meaning: \['closed'\]"):
        StateMachine("ticket", initial=["new"], meanings=MEANINGS, transitions=[("x", "new", "closed")])


def test_an_unknown_initial_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without a meaning: \['old'\]"):
        StateMachine("ticket", initial=["old"], meanings=MEANINGS, transitions=WAYS)


def test_an_unreachable_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ticket: unreachable states: \['lost'\]"):
        StateMachine("ticket", initial=["new"], meanings={**MEANINGS, "lost": "?"}, transitions=WAYS)


def test_an_island_is_unreachable_though_a_way_leads_to_it() -> None:
    with pytest.raises(ValueError, match="unreachable"):
        StateMachine(
            "ticket",
            initial=["new"],
            meanings={**MEANINGS, "a": "?", "b": "?"},
            transitions=[*WAYS, ("x", "a", "b"), ("y", "b", "a")],
        )


def test_the_diagram(ticket: StateMachine) -> None:
    assert ticket.mermaid() == (
        "stateDiagram-v2\n"
        "    [*] --> new\n"
        "    new --> open: start\n"
        "    open --> open: touch\n"
        "    open --> done: finish\n"
        "    done --> [*]\n"
    )
