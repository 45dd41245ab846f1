"""Where a write may go, decided before anything happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.gateway.policy import decide
from engram.gateway.spaces import Space, may_read, parse_space, private_space, team_space

OPEN = {"team_write_enabled": True}
CLOSED = {"team_write_enabled": False}


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("private:alice", "private", "alice"),
        ("team:payments", "team", "payments"),
        ("org:acme", "org", "acme"),
        ("team:a:b/c", "team", "a:b/c"),
        ("private:张三", "private", "张三"),
        ("team:" + "x" * 128, "team", "x" * 128),
    ],
)
def test_the_three_kinds(text: str, kind: str, name: str) -> None:
    space = parse_space(text)
    assert space == Space(kind, name)
    assert str(space) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "alice",
        "private:",
        ":alice",
        "public:everyone",
        "Private:alice",
        " private:alice",
        "private:alice ",
        "private:alice\n",
        "private:a b",
        "private:a\x00b",
        "private:\x7f",
        "private::alice",
        "team:/etc",
        "team:\\x",
        "team:" + "x" * 129,
        "team:a\u3000b",
    ],
)
def test_anything_else_is_no_space(text: str) -> None:
    assert parse_space(text) is None


@given(st.text())
def test_what_is_accepted_reads_back_as_itself(text: str) -> None:
    space = parse_space(text)
    assert space is None or (str(space) == text and parse_space(str(space)) == space)


def test_who_may_read() -> None:
    assert may_read(private_space("alice"), "alice")
    assert not may_read(private_space("alice"), "bob")
    assert may_read(team_space("payments"), "bob")
    assert may_read(Space("org", "acme"), "bob")


@pytest.mark.parametrize("settings", [OPEN, CLOSED])
def test_ones_own_private_space_is_always_open(settings: dict[str, bool]) -> None:
    decision = decide("private:alice", "alice", settings)
    assert str(decision.target) == "private:alice"
    assert (decision.rule, decision.diverted, decision.rejected) == (None, False, False)


@pytest.mark.parametrize("settings", [OPEN, CLOSED])
def test_anothers_private_space_is_refused_not_diverted(settings: dict[str, bool]) -> None:
    decision = decide("private:alice", "bob", settings)
    assert decision.target is None
    assert (decision.rule, decision.diverted, decision.rejected) == ("private_space_of_another", False, True)


@pytest.mark.parametrize("settings", [OPEN, CLOSED])
def test_an_unknown_space_is_refused(settings: dict[str, bool]) -> None:
    decision = decide("public:everyone", "alice", settings)
    assert (decision.target, decision.rule, decision.rejected) == (None, "unknown_space", True)


@pytest.mark.parametrize("space", ["team:payments", "org:acme"])
def test_an_open_shared_space_takes_the_write(space: str) -> None:
    decision = decide(space, "alice", OPEN)
    assert str(decision.target) == space
    assert not decision.diverted
    assert not decision.rejected


@pytest.mark.parametrize("space", ["team:payments", "org:acme"])
def test_a_closed_shared_space_diverts_to_the_actors_own(space: str) -> None:
    decision = decide(space, "alice", CLOSED)
    assert str(decision.target) == "private:alice"
    assert (decision.rule, decision.diverted, decision.rejected) == ("team_write_disabled", True, False)
