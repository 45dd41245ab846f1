"""Where the vectors of passages are kept: in their own rows, or with Chroma.

The rows are the truth either way: words are searched there, and a hit counts
only if its row is there and the asker may see it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from engram.ingest import segments
from engram.ingest.chunking import Passage
from engram.ingest.seam import Work
from engram.ingest.segments import Key
from engram.kernel.errors import EmbeddingFailed, VectorStoreFailed
from engram.kernel.logs import fields
from engram.postgres import AsyncExecutor, Row
from engram.search.vectors import Vectors, VectorTable, Version

if TYPE_CHECKING:
    from engram.search.embeddings import Embedder, Matrix, Vector

log = logging.getLogger(__name__)


class VectorHome(VectorTable, Protocol):
    """`in_rows`: they are written with the passages, and `put` has nothing to do."""

    in_rows: bool

    async def put(self, work: Work, batch: Sequence[Passage], vectors: Matrix) -> None:
        """Keep the vectors of passages whose rows are written."""

    async def trim(self, document_id: UUID, count: int) -> None:
        """Drop what is kept of the document's passages from `count` on; all of it, with 0."""

    async def nearest(
        self, owner: str, document_id: UUID | None, vector: Vector, close: float, limit: int
    ) -> list[Key]:
        """The owner's passages that are near, nearest first."""


class KnowledgeVectors(Vectors):
    """The states of `engram.search.vectors`, and the home that goes with them."""

    def __init__(self, home: VectorHome, embedder: Embedder) -> None:
        self.home = home
        super().__init__(home, embedder)

    async def discard(self, document_id: UUID) -> None:
        """Drop what the home keeps of a document that is to go, if it can be reached.

        What stays behind is never seen: a hit counts only if its row is there.
        """
        if self.home.in_rows:
            return
        try:
            if self._dimensions is None:
                await self._begin()
            await self.home.trim(document_id, 0)
        except (EmbeddingFailed, VectorStoreFailed) as error:
            left = fields(document=str(document_id), error=error.message)
            log.warning("knowledge.vectors_left_behind", extra=left)


class RowVectors:
    """pgvector, in the passages' own rows. `fills`: give those that wait their vectors."""

    subject = "knowledge"
    in_rows = True

    def __init__(self, db: AsyncExecutor, *, fills: bool = False) -> None:
        self._db = db
        self._fills = fills

    async def use(self, model: str, dimensions: int) -> str | None:
        return await self._db.run(segments.use_vectors(model, dimensions))

    async def waiting(self, limit: int) -> list[Row]:
        return await self._db.run(segments.waiting(limit)) if self._fills else []

    async def count_waiting(self) -> int:
        return await self._db.run(segments.count_waiting())

    async def fill(self, batch: Sequence[Version], vectors: Matrix) -> None:
        await self._db.run(segments.fill(batch, vectors))

    async def leave(self, batch: Sequence[Version]) -> None:
        await self._db.run(segments.leave(batch))

    async def put(self, work: Work, batch: Sequence[Passage], vectors: Matrix) -> None:
        """They are in the rows."""

    async def trim(self, document_id: UUID, count: int) -> None:
        """They went with the rows."""

    async def nearest(
        self, owner: str, document_id: UUID | None, vector: Vector, close: float, limit: int
    ) -> list[Key]:
        tags = segments.tags_of(owner, document_id)
        return await self._db.run(segments.nearest(tags, vector, close, limit))
