"""The bare way to search: the statements alone, one after the other, on one connection."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row

from engram.memory import store
from engram.memory.requests import Filters
from engram.postgres.arrays import Reals
from engram.postgres.near_index import SESSION
from engram.search import lookup
from engram.search.asking import terms
from engram.search.embeddings import LocalEmbedder, embed_locally
from engram.search.fusion import fuse


class BareSearch:
    def __init__(self, dsn: str) -> None:
        self._connection: Any = psycopg.connect(dsn, autocommit=True, row_factory=dict_row, options=SESSION)
        self._known = self._run(store.frequencies())

    def search(self, question: str, tags: list[str], k: int) -> list[dict[str, Any]]:
        filters = Filters(tags=tags)
        planned = lookup.plan(terms(question, 32), self._known, tags)
        words = self._run(store.by_words("default", planned, filters, 50))
        vector = Reals(embed_locally([question])[0])
        near = self._run(store.nearest("default", vector, LocalEmbedder.close, filters, 50))
        best = [key for key, _ in fuse([row["id"] for row in words], [row["id"] for row in near])][:k]
        return list(self._run(store.contents("default", best)))

    def close(self) -> None:
        self._connection.close()

    def _run(self, query: Any) -> Any:
        return query.read(self._connection.execute(query.statement.text, query.params).fetchall())
