"""The vector of a memory: made when it is added, or later, but never in the way of keeping it.

    starting   the model is being loaded, or has not answered yet
    ready      adds and queries get their vectors
    resting    the model failed; the background task tries it before anybody else does
    off        this database cannot keep vectors, or there is no model: words only

In every state but `ready` a memory is stored without a vector and waits for
one. The background task fills what waits, oldest first, batch by batch; a batch
is one statement, so a crash costs at most the batch in hand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engram.kernel.content import payload_sha
from engram.kernel.errors import EmbeddingFailed
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.memory import store
from engram.memory.arrays import Reals
from engram.postgres import AsyncExecutor, Row
from engram.search.embeddings import Embedder, Together

if TYPE_CHECKING:
    from uuid import UUID

    from engram.search.embeddings import Matrix, Vector

log = logging.getLogger(__name__)

BATCH = 64
# A caller waits this long for a vector; without it, it is answered by words.
PATIENCE_SECONDS = 1.0
_TELL_EVERY_SECONDS = 5.0
_PROBE = "is anybody there?"


class Vectors:
    def __init__(self, db: AsyncExecutor, embedder: Embedder) -> None:
        self.embedder = embedder
        self.state = "starting"
        self.because = "the embedding model has not answered yet"
        self.wake = asyncio.Event()
        self._db = db
        self._together = Together(embedder)
        self._dimensions: int | None = None
        self._progress = _Progress()

    async def of(self, text: str) -> Reals | None:
        """The text's vector, or None: that is never a reason not to store or not to answer."""
        if self.state != "ready":
            return None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                vector = await self._together.vector(text)
        except TimeoutError:
            self._rest("the embedding model is slow")
            return None
        except EmbeddingFailed as error:
            # A refusal is about these texts: the background task finds out about which.
            if error.retryable:
                self._rest(error.message)
            return None
        return Reals(vector) if self._fits(vector) else None

    async def refill(self, memory_id: UUID, content: str) -> None:
        """Content has changed: its vector now, if that can be, else by the background task."""
        vector = await self.of(content)
        if vector is not None:
            changed = {"id": memory_id, "content_sha": payload_sha(content)}
            await self._db.run(store.fill([changed], vector, self._dimensions or 0))
        else:
            self.wake.set()

    async def run_once(self) -> int:
        """Make ready if need be, then give one batch of waiting memories their vectors."""
        try:
            return await self._advance()
        except EmbeddingFailed as error:
            if not error.retryable:
                self._off(error.message)
            else:
                self._rest(error.message)
            return 0

    async def _advance(self) -> int:
        if self.state == "off":
            return 0
        if self._dimensions is None:
            await self._begin()
            return int(self.state == "ready")
        batch = await self._db.run(store.waiting(BATCH))
        if batch:
            await self._fill(batch)
        elif self.state == "resting":
            await self.embedder.embed([_PROBE])
        if self.state == "resting":
            self._ready()
        await self._progress.tell(self._db, len(batch))
        return len(batch)

    async def _begin(self) -> None:
        dimensions = await self.embedder.dimensions()
        why_not = await self._db.run(store.use_vectors(self.embedder.name, dimensions))
        if why_not:
            self._off(why_not)
        else:
            self._dimensions = dimensions
            self._ready()

    async def _fill(self, batch: Sequence[Row]) -> None:
        try:
            found = await self.embedder.embed([row["content"] for row in batch])
        except EmbeddingFailed as error:
            if error.retryable:
                raise
            await self._without(batch, error)
            return
        if self._fits(found):
            await self._db.run(store.fill(batch, Reals(found), found.shape[1]))
            failpoint("vectors.after_fill")

    async def _without(self, batch: Sequence[Row], error: EmbeddingFailed) -> None:
        """Something in the batch was refused: find out what, and let the rest have their vectors."""
        if len(batch) > 1:
            for row in batch:
                await self._fill([row])
            return
        log.warning("memory.no_vector", extra=fields(memory=str(batch[0]["id"]), why=error.message))
        await self._db.run(store.leave(batch))

    def _fits(self, found: Vector | Matrix) -> bool:
        """A model whose vectors have become longer or shorter is another model: begin anew."""
        if found.shape[-1] == self._dimensions:
            return True
        self._dimensions = None
        self._rest("the embedding model has changed")
        return False

    def _ready(self) -> None:
        self.state, self.because = "ready", ""
        log.info("memory.vectors_ready", extra=fields(model=self.embedder.name, dimensions=self._dimensions))

    def _rest(self, because: str) -> None:
        if self.state != "resting":
            log.warning("memory.vectors_resting", extra=fields(because=because))
        self.state, self.because = "resting", because
        self.wake.set()

    def _off(self, because: str) -> None:
        self.state, self.because = "off", because
        log.warning("memory.words_only", extra=fields(because=because))


class _Progress:
    """Tells how far a long filling has come; a few stragglers are not worth a line."""

    def __init__(self) -> None:
        self._done = 0
        self._told_at: float | None = None

    async def tell(self, db: AsyncExecutor, filled: int) -> None:
        now = asyncio.get_running_loop().time()
        if filled == BATCH and self._told_at is None:
            self._told_at = now - _TELL_EVERY_SECONDS
        if self._told_at is None:
            return
        self._done += filled
        if filled and now - self._told_at >= _TELL_EVERY_SECONDS:
            self._told_at = now
            left = await db.run(store.count_waiting())
            log.info("memory.vectors_filling", extra=fields(done=self._done, left=left))
        elif not filled:
            log.info("memory.vectors_filled", extra=fields(done=self._done))
            self._done, self._told_at = 0, None
