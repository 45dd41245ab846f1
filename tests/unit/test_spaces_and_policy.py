"""Where a write may go, decided before anything happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.gateway.callers import Caller
from engram.gateway.policy import Decision, Policy, decide, validate_policy
from engram.gateway.spaces import Space, parse_space, private_space, team_space
from engram.kernel.errors import InputError

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
    assert Caller("alice").may_read(private_space("alice"))
    assert not Caller("bob").may_read(private_space("alice"))
    assert Caller("bob").may_read(team_space("payments"))
    assert Caller("bob").may_read(Space("org", "acme"))
    assert not Caller("bob", shared_spaces=frozenset()).may_read(Space("org", "acme"))


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


def under(policy: object, **asked: Any) -> Decision:
    given = {"kind": "FACT", "chars": 100, **asked}
    actor = given.pop("actor", "alice")
    return decide("team:payments", actor, {"team_write_enabled": True, "policy_json": policy}, **given)


ALL_RULES: dict[str, Any] = {
    "allowlist_users": ["alice"],
    "allowed_kinds": ["FACT"],
    "require_evidence": True,
    "max_chars": 100,
    "bulk_enabled": False,
    "bulk_max_chars": 10,
}
BREAKS_ALL: dict[str, Any] = {"actor": "bob", "kind": "RUMOUR", "chars": 101, "is_bulk": True}
MENDS = [
    ("not_allowlisted", {"actor": "alice"}),
    ("kind_not_allowed", {"kind": "FACT"}),
    ("evidence_required", {"evidence_refs": ["mr://project/1"]}),
    ("too_long", {"chars": 100}),
    ("bulk_not_allowed", {"is_bulk": False}),
]


def test_the_rules_are_passed_in_order_and_the_first_that_fails_is_named() -> None:
    """One fault after the other is mended; each time the next rule speaks."""
    asked = dict(BREAKS_ALL)
    closed = decide("team:payments", "bob", {"team_write_enabled": False, "policy_json": ALL_RULES})
    assert closed.rule == "team_write_disabled"
    for rule, mended in MENDS:
        decision = under(ALL_RULES, **asked)
        assert (decision.rule, str(decision.target)) == (rule, f"private:{asked['actor']}")
        assert decision.diverted
        asked |= mended
    assert under(ALL_RULES, **asked) == Decision(team_space("payments"))


@pytest.mark.parametrize(
    ("policy", "asked", "rule"),
    [
        ({"allowlist_users": ["bob"]}, {}, "not_allowlisted"),
        ({"allowlist_users": []}, {}, "not_allowlisted"),
        ({"allowlist_users": ["Alice"]}, {}, "not_allowlisted"),
        ({"allowlist_users": ["bob", "alice"]}, {}, None),
        ({"allowed_kinds": ["PITFALL"]}, {}, "kind_not_allowed"),
        ({"allowed_kinds": []}, {}, "kind_not_allowed"),
        ({"allowed_kinds": ["PITFALL"]}, {"kind": None}, "kind_not_allowed"),
        ({"allowed_kinds": ["fact"]}, {}, None),
        ({"allowed_kinds": ["FACT"]}, {"kind": "Fact"}, None),
        ({}, {"kind": "ANYTHING"}, None),
        ({}, {"kind": None}, None),
        ({"require_evidence": True}, {}, "evidence_required"),
        ({"require_evidence": True}, {"evidence_refs": ["trust me"]}, "evidence_required"),
        ({"require_evidence": True}, {"evidence_refs": ["memory://nonsense"]}, "evidence_required"),
        ({"require_evidence": True}, {"evidence_refs": ["trust me", "mr://project/1"]}, None),
        ({"require_evidence": True}, {"evidence_refs": [f"memory://attachments/1/{'a' * 64}"]}, None),
        ({"require_evidence": False}, {}, None),
        ({}, {"chars": 4000}, None),
        ({}, {"chars": 4001}, "too_long"),
        ({"max_chars": 5000}, {"chars": 5000}, None),
        ({"max_chars": 10}, {"chars": 11}, "too_long"),
        ({}, {"is_bulk": True}, None),
        ({"bulk_enabled": False}, {"is_bulk": True}, "bulk_not_allowed"),
        ({"bulk_enabled": False}, {"is_bulk": False}, None),
        ({"bulk_max_chars": 10}, {"is_bulk": True, "chars": 10}, None),
        ({"bulk_max_chars": 10}, {"is_bulk": True, "chars": 11}, "bulk_too_long"),
        ({"bulk_max_chars": 10}, {"is_bulk": False, "chars": 11}, None),
        ({"max_chars": 50}, {"is_bulk": True, "chars": 51}, "too_long"),
    ],
)
def test_each_rule(policy: dict, asked: dict, rule: str | None) -> None:
    decision = under(policy, **asked)
    assert decision.rule == rule
    assert str(decision.target) == ("private:alice" if rule else "team:payments")


@pytest.mark.parametrize("space", ["team:payments", "org:acme"])
def test_a_private_space_knows_no_rules_and_shared_ones_know_all(space: str) -> None:
    settings = {"team_write_enabled": True, "policy_json": {"allowlist_users": []}}
    assert decide(space, "alice", settings).rule == "not_allowlisted"
    assert decide("private:alice", "alice", settings, chars=200_000).rule is None


BAD: list[tuple[str, object]] = [
    ("allowlist_users", "alice"),
    ("allowlist_users", {"alice": True}),
    ("allowlist_users", ["alice", 7]),
    ("allowlist_users", ["a b"]),
    ("allowlist_users", [""]),
    ("allowlist_users", None),
    ("allowlist_users", [f"u{n}" for n in range(1001)]),
    ("allowed_kinds", "FACT"),
    ("allowed_kinds", [None]),
    ("allowed_kinds", ["x" * 65]),
    ("require_evidence", "false"),
    ("require_evidence", 0),
    ("require_evidence", None),
    ("max_chars", 0),
    ("max_chars", -1),
    ("max_chars", 200_001),
    ("max_chars", "4000"),
    ("max_chars", 4000.0),
    ("max_chars", True),
    ("bulk_enabled", 1),
    ("bulk_max_chars", 0),
    ("bulk_max_chars", 4001),
    ("alowlist_users", ["alice"]),
    ("rate_limit", 7),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_bad_policy_is_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(InputError) as refused:
        validate_policy({"max_chars": 4000, key: value})
    assert list(refused.value.context["fields"]) == [f"policy_json.{key}"]


def test_every_fault_of_a_policy_is_named_at_once() -> None:
    with pytest.raises(InputError) as refused:
        validate_policy({"max_chars": "x", "colour": "red", "bulk_enabled": []})
    assert set(refused.value.context["fields"]) == {
        "policy_json.max_chars", "policy_json.colour", "policy_json.bulk_enabled",
    }  # fmt: skip


@pytest.mark.parametrize("policy", [None, [], "open", 7])
def test_a_policy_that_is_no_object_is_refused_and_read_as_closed(policy: object) -> None:
    with pytest.raises(InputError) as refused:
        validate_policy(policy)
    assert set(refused.value.context["fields"]) == {"policy_json"}
    assert under(policy).rule == "policy_invalid"


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_bad_policy_that_got_in_all_the_same_opens_nothing(key: str, value: object) -> None:
    """Whoever and whatever comes: the rule that cannot be read holds it up."""
    decision = under({key: value}, is_bulk=True, evidence_refs=["mr://project/1"], chars=1)
    assert (decision.rule, str(decision.target)) == ("policy_invalid", "private:alice")
    assert list(decision.problems) == [key]


def test_an_unreadable_rule_speaks_in_its_turn() -> None:
    assert under({"allowlist_users": ["bob"], "max_chars": "x"}).rule == "not_allowlisted"
    assert under({"allowlist_users": "bob", "allowed_kinds": []}).rule == "policy_invalid"
    assert under({"colour": "red", "max_chars": 10}).rule == "too_long", "unknown keys come last"


def test_an_unreadable_bulk_rule_does_not_concern_other_writes() -> None:
    assert under({"bulk_enabled": "no"}).rule is None
    assert under({"bulk_enabled": "no"}, is_bulk=True).rule == "policy_invalid"


def test_the_defaults() -> None:
    assert validate_policy({}) == Policy()
    assert Policy() == Policy(
        allowlist_users=None,
        allowed_kinds=None,
        require_evidence=False,
        max_chars=4000,
        bulk_enabled=True,
        bulk_max_chars=4000,
    )
    assert validate_policy({"max_chars": 9}).bulk_max_chars == 9


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*ALL_RULES, "else"]), JSON) | JSON)
def test_no_stored_policy_crashes_or_lets_through_what_cannot_be_read(policy: object) -> None:
    decision = under(policy, is_bulk=True, chars=1)
    try:
        validate_policy(policy)
    except InputError:
        assert decision.diverted
    else:
        assert decision.rule != "policy_invalid"
