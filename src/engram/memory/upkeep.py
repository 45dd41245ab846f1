"""What search needs now and then: fresh numbers from ANALYZE, and an index over the vectors."""

from __future__ import annotations

from engram.memory import store
from engram.memory.vectors import Vectors
from engram.postgres import AsyncExecutor
from engram.postgres.near_index import INDEX_FROM_ROWS, NearIndex
from engram.search.frequencies import Frequencies

PREFIX = "memories_near_"


class Upkeep:
    def __init__(
        self, dsn: str, db: AsyncExecutor, vectors: Vectors, *, index_from: int = INDEX_FROM_ROWS
    ) -> None:
        self.frequencies = Frequencies()
        self._db = db
        self._vectors = vectors
        self._index = NearIndex(
            dsn,
            db,
            table=("public", "memories"),
            prefix=PREFIX,
            listed=store.near_indexes,
            subject="memory",
            index_from=index_from,
        )

    async def run_once(self) -> int:
        """Answers 0: there is nothing more to do before the next round."""
        self.frequencies = await self._db.run(store.frequencies())
        if self._vectors.state in ("ready", "resting"):
            await self._index.keep(self.frequencies.rows or 0)
        return 0
