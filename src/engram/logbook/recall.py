"""What else the logbook can recall while the memory server is away: candidates and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.types.json import Jsonb

from engram.logbook.config import Config
from engram.logbook.memories import ENOUGH_CANDIDATES, MAX_ASKED_WORDS, NO_FILTERS, Filters
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, rows, scalar
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import any_of, tokenize, tsvector

SQL = load_sql("engram.logbook", "recall.sql")


@primitive
def search(
    text: str,
    spaces: Sequence[str],
    limit: int = 10,
    config: Config | None = None,
    *,
    filters: Filters = NO_FILTERS,
) -> Query[list[dict[str, Any]]]:
    """Candidates and events with any of the words, within the given spaces, best first."""
    words = list(dict.fromkeys(tokenize(text)))[:MAX_ASKED_WORDS]
    params = {
        "asked": [any_of([word]) for word in words],
        "spaces": list(spaces),
        "limit": limit,
        "enough": ENOUGH_CANDIDATES,
        **filters.params(),
    }
    return Query(SQL["search"], rows, params)


@primitive
def add_candidate(
    target_space: str,
    kind: str,
    title: str,
    content_md: str,
    confidence: float = 0.5,
    evidence_refs_json: dict[str, Any] | None = None,
    config: Config | None = None,
    *,
    source_ref: str | None = None,
) -> Query[int]:
    """Keep something that may become a memory; who may read it follows from its space.

    `source_ref` names the fact it comes from: that has one candidate in a space.
    """
    params = {
        "target_space": target_space,
        "kind": kind,
        "title": title,
        "content_md": content_md,
        "confidence": confidence,
        "evidence_refs_json": Jsonb(evidence_refs_json or {}),
        "words": tsvector(tokenize(f"{title} {content_md}")),
        "source_ref": source_ref,
    }
    return Query(SQL["add_candidate"], scalar, params)
