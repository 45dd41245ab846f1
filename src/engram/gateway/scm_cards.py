"""What is worth a card among the facts of source control, and the card. Pure.

A project's rules say what is not: merges, bulk changes, bots, paths. The same
fact makes the same card, so that a repeat is recognised.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from engram.gateway.cards import DETAILS_ROOM, MAX_MODULE, MAX_TITLE, SUMMARY_ROOM, Card, draft_card
from engram.kernel.errors import InputError
from engram.postgres.query import Row

LISTED_PATHS = 12
MODULE_DEPTH = 3
MAX_PATTERNS = 100
_PITFALL = re.compile(r"\b(fix(es|ed)?|bug|revert|regression|hotfix|broke|broken|crash(es|ed)?|leak)\b", re.I)
_DECISION = re.compile(r"\b(because|instead of|rather than|so that|decide[ds]?|why|no longer|never)\b", re.I)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Rules:
    """What makes cards in a project. Patterns know `*` only; names are compared in lower case."""

    merges: bool = False
    bulk: bool = False
    bots: tuple[str, ...] = ("*[bot]*", "dependabot*", "renovate*")
    only_paths: tuple[str, ...] = ()
    never_paths: tuple[str, ...] = ()

    @classmethod
    def parse(cls, given: object) -> Rules:
        """Rules as they are kept; `InputError` names every key that is unknown or has a bad value."""
        if not isinstance(given, Mapping):
            raise InputError("rules are an object", fields={"rules": "must be an object"})
        known = {field.name: field.default for field in fields(cls)}
        wrong = {key: "is no rule" for key in given if key not in known}
        wrong |= {
            key: problem
            for key, value in given.items()
            if key in known and (problem := _problem(value, of_flag=isinstance(known[key], bool)))
        }
        if wrong:
            said = "; ".join(f"{key} {problem}" for key, problem in wrong.items())
            raise InputError(said, hint=f"the rules are {', '.join(known)}", fields=wrong)
        values: dict[str, Any] = {
            key: value if isinstance(value, bool) else tuple(value) for key, value in given.items()
        }
        return cls(**values)


def why_not(fact: Row, rules: Rules) -> str | None:
    """What keeps a fact from becoming a card, in a word; None: it is worth one."""
    paths = [path["path"] for path in fact["paths_json"]]
    if fact["superseded"]:
        return "superseded"
    if fact["state"] != "merged":
        return "not merged"
    if fact["is_merge"] and not rules.merges:
        return "merge"
    if fact["bulk_reason"] and not rules.bulk:
        return "bulk"
    if any(_matches(name, rules.bots) for name in (fact["author_name"], fact["author_email"]) if name):
        return "bot"
    if paths and rules.only_paths and not any(_matches(path, rules.only_paths) for path in paths):
        return "path"
    if paths and all(_matches(path, rules.never_paths) for path in paths):
        return "path"
    return None


def card_of(fact: Row) -> Card:
    subject, body = _message(fact)
    summary, details = _parts(body)
    return draft_card(
        kind_of(f"{subject}\n{body}"),
        _cut(subject, MAX_TITLE) or f"{source_of(fact)} without a message",
        summary or _touched(fact),
        module=module_of(fact),
        details="\n\n".join(part for part in (details, _changed(fact), _said_by(fact)) if part),
        evidence=[fact["patch_uri"]] if fact["patch_uri"] else [],
        tags=["scm", fact["source_type"]],
        movable=False,
    ).finish({})


def source_of(fact: Row) -> str:
    """How people name a fact: git 1a2b3c4d5e6f, svn r12, mr !7."""
    name = fact["source_id"]
    return {"git": f"git {name[:12]}", "svn": f"svn {name}", "mr": f"mr !{name}"}[fact["source_type"]]


def kind_of(message: str) -> str:
    """
    >>> kind_of("Fix the lease that was never renewed")
    'PITFALL'
    >>> kind_of("Leases are fenced, because a paused worker may wake up late")
    'DECISION'
    """
    if _PITFALL.search(message.partition("\n")[0]):
        return "PITFALL"
    return "DECISION" if _DECISION.search(message) else "FACT"


def module_of(fact: Row) -> str | None:
    """The folder that most of the changed files have in common."""
    folders = Counter(
        "/".join(path["path"].strip("/").split("/")[:-1][:MODULE_DEPTH]) for path in fact["paths_json"]
    )
    folders.pop("", None)
    if not folders:
        return None
    found, _ = max(folders.items(), key=lambda item: (item[1], item[0]))
    return _cut(_UNPRINTABLE.sub(" ", found.replace("\n", " ").replace("\t", " ")), MAX_MODULE) or None


def _message(fact: Row) -> tuple[str, str]:
    said = _UNPRINTABLE.sub(" ", fact["message"].replace("\r\n", "\n")).strip()
    subject, _, body = said.partition("\n")
    return subject.replace("\t", " ").strip(), body.strip()


def _parts(body: str) -> tuple[str, str]:
    """The first paragraph sums up; the rest are details."""
    summary, _, details = body.partition("\n\n")
    room = DETAILS_ROOM // 2
    return _cut(summary.strip(), SUMMARY_ROOM), _cut(details.strip(), room)


def _touched(fact: Row) -> str:
    """What can be said of a change that its author explained in one line, or not at all."""
    where = f", mostly in {module}" if (module := module_of(fact)) else ""
    count = fact["files"]
    return "A change." if count is None else f"A change of {count} file{'' if count == 1 else 's'}{where}."


def _changed(fact: Row) -> str:
    paths: Sequence[Mapping[str, Any]] = fact["paths_json"]
    if not paths:
        return ""
    shown = [
        _cut(_UNPRINTABLE.sub(" ", path["path"].replace("\n", " ")), 80) for path in paths[:LISTED_PATHS]
    ]
    more = (fact["files"] or len(paths)) - len(shown)
    return f"Changed: {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")


def _said_by(fact: Row) -> str:
    when = f" on {fact['at']:%Y-%m-%d}" if fact["at"] else ""
    by = f" by {_UNPRINTABLE.sub(' ', fact['author_name'])[:80]}" if fact["author_name"] else ""
    where = f", {fact['web_url']}" if fact["web_url"] else ""
    return f"Source: {source_of(fact)}{by}{when}{where}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1].rstrip()}…"


def _problem(value: object, *, of_flag: bool) -> str | None:
    if of_flag:
        return None if isinstance(value, bool) else "must be true or false"
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
        return "must be a list of patterns"
    return f"must have at most {MAX_PATTERNS} patterns" if len(value) > MAX_PATTERNS else None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    folded = name.casefold().lstrip("/")
    return any(fnmatchcase(folded, p.casefold().replace("[", "[[]").replace("?", "[?]")) for p in patterns)
