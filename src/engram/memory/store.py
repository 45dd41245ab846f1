"""The memory server's statements as `Query` values.

Everything is scoped by tenant: there is no statement that reads or writes
across tenants, and none that does half of a promise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from engram.kernel.content import payload_sha
from engram.postgres import Query, Row, load_sql
from engram.postgres.query import any_row, maybe_row, nothing, one_row, rows
from engram.search.tokens import any_of, tokenize, tsvector

_SQL = load_sql(__package__, "store.sql")

# PostgreSQL takes at most 1 MiB of tsvector; positions of the most tokens there
# can be need 0.1 MiB of it. Only text made to be awkward comes near this.
_WORD_BYTES = 900_000
_QUERY_WORDS = 32
_CANDIDATES = 500


@dataclass(frozen=True, slots=True)
class Added:
    """What became of an add. `same_request` is false for a key used for something else."""

    id: UUID
    deduplicated: bool
    same_request: bool


def add(
    tenant: str, content: str, tags: Sequence[str], metadata: dict[str, Any], *, key: str | None = None
) -> Query[Added]:
    params = {
        "tenant": tenant,
        "key": key,
        "space": space_of(tags),
        "content_sha": payload_sha(content),
        "content": content,
        "tags": list(tags),
        "metadata": json.dumps(metadata, ensure_ascii=False),
        "words": tsvector(list(_indexable(tokenize(content)))),
    }
    return Query(_SQL["add"], lambda found: Added(**one_row(found)), params)


def search(tenant: str, text: str, k: int, tags: Sequence[str] = ()) -> Query[list[Row]] | None:
    """None when the text holds no word to look for."""
    words = list(dict.fromkeys(tokenize(text)))[:_QUERY_WORDS]
    if not words:
        return None
    params = {
        "tenant": tenant,
        "words": [any_of([word]) for word in words],
        "tags": list(tags),
        "k": k,
        "enough": _CANDIDATES,
    }
    return Query(_SQL["search"], rows, params)


def get(tenant: str, memory_id: UUID) -> Query[Row | None]:
    return Query(_SQL["get"], maybe_row, {"tenant": tenant, "id": memory_id})


def newest(tenant: str, limit: int, offset: int) -> Query[list[Row]]:
    return Query(_SQL["newest"], rows, {"tenant": tenant, "limit": limit, "offset": offset})


def delete(tenant: str, memory_id: UUID) -> Query[bool]:
    return Query(_SQL["delete"], any_row, {"tenant": tenant, "id": memory_id})


def ping() -> Query[None]:
    return Query(_SQL["ping"], nothing)


def space_of(tags: Sequence[str]) -> str:
    """The space a memory belongs to: `x` of its first tag `space:x`, else none.

    >>> space_of(["sha:ab", "space:team:payments"])
    'team:payments'
    """
    return next((tag.removeprefix("space:") for tag in tags if tag.startswith("space:")), "")


def _indexable(tokens: Sequence[str]) -> Iterator[str]:
    left = _WORD_BYTES
    for token in tokens:
        left -= len(token.encode())
        if left < 0:
            return
        yield token
