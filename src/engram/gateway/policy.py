"""What governance says about a write, before anything happens. Pure.

A write to a shared space (team or org) passes these rules in order; the first
that fails diverts it to the actor's private space, where it is kept but not
shared, and its name goes into the reply and the audit:

    team_write_disabled  the project is closed to shared writes: the default
    not_allowlisted      `allowlist_users` is set and does not have the actor
    kind_not_allowed     `allowed_kinds` is set and does not have the memory's kind
    evidence_required    `require_evidence` is true and no reference is well formed
    too_long             more than `max_chars` characters (4,000 unless set)
    bulk_not_allowed     `is_bulk`, and `bulk_enabled` is false
    bulk_too_long        `is_bulk`, and more than `bulk_max_chars` characters (`max_chars` unless set)
    policy_invalid       the rule that comes next cannot be read, so nothing passes it

The keys are those of a project's `policy_json`. An absent key does not
restrict; an empty list lets nobody, or no kind, through. Users are compared
exactly, kinds without regard to case, and a memory without a kind is of none
of the allowed ones. Any kind is accepted where `allowed_kinds` is absent.

Evidence and events are no memories: of them only the first two are asked, who
may share and whether anybody may.

`validate_policy` keeps a bad policy out. One that got in all the same, edited
by hand, never opens a space: each rule that cannot be read holds everything up,
and a key that nobody knows counts as one more rule, after all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engram.gateway.spaces import Space, parse_space, private_space
from engram.kernel.errors import InputError, UriError
from engram.logbook.uri import parse_uri

DEFAULT_MAX_CHARS = 4_000
MOST_CHARS = 200_000
MOST_NAMES = 1_000
MAX_KIND_CHARS = 64


@dataclass(frozen=True, slots=True)
class Policy:
    """A project's finer rules. `problems` has what is wrong with each key that cannot be used."""

    allowlist_users: frozenset[str] | None = None
    allowed_kinds: frozenset[str] | None = None
    require_evidence: bool = False
    max_chars: int = DEFAULT_MAX_CHARS
    bulk_enabled: bool = True
    bulk_max_chars: int = DEFAULT_MAX_CHARS
    problems: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, policy_json: object) -> Policy:
        """What a stored policy says; never raises. A key with a problem has no value here."""
        if not isinstance(policy_json, Mapping):
            return cls(problems=dict.fromkeys(_KEYS, "the policy is not an object"))
        problems = {_shown(key): _UNKNOWN for key in policy_json if key not in _KEYS}
        values: dict[str, Any] = {}
        for key, read in _KEYS.items():
            if key in policy_json:
                try:
                    values[key] = read(policy_json[key])
                except ValueError as wrong:
                    problems[key] = str(wrong)
        most = values.setdefault("max_chars", DEFAULT_MAX_CHARS)
        if values.setdefault("bulk_max_chars", most) > most and "max_chars" not in problems:
            problems["bulk_max_chars"] = f"must not exceed max_chars ({most}), which bulk writes pass too"
        return cls(**values, problems=problems)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the write goes. `rule` names what diverted or rejected it.

    `problems` is what a project's admin must know: keys of its policy that cannot be read.
    """

    target: Space | None
    rule: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def rejected(self) -> bool:
        return self.target is None

    @property
    def diverted(self) -> bool:
        return self.target is not None and self.rule is not None


@dataclass(frozen=True, slots=True)
class Draft:
    """What the rules look at."""

    actor: str
    kind: str | None
    evidence_refs: Sequence[str]
    chars: int
    is_bulk: bool


def validate_policy(policy_json: object) -> Policy:
    """The policy, or an `InputError` that names every unknown key and bad value."""
    if not isinstance(policy_json, Mapping):
        raise InputError("a policy is an object", fields={"policy_json": "must be an object"})
    policy = Policy.parse(policy_json)
    if policy.problems:
        wrong = {f"policy_json.{key}": problem for key, problem in policy.problems.items()}
        raise InputError(
            "; ".join(f"{key} {problem}" for key, problem in wrong.items()),
            hint=f"the keys are {', '.join(_KEYS)}; leave one out to have its default",
            fields=wrong,
        )
    return policy


def decide(
    requested_space: str,
    actor: str,
    settings: Mapping[str, Any],
    *,
    kind: str | None = None,
    evidence_refs: Sequence[str] = (),
    chars: int = 0,
    is_bulk: bool = False,
) -> Decision:
    """Where a memory of `chars` characters may go; `settings` is the row of the space's project."""
    rules = _RULES + _BULK_RULES if is_bulk else _RULES
    return _decided(requested_space, settings, rules, Draft(actor, kind, evidence_refs, chars, is_bulk))


def decide_who(requested_space: str, actor: str, settings: Mapping[str, Any]) -> Decision:
    """Where this actor may put what is no memory: the rules about memories do not concern it."""
    return _decided(requested_space, settings, _RULES_OF_ACTORS, Draft(actor, None, (), 0, False))


def _decided(
    requested_space: str, settings: Mapping[str, Any], rules: Sequence[_Rule], draft: Draft
) -> Decision:
    space = parse_space(requested_space)
    if space is None:
        return Decision(None, "unknown_space")
    if not space.shared:
        return Decision(space) if space.name == draft.actor else Decision(None, "private_space_of_another")
    if settings["team_write_enabled"] is not True:
        return Decision(private_space(draft.actor), "team_write_disabled")
    policy = Policy.parse(settings.get("policy_json", {}))
    rule = _first_broken(policy, rules, draft)
    return Decision(private_space(draft.actor) if rule else space, rule, policy.problems)


class _Rule(NamedTuple):
    name: str
    key: str
    broken: Callable[[Policy, Draft], bool]


def _first_broken(policy: Policy, rules: Sequence[_Rule], draft: Draft) -> str | None:
    for rule in rules:
        if rule.key in policy.problems:
            return "policy_invalid"
        if rule.broken(policy, draft):
            return rule.name
    return "policy_invalid" if policy.problems.keys() - _KEYS.keys() else None


def _not_allowlisted(policy: Policy, draft: Draft) -> bool:
    return policy.allowlist_users is not None and draft.actor not in policy.allowlist_users


def _kind_not_allowed(policy: Policy, draft: Draft) -> bool:
    return policy.allowed_kinds is not None and (draft.kind or "").casefold() not in policy.allowed_kinds


def _evidence_missing(policy: Policy, draft: Draft) -> bool:
    return policy.require_evidence and not any(_is_reference(ref) for ref in draft.evidence_refs)


def _is_reference(ref: str) -> bool:
    try:
        parse_uri(ref)
    except UriError:
        return False
    return True


_RULES_OF_ACTORS = (_Rule("not_allowlisted", "allowlist_users", _not_allowlisted),)
_RULES = (
    *_RULES_OF_ACTORS,
    _Rule("kind_not_allowed", "allowed_kinds", _kind_not_allowed),
    _Rule("evidence_required", "require_evidence", _evidence_missing),
    _Rule("too_long", "max_chars", lambda policy, draft: draft.chars > policy.max_chars),
)
_BULK_RULES = (
    _Rule("bulk_not_allowed", "bulk_enabled", lambda policy, _: not policy.bulk_enabled),
    _Rule("bulk_too_long", "bulk_max_chars", lambda policy, draft: draft.chars > policy.bulk_max_chars),
)
_UNKNOWN = "is no rule of a policy"


def _users(value: object) -> frozenset[str]:
    said = "must be a list of user names, each 1 to 128 characters without spaces"
    return frozenset(_names(value, said, lambda name: parse_space(f"private:{name}") is not None))


def _kinds(value: object) -> frozenset[str]:
    said = f"must be a list of kinds, each 1 to {MAX_KIND_CHARS} characters"
    return frozenset(
        name.casefold() for name in _names(value, said, lambda name: 1 <= len(name) <= MAX_KIND_CHARS)
    )


def _names(value: object, said: str, fits: Callable[[str], bool]) -> Iterable[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and fits(name) for name in value):
        raise ValueError(said)
    if len(value) > MOST_NAMES:
        raise ValueError(f"must have at most {MOST_NAMES} entries")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _chars(value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST_CHARS:
        raise ValueError(f"must be a whole number from 1 to {MOST_CHARS}")
    return value


def _shown(key: object) -> str:
    return str(key)[:64]


_KEYS: Mapping[str, Callable[[object], Any]] = {
    "allowlist_users": _users,
    "allowed_kinds": _kinds,
    "require_evidence": _flag,
    "max_chars": _chars,
    "bulk_enabled": _flag,
    "bulk_max_chars": _chars,
}
