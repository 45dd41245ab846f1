"""Search by words and by meaning at once: two rankings, fused by rank.

Words find what was named, vectors what was meant; a memory that both find comes
first. A match has a word of the question or is near to it. Whatever the filters
are, the answer has `k` matches if there are so many.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from engram.memory import store
from engram.memory.requests import Search
from engram.memory.upkeep import Upkeep
from engram.memory.vectors import Vectors
from engram.postgres import AsyncExecutor
from engram.search import lookup
from engram.search.asking import terms
from engram.search.fusion import RANK_OFFSET, fuse

# Measured on tests/retrieval: benchmarks/retrieval.py prints the table.
WORDS_WEIGHT = 1.0
VECTORS_WEIGHT = 0.97
# How deep each ranking goes, at least: what is tenth in both may be first together.
_DEPTH = 50
_MAX_TERMS = 32


class HybridSearch:
    def __init__(self, db: AsyncExecutor, vectors: Vectors, upkeep: Upkeep) -> None:
        self._db = db
        self._vectors = vectors
        self._upkeep = upkeep

    async def matches(self, tenant: str, asked: Search) -> list[dict[str, Any]]:
        """Rows of id, content, created_at and score, best first. The best there can be has score 1."""
        if asked.filters.nothing or not asked.query.strip():
            return []
        words, near = await asyncio.gather(self.by_words(tenant, asked), self.by_vectors(tenant, asked))
        ranked = fuse(words, near or [], weights=(WORDS_WEIGHT, VECTORS_WEIGHT))[: asked.k]
        best = (WORDS_WEIGHT + (0.0 if near is None else VECTORS_WEIGHT)) / (RANK_OFFSET + 1)
        rows = await self._db.run(store.contents(tenant, [memory_id for memory_id, _ in ranked]))
        by_id = {row["id"]: row for row in rows}
        # One that was deleted meanwhile is left out.
        return [{**by_id[key], "score": min(1.0, score / best)} for key, score in ranked if key in by_id]

    async def by_words(self, tenant: str, asked: Search) -> list[UUID]:
        looked = terms(asked.query, _MAX_TERMS)
        if not looked:
            return []
        tags = asked.filters.tags
        planned = lookup.plan(looked, self._upkeep.frequencies, tags)
        found = await self._words(tenant, planned, asked)
        if len(found) < asked.k and planned.unlooked:
            found = await self._words(tenant, planned.widened(), asked)
        return found

    async def by_vectors(self, tenant: str, asked: Search) -> list[UUID] | None:
        """None when vectors were not to be had."""
        vector = await self._vectors.of(asked.query)
        if vector is None:
            return None
        close = self._vectors.embedder.close
        query = store.nearest(tenant, vector, close, asked.filters, _depth(asked))
        return [row["id"] for row in await self._db.run(query)]

    async def _words(self, tenant: str, planned: lookup.Lookup, asked: Search) -> list[UUID]:
        query = store.by_words(tenant, planned, asked.filters, _depth(asked))
        return [row["id"] for row in await self._db.run(query)]


def _depth(asked: Search) -> int:
    return max(asked.k, _DEPTH)
