"""The passages of documents as rows: written under a task's lease, found by words and by vectors.

Every question is scoped by owner: there is no statement here that reads a
passage across owners for a caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from engram.ingest.chunking import Passage
from engram.ingest.seam import Work
from engram.postgres import Query, Row, load_sql
from engram.postgres.arrays import Reals
from engram.postgres.query import maybe_row, rows, scalar
from engram.search.frequencies import Frequencies, read_frequencies
from engram.search.lookup import ENOUGH, Lookup
from engram.search.tokens import tokenize, tsvector

if TYPE_CHECKING:
    from engram.search.embeddings import Matrix, Vector

_SQL = load_sql("engram.ingest", "segments.sql")

# A passage's name: its document and its place in it.
Key = tuple[UUID, int]
PREFIX = "segment_near_"


def write(
    work: Work, batch: Sequence[Passage], vectors: Matrix | None, *, count: int | None = None
) -> Query[Row | None]:
    """None: the task is not ours any more. Not `same`: the document is something else by now.

    Nothing was written in either case. The last batch tells the `count`.
    """
    params = {
        "task_id": work.task_id,
        "lease_token": work.lease_token,
        "document_id": work.document_id,
        "media_type": work.media_type,
        "title": work.title,
        "count": count,
        "ordinals": [passage.ordinal for passage in batch],
        "headings": [passage.heading for passage in batch],
        "pages": [passage.page for passage in batch],
        "contents": [passage.content for passage in batch],
        "words": [_words(work.title, passage) for passage in batch],
        "numbers": None if vectors is None else Reals(vectors),
        "dimensions": 0 if vectors is None else vectors.shape[1],
    }
    return Query(_SQL["write"], maybe_row, params)


def by_words(tags: Sequence[str], lookup: Lookup, limit: int) -> Query[list[Key]]:
    params = {
        "tags": list(tags),
        "terms": lookup.terms,
        "weights": lookup.weights,
        "sources": lookup.sources,
        "together": lookup.together,
        "sample": lookup.sample,
        "rows": lookup.rows,
        "enough": ENOUGH,
        "limit": limit,
    }
    return Query(_SQL["by_words"], _keys, params)


def nearest(tags: Sequence[str], vector: Vector, close: float, limit: int) -> Query[list[Key]]:
    params = {"tags": list(tags), "vector": Reals(vector), "close": close, "limit": limit}
    return Query(_SQL["nearest"], _keys, params)


def contents(owner: str, document_id: UUID | None, keys: Sequence[Key]) -> Query[list[Row]]:
    params = {
        "owner": owner,
        "tags": tags_of(owner, document_id),
        "document_ids": [document_id for document_id, _ in keys],
        "ordinals": [ordinal for _, ordinal in keys],
    }
    return Query(_SQL["contents"], rows, params)


def tags_of(owner: str, document_id: UUID | None = None) -> list[str]:
    """What a passage must be tagged with: its owner, and its document if one is asked for."""
    return [f"owner:{owner}", *([f"document:{document_id}"] if document_id else [])]


def use_vectors(model: str, dimensions: int) -> Query[str | None]:
    """Why vectors cannot be kept; None once they can."""
    return Query(_SQL["use_vectors"], scalar, {"model": model, "dimensions": dimensions})


def count_waiting() -> Query[int]:
    return Query(_SQL["count_waiting"], scalar)


def waiting(limit: int) -> Query[list[Row]]:
    return Query(_SQL["waiting"], rows, {"limit": limit})


def fill(of: Sequence[Mapping[str, Any]], vectors: Matrix) -> Query[int]:
    params = {**_versions(of), "numbers": Reals(vectors), "dimensions": vectors.shape[1]}
    return Query(_SQL["fill"], len, params)


def leave(of: Sequence[Mapping[str, Any]]) -> Query[int]:
    return Query(_SQL["leave"], len, _versions(of))


def frequencies() -> Query[Frequencies]:
    return Query(_SQL["frequencies"], read_frequencies)


def near_indexes() -> Query[list[Row]]:
    return Query(_SQL["near_indexes"], rows)


def _versions(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "document_ids": [row["document_id"] for row in of],
        "ordinals": [row["ordinal"] for row in of],
        "contents": [row["version"] for row in of],
    }


def _words(title: str, passage: Passage) -> str:
    """A passage is also found by the names of what it is part of."""
    return tsvector([*tokenize(f"{title}\n{passage.heading}"), *tokenize(passage.content)])


def _keys(found: list[Row]) -> list[Key]:
    return [(row["document_id"], row["ordinal"]) for row in found]
