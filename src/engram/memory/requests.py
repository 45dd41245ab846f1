"""Bodies and parameters into checked values; every problem is named by its field.

What cannot be stored and given back exactly is refused here, so that nothing
after this module has to ask: NUL and lone surrogates, which PostgreSQL and
UTF-8 cannot hold, numbers that are not finite, and nesting without end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Add:
    content: str
    tags: list[str]
    metadata: dict[str, Any]
    key: str | None


@dataclass(frozen=True, slots=True)
class Search:
    query: str
    k: int
    tags: list[str]


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
    content = fields.text("content", MAX_CONTENT)
    if isinstance(body.get("content"), str) and not content.strip():
        fields.refuse("content", "must not be empty")
    add = Add(content, fields.tags("tags"), fields.mapping("metadata"), key)
    if key is not None and not (1 <= len(key) <= MAX_KEY and key.isprintable()):
        fields.refuse("Idempotency-Key", f"must have 1 to {MAX_KEY} printable characters")
    fields.done(tenant)
    return add


def read_search(body: Mapping[str, Any], tenant: str) -> Search:
    fields = _Fields(body)
    query, k = fields.text("query", MAX_CONTENT), fields.integer("k", 8, 1, MAX_K)
    filters = _Fields(fields.mapping("filters"), prefix="filters.", problems=fields.problems)
    search = Search(query, k, filters.tags("tags"))
    filters.done(tenant)
    return search


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
