"""Who may do what: scopes, actors, and the shared spaces a token is limited to."""

from __future__ import annotations

import pytest

from engram.gateway.callers import ADMIN, LOCAL, READ, SCOPES, WRITE, Caller, acting
from engram.gateway.spaces import parse_space
from engram.kernel.errors import Forbidden, InputError, Unauthenticated

ADA = Caller("ada", frozenset({READ, WRITE}), verified=True)
LIMITED = Caller("ada", frozenset({READ, WRITE}), frozenset({"team:payments"}), verified=True)
PRIVATE_ONLY = Caller("ada", frozenset({READ}), frozenset(), verified=True)


def test_nobody_may_do_nothing() -> None:
    with pytest.raises(Unauthenticated, match="needs a token"):
        acting(None, None)
    with pytest.raises(Unauthenticated):
        acting(None, "ada")


def test_a_token_acts_for_its_owner_alone() -> None:
    assert acting(ADA, None) is ADA
    assert acting(ADA, "ada") is ADA
    for other in ("bob", "", "ADA", "ada "):
        with pytest.raises(Forbidden, match="acts for ada and for nobody else"):
            acting(ADA, other)


def test_an_admin_is_not_somebody_else() -> None:
    with pytest.raises(Forbidden):
        acting(Caller("root", frozenset(SCOPES), verified=True), "ada")


def test_without_tokens_the_argument_says_who_acts() -> None:
    assert acting(LOCAL, None).actor == "local"
    assert acting(LOCAL, "ada").actor == "ada"
    assert acting(LOCAL, "ada").scopes == frozenset(SCOPES)


@pytest.mark.parametrize("nobody", ["", " ", "a b", "a\x00b", "a/\n", "\ud800", "x" * 129, "x" * 9000])
def test_nobody_has_a_name_that_cannot_be_kept(nobody: str) -> None:
    with pytest.raises(InputError, match="actor_user_id"):
        acting(LOCAL, nobody)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_is_there_or_refused(scope: str) -> None:
    only = Caller("ada", frozenset({scope}), verified=True)
    assert only.allowed(scope) is only
    for other in set(SCOPES) - {scope}:
        with pytest.raises(Forbidden, match=f"does not have the scope '{other}'"):
            only.allowed(other)
    assert only.is_admin is (scope == ADMIN)


@pytest.mark.parametrize(
    ("caller", "space", "allowed"),
    [
        (ADA, "private:ada", True),
        (ADA, "private:bob", False),
        (ADA, "team:payments", True),
        (ADA, "org:acme", True),
        (LIMITED, "private:ada", True),
        (LIMITED, "private:bob", False),
        (LIMITED, "team:payments", True),
        (LIMITED, "team:payments2", False),
        (LIMITED, "team:Payments", False),
        (LIMITED, "org:payments", False),
        (PRIVATE_ONLY, "private:ada", True),
        (PRIVATE_ONLY, "team:payments", False),
    ],
)
def test_spaces(caller: Caller, space: str, allowed: bool) -> None:
    found = parse_space(space)
    assert found is not None
    assert caller.may_read(found) is allowed
    assert caller.readable([space]) == ([space] if allowed else [])
    if allowed:
        caller.check_readable([space])
        caller.check_writable(space)
        caller.check_listed(space)
        return
    with pytest.raises(Forbidden, match=f"ada may not read {space}"):
        caller.check_readable(["private:ada", space])
    with pytest.raises(Forbidden, match=f"ada may not write to {space}"):
        caller.check_writable(space)


@pytest.mark.parametrize("text", ["", "payments", "public:all", "team:", "private:", "team:a b", "TEAM:a"])
def test_what_is_no_space_is_the_callers_mistake(text: str) -> None:
    for check in (lambda: ADA.check_readable([text]), lambda: ADA.check_writable(text)):
        with pytest.raises(InputError, match="is no space"):
            check()


def test_what_governance_judges_is_left_to_it() -> None:
    """Only a shared space outside the list is refused without an audit."""
    for text in ("private:bob", "public:all", "", "team:payments"):
        LIMITED.check_listed(text)
        ADA.check_listed(text)
    ADA.check_listed("team:anything")
    with pytest.raises(Forbidden, match="use private:ada or team:payments"):
        LIMITED.check_listed("team:other")


def test_defaults_are_narrowed_and_not_refused() -> None:
    assert LIMITED.readable(["team:other", "private:ada"]) == ["private:ada"]
    assert ADA.readable(["team:other", "private:ada"]) == ["team:other", "private:ada"]
