"""The vectors of memories: `engram.search.vectors` over this server's own table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from engram.kernel.content import payload_sha
from engram.memory import store
from engram.postgres import AsyncExecutor, Row
from engram.postgres.arrays import Reals
from engram.search import vectors
from engram.search.embeddings import Embedder
from engram.search.vectors import Version

if TYPE_CHECKING:
    from engram.search.embeddings import Matrix


class Vectors(vectors.Vectors):
    def __init__(self, db: AsyncExecutor, embedder: Embedder) -> None:
        self._memories = _Memories(db)
        super().__init__(self._memories, embedder)

    async def of(self, text: str) -> Reals | None:
        """The text's vector, or None: that is never a reason not to store or not to answer."""
        vector = await self.vector(text)
        return None if vector is None else Reals(vector)

    async def refill(self, memory_id: UUID, content: str) -> None:
        """Content has changed: its vector now, if that can be, else by the background task."""
        vector = await self.vector(content)
        if vector is not None:
            changed = {"id": memory_id, "content_sha": payload_sha(content)}
            await self._memories.fill([changed], vector.reshape(1, -1))
        else:
            self.wake.set()


class _Memories:
    subject = "memory"

    def __init__(self, db: AsyncExecutor) -> None:
        self._db = db

    async def use(self, model: str, dimensions: int) -> str | None:
        return await self._db.run(store.use_vectors(model, dimensions))

    async def waiting(self, limit: int) -> list[Row]:
        return await self._db.run(store.waiting(limit))

    async def count_waiting(self) -> int:
        return await self._db.run(store.count_waiting())

    async def fill(self, batch: Sequence[Version], vectors: Matrix) -> None:
        await self._db.run(store.fill(batch, Reals(vectors), vectors.shape[1]))

    async def leave(self, batch: Sequence[Version]) -> None:
        await self._db.run(store.leave(batch))
