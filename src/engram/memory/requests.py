"""Bodies and parameters into checked values; every problem is named by its field.

What cannot be stored and given back exactly is refused here, so that nothing
after this module has to ask: NUL and lone surrogates, which PostgreSQL and
UTF-8 cannot hold, numbers that are not finite, and nesting without end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from engram.kernel.content import why_unstorable
from engram.kernel.errors import Forbidden, InputError, NotFound

MAX_CONTENT = 200_000
MAX_KEY = 200
MAX_TAGS = 100
MAX_TAG = 300  # the space is part of an index entry, which PostgreSQL bounds at 2,700 bytes
MAX_K = 100
MAX_PAGE = 1000
_MAX_OFFSET = 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_MILLISECONDS = 253_402_300_799_000  # the end of the year 9999
# Every memory is of this sector, and its salience is 1: see `app`.
SECTOR = "semantic"
SALIENCE = 1.0

# OpenMemory's names and ours; a filter that is not understood is refused, for
# without it the answer would hold what was to be left out.
FILTERS = frozenset(
    {"tags", "metadata", "since", "until", "startTime", "endTime", "sector", "min_score", "user_id"}
)


@dataclass(frozen=True, slots=True)
class Add:
    content: str
    tags: list[str]
    metadata: dict[str, Any]
    key: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """What is None stays as it is."""

    content: str | None
    tags: list[str] | None
    metadata: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Filters:
    """What a match must have: all the tags, these entries of metadata, an arrival in this time."""

    tags: list[str] = field(default_factory=list)
    metadata: dict[str, Any] | None = None
    since: datetime | None = None
    until: datetime | None = None
    nothing: bool = False
    """No memory passes: another sector, or a salience that none has."""


@dataclass(frozen=True, slots=True)
class Search:
    query: str
    k: int
    filters: Filters


@dataclass(frozen=True, slots=True)
class Page:
    limit: int
    offset: int


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise InputError("the body is not JSON", fields={"body": "is not valid JSON"}) from None
    if not isinstance(parsed, dict):
        raise InputError("the body is not an object", fields={"body": "must be a JSON object"})
    return parsed


def read_add(body: Mapping[str, Any], key: str | None, tenant: str) -> Add:
    fields = _Fields(body)
    add = Add(fields.content("content"), fields.tags("tags"), fields.mapping("metadata"), key)
    if key is not None and not (1 <= len(key) <= MAX_KEY and key.isprintable()):
        fields.refuse("Idempotency-Key", f"must have 1 to {MAX_KEY} printable characters")
    fields.done(tenant)
    return add


def read_change(body: Mapping[str, Any], tenant: str) -> Change:
    fields = _Fields(body)
    given = {name for name in ("content", "tags", "metadata") if body.get(name) is not None}
    if not given:
        fields.refuse("body", "must have content, tags or metadata")
    change = Change(
        content=fields.content("content") if "content" in given else None,
        tags=fields.tags("tags") if "tags" in given else None,
        metadata=fields.mapping("metadata") if "metadata" in given else None,
    )
    fields.done(tenant)
    return change


def read_search(body: Mapping[str, Any], tenant: str) -> Search:
    fields = _Fields(body)
    query, k = fields.text("query", MAX_CONTENT), fields.integer("k", 8, 1, MAX_K)
    given = fields.mapping("filters")
    inside = _Fields(given, prefix="filters.", problems=fields.problems)
    for name in set(given) - FILTERS:
        inside.refuse(name, f"is not a filter; there are {', '.join(sorted(FILTERS))}")
    search = Search(query, k, _filters(inside, given))
    inside.done(tenant)
    return search


def _filters(fields: _Fields, given: Mapping[str, Any]) -> Filters:
    since, until = fields.moment("since"), fields.moment("until")
    start, end = fields.moment("startTime"), fields.moment("endTime")
    sector, salience = given.get("sector"), fields.number("min_score")
    if sector is not None and not isinstance(sector, str):
        fields.refuse("sector", "must be a string")
    return Filters(
        tags=fields.tags("tags"),
        metadata=fields.mapping("metadata") or None,
        since=since or start,
        until=until or end,
        nothing=sector not in (None, SECTOR) or (salience is not None and salience > SALIENCE),
    )


def read_page(params: Mapping[str, str], tenant: str) -> Page:
    numbers = {name: _number(params[name]) for name in ("l", "u") if name in params}
    fields = _Fields({**params, **numbers})
    page = Page(fields.integer("l", 100, 1, MAX_PAGE), fields.integer("u", 0, 0, _MAX_OFFSET))
    fields.done(tenant)
    return page


def read_id(text: str) -> UUID:
    """An id that is not one of ours in form is no memory's: not found, not invalid."""
    try:
        parsed = UUID(text)
    except ValueError:
        raise NotFound("no such memory") from None
    if str(parsed) != text.lower():
        raise NotFound("no such memory")
    return parsed


class _Fields:
    """The fields of one object; problems are collected and raised together by `done`."""

    def __init__(
        self, values: Mapping[str, Any], *, prefix: str = "", problems: dict[str, str] | None = None
    ) -> None:
        self._values = values
        self._prefix = prefix
        self.problems: dict[str, str] = {} if problems is None else problems

    def refuse(self, name: str, problem: str) -> None:
        self.problems.setdefault(self._prefix + name, problem)

    def content(self, name: str) -> str:
        value = self.text(name, MAX_CONTENT)
        if isinstance(self._values.get(name), str) and not value.strip():
            self.refuse(name, "must not be empty")
        return value

    def text(self, name: str, longest: int) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            self.refuse(name, "must be a string")
            return ""
        if len(value) > longest:
            self.refuse(name, f"must have at most {longest} characters")
        self._refuse_unstorable(name, value)
        return value

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not int or not lowest <= value <= highest:
            self.refuse(name, f"must be a whole number from {lowest} to {highest}")
            return default
        return value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        self.refuse(name, "must be a number")
        return None

    def moment(self, name: str) -> datetime | None:
        """Milliseconds since 1970, as every time in this API."""
        if self._values.get(name) is None:
            return None
        return _EPOCH + timedelta(milliseconds=self.integer(name, 0, 0, _MAX_MILLISECONDS))

    def tags(self, name: str) -> list[str]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(tag, str) for tag in value):
            self.refuse(name, "must be a list of strings")
            return []
        if len(value) > MAX_TAGS or any(len(tag) > MAX_TAG for tag in value):
            self.refuse(name, f"must be at most {MAX_TAGS} tags of at most {MAX_TAG} characters")
        self._refuse_unstorable(name, value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
            return {}
        self._refuse_unstorable(name, value)
        return value

    def done(self, tenant: str) -> None:
        """Raise what was found; only then ask whose memories are meant."""
        user_id = self._values.get("user_id")
        if user_id is not None and not isinstance(user_id, str):
            self.refuse("user_id", "must be a string")
        if self.problems:
            raise InputError("the request is not valid", fields=self.problems)
        if user_id is not None and user_id != tenant:
            raise Forbidden("that user is another tenant", context={"error": "tenant_mismatch"})

    def _refuse_unstorable(self, name: str, value: object) -> None:
        problem = why_unstorable(value)
        if problem:
            self.refuse(name, problem)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) <= 12 else text
