"""The memory server's statements as `Query` values.

Everything a caller can ask is scoped by tenant: there is no such statement that
reads or writes across tenants, and none that does half of a promise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from engram.kernel.content import payload_sha
from engram.memory.requests import Change, Filters
from engram.postgres import Query, Row, load_sql
from engram.postgres.arrays import Reals
from engram.postgres.query import any_row, maybe_row, nothing, one_row, rows, scalar
from engram.search.embeddings import MAX_CHARS
from engram.search.frequencies import Frequencies, read_frequencies
from engram.search.lookup import ENOUGH, Lookup
from engram.search.tokens import tokenize, tsvector

_SQL = load_sql(__package__, "store.sql")

# PostgreSQL takes at most 1 MiB of tsvector; positions of the most tokens there
# can be need 0.1 MiB of it. Only text made to be awkward comes near this.
_WORD_BYTES = 900_000


@dataclass(frozen=True, slots=True)
class Added:
    """What became of an add. `same_request` is false for a key used for something else."""

    id: UUID
    deduplicated: bool
    same_request: bool


def add(
    tenant: str,
    content: str,
    tags: Sequence[str],
    metadata: dict[str, Any],
    *,
    key: str | None = None,
    vector: Reals | None = None,
) -> Query[Added]:
    """Without a vector the memory waits for one, and is found by its words meanwhile."""
    params = {
        "tenant": tenant,
        "key": key,
        "space": space_of(tags),
        "content_sha": payload_sha(content),
        "content": content,
        "tags": list(tags),
        "metadata": _json(metadata),
        "words": _words(content),
        "embedding": vector,
    }
    return Query(_SQL["add"], lambda found: Added(**one_row(found)), params)


def change(tenant: str, memory_id: UUID, asked: Change) -> Query[bool]:
    """New content waits for its vector: see `fill`."""
    content, tags, metadata = asked.content, asked.tags, asked.metadata
    params = {
        "tenant": tenant,
        "id": memory_id,
        "content": content,
        "content_sha": None if content is None else payload_sha(content),
        "words": None if content is None else _words(content),
        "tags": tags,
        "space": None if tags is None else space_of(tags),
        "metadata": None if metadata is None else _json(metadata),
    }
    return Query(_SQL["change"], any_row, params)


def by_words(tenant: str, lookup: Lookup, filters: Filters, limit: int) -> Query[list[Row]]:
    params = {
        **_passing(tenant, filters),
        "terms": lookup.terms,
        "weights": lookup.weights,
        "sources": lookup.sources,
        "together": lookup.together,
        "sample": lookup.sample,
        "rows": lookup.rows,
        "enough": ENOUGH,
        "limit": limit,
    }
    return Query(_SQL["by_words"], rows, params)


def nearest(tenant: str, vector: Reals, close: float, filters: Filters, limit: int) -> Query[list[Row]]:
    params = {**_passing(tenant, filters), "vector": vector, "close": close, "limit": limit}
    return Query(_SQL["nearest"], rows, params)


def contents(tenant: str, ids: Sequence[UUID]) -> Query[list[Row]]:
    return Query(_SQL["contents"], rows, {"tenant": tenant, "ids": list(ids)})


def get(tenant: str, memory_id: UUID) -> Query[Row | None]:
    return Query(_SQL["get"], maybe_row, {"tenant": tenant, "id": memory_id})


def newest(tenant: str, limit: int, offset: int) -> Query[list[Row]]:
    return Query(_SQL["newest"], rows, {"tenant": tenant, "limit": limit, "offset": offset})


def delete(tenant: str, memory_id: UUID) -> Query[bool]:
    return Query(_SQL["delete"], any_row, {"tenant": tenant, "id": memory_id})


def ping() -> Query[None]:
    return Query(_SQL["ping"], nothing)


def use_vectors(model: str, dimensions: int) -> Query[str | None]:
    """Why vectors cannot be kept; None once they can."""
    return Query(_SQL["use_vectors"], scalar, {"model": model, "dimensions": dimensions})


def count_waiting() -> Query[int]:
    return Query(_SQL["count_waiting"], scalar)


def waiting(limit: int) -> Query[list[Row]]:
    return Query(_SQL["waiting"], rows, {"limit": limit, "chars": MAX_CHARS})


def fill(of: Sequence[Mapping[str, Any]], numbers: Reals, dimensions: int) -> Query[int]:
    """`numbers` has the vectors of these rows one after the other."""
    params = {**_versions(of), "numbers": numbers, "dimensions": dimensions}
    return Query(_SQL["fill"], len, params)


def leave(of: Sequence[Mapping[str, Any]]) -> Query[int]:
    return Query(_SQL["leave"], len, _versions(of))


def frequencies() -> Query[Frequencies]:
    return Query(_SQL["frequencies"], read_frequencies)


def near_indexes() -> Query[list[Row]]:
    return Query(_SQL["near_indexes"], rows)


def space_of(tags: Sequence[str]) -> str:
    """The space a memory belongs to: `x` of its first tag `space:x`, else none.

    >>> space_of(["sha:ab", "space:team:payments"])
    'team:payments'
    """
    return next((tag.removeprefix("space:") for tag in tags if tag.startswith("space:")), "")


def _passing(tenant: str, filters: Filters) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "tags": filters.tags,
        "metadata": None if filters.metadata is None else _json(filters.metadata),
        "since": filters.since,
        "until": filters.until,
    }


def _versions(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as they were read: a content that has changed since is another version."""
    return {"ids": [row["id"] for row in of], "shas": [row["content_sha"] for row in of]}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _words(content: str) -> str:
    return tsvector(list(_indexable(tokenize(content))))


def _indexable(tokens: Sequence[str]) -> Iterator[str]:
    left = _WORD_BYTES
    for token in tokens:
        left -= len(token.encode())
        if left < 0:
            return
        yield token
