"""What the table of passages needs now and then: vectors for those that wait, an index over all."""

from __future__ import annotations

from engram.ingest import segments
from engram.ingest.vectors import KnowledgeVectors
from engram.postgres import AsyncExecutor
from engram.postgres.near_index import INDEX_FROM_ROWS, NearIndex


class KnowledgeUpkeep:
    def __init__(
        self, dsn: str, db: AsyncExecutor, vectors: KnowledgeVectors, *, index_from: int = INDEX_FROM_ROWS
    ) -> None:
        self._db = db
        self._vectors = vectors
        self._index = NearIndex(
            dsn,
            db,
            table=("ingest", "knowledge_segment"),
            prefix=segments.PREFIX,
            listed=segments.near_indexes,
            subject="knowledge",
            index_from=index_from,
        )

    async def run_once(self) -> int:
        """How many passages got their vectors; the index is looked at when none wait any more."""
        if filled := await self._vectors.run_once():
            return filled
        if self._vectors.home.in_rows and self._vectors.state in ("ready", "resting"):
            known = await self._db.run(segments.frequencies())
            await self._index.keep(known.rows or 0)
        return 0
