"""The bare way to search documents: the statements alone, one after the other, on one connection."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row

from engram.ingest import segments
from engram.postgres.near_index import SESSION
from engram.search import lookup
from engram.search.asking import terms
from engram.search.embeddings import LocalEmbedder, embed_locally
from engram.search.fusion import fuse


class BareSearch:
    def __init__(self, dsn: str) -> None:
        self._connection: Any = psycopg.connect(dsn, autocommit=True, row_factory=dict_row, options=SESSION)
        self._known = self._run(segments.frequencies())

    def search(self, owner: str, question: str, k: int) -> list[dict[str, Any]]:
        tags = segments.tags_of(owner)
        planned = lookup.plan(terms(question, 32), self._known, tags)
        words = self._run(segments.by_words(tags, planned, 50))
        vector = embed_locally([question])[0]
        near = self._run(segments.nearest(tags, vector, LocalEmbedder.close, 50))
        best = [key for key, _ in fuse(words, near)][:k]
        return list(self._run(segments.contents(owner, None, best)))

    def close(self) -> None:
        self._connection.close()

    def _run(self, query: Any) -> Any:
        return query.read(self._connection.execute(query.statement.text, query.params).fetchall())
