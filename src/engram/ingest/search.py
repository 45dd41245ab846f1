"""Search in documents by words and by meaning at once: two rankings, fused by rank.

Words find what was named, vectors what was meant. Without vectors (no pgvector,
a model or a Chroma that fails) the answer comes from words alone and says so.
A passage is seen by the owner of its document and by nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from uuid import UUID

from engram.ingest import segments
from engram.ingest.segments import Key
from engram.ingest.vectors import KnowledgeVectors
from engram.kernel.errors import EmbeddingFailed, InputError, VectorStoreFailed
from engram.kernel.logs import fields
from engram.kernel.runloop import run_loop
from engram.postgres import AsyncExecutor
from engram.search import lookup
from engram.search.asking import terms
from engram.search.frequencies import Frequencies
from engram.search.fusion import RANK_OFFSET, fuse

log = logging.getLogger(__name__)

# As measured for memories, where the same model and the same words are fused: benchmarks/retrieval.py.
WORDS_WEIGHT = 1.0
VECTORS_WEIGHT = 0.97
MAX_QUERY_CHARS = 2_000
MAX_RESULTS = 50
_DEPTH = 50
_MAX_TERMS = 32
_REFRESH_SECONDS = 30.0
# The first search waits so long at most for the model to be loaded.
_FIRST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Hit:
    document_id: UUID
    title: str
    heading: str
    page: int | None
    ordinal: int
    passage: str
    score: float


@dataclass(frozen=True, slots=True)
class Found:
    """`words_only_because` tells why meaning was not searched; None when it was."""

    hits: list[Hit]
    words_only_because: str | None


class KnowledgeSearch:
    """Costs nothing until it is first asked; then it keeps what it knows of the table fresh."""

    def __init__(self, db: AsyncExecutor, vectors: KnowledgeVectors) -> None:
        self._db = db
        self.vectors = vectors
        self._frequencies = Frequencies()
        self._stop = asyncio.Event()
        self._first = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    async def search(self, owner: str, query: str, k: int = 10, document_id: UUID | None = None) -> Found:
        """The owner's best passages; the best there can be has score 1."""
        _check(query, k)
        await self._ready()
        words, near = await asyncio.gather(
            self.by_words(owner, query, k, document_id), self.by_vectors(owner, query, k, document_id)
        )
        ranked = fuse(words, near or [], weights=(WORDS_WEIGHT, VECTORS_WEIGHT))[:k]
        best = (WORDS_WEIGHT + (0.0 if near is None else VECTORS_WEIGHT)) / (RANK_OFFSET + 1)
        rows = await self._db.run(segments.contents(owner, document_id, [key for key, _ in ranked]))
        told = {(row["document_id"], row["ordinal"]): row for row in rows}
        # One that was deleted meanwhile is left out.
        hits = [
            Hit(
                document_id=key[0],
                title=row["title"],
                heading=row["heading"],
                page=row["page"],
                ordinal=key[1],
                passage=row["content"],
                score=min(1.0, score / best),
            )
            for key, score in ranked
            if (row := told.get(key)) is not None
        ]
        return Found(hits, None if near is not None else self.vectors.because or "the model is slow")

    async def by_words(self, owner: str, query: str, k: int, document_id: UUID | None = None) -> list[Key]:
        looked = terms(query, _MAX_TERMS)
        if not looked:
            return []
        tags = segments.tags_of(owner, document_id)
        planned = lookup.plan(looked, self._frequencies, tags)
        found = await self._db.run(segments.by_words(tags, planned, max(k, _DEPTH)))
        if len(found) < k and planned.unlooked:
            found = await self._db.run(segments.by_words(tags, planned.widened(), max(k, _DEPTH)))
        return found

    async def by_vectors(
        self, owner: str, query: str, k: int, document_id: UUID | None = None
    ) -> list[Key] | None:
        """None when vectors were not to be had."""
        vector = await self.vectors.vector(query)
        if vector is None:
            return None
        close = self.vectors.embedder.close
        try:
            return await self.vectors.home.nearest(owner, document_id, vector, close, max(k, _DEPTH))
        except VectorStoreFailed as error:
            self.vectors.because = error.message
            return None

    async def refresh(self) -> int:
        """What search needs now and then. Answers 0: there is nothing more to do before the next round."""
        self._frequencies = await self._db.run(segments.frequencies())
        try:
            await self.vectors.run_once()
        except VectorStoreFailed as error:
            self.vectors.because = error.message
        return 0

    async def shut(self) -> None:
        self._stop.set()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])

    def _is_fresh(self) -> bool:
        return self._refreshing is not None and not self._refreshing.done()

    async def _ready(self) -> None:
        if self._is_fresh():
            return
        async with self._first:
            if not self._is_fresh():
                try:
                    async with asyncio.timeout(_FIRST_SECONDS):
                        await self.refresh()
                except (TimeoutError, EmbeddingFailed) as error:
                    log.warning("knowledge.not_ready", extra=fields(error=str(error)))
                loop = run_loop("knowledge", self.refresh, idle_seconds=_REFRESH_SECONDS, stop=self._stop)
                self._refreshing = asyncio.create_task(loop)
                self._refreshing.add_done_callback(_died)


def _died(task: asyncio.Task[None]) -> None:
    """The next search begins anew."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("knowledge.refresh_died", exc_info=error)


def _check(query: str, k: int) -> None:
    wrong = {}
    if not query.strip():
        wrong["query"] = "must not be empty"
    elif len(query) > MAX_QUERY_CHARS:
        wrong["query"] = f"takes at most {MAX_QUERY_CHARS} characters"
    if not 1 <= k <= MAX_RESULTS:
        wrong["top_k"] = f"must be between 1 and {MAX_RESULTS}"
    if wrong:
        raise InputError("the search cannot be understood", fields=wrong)
