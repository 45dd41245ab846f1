"""The vectors of a table of texts: made when a text is added, or later, but never in the way of keeping it.

    starting   the model is being loaded, or has not answered yet
    ready      adds and queries get their vectors
    resting    the model failed; the background task tries it before anybody else does
    off        this database cannot keep vectors, or there is no model: words only

In every state but `ready` a text is stored without a vector and waits for one.
The background task fills what waits, oldest first, batch by batch; a batch is
one statement, so a crash costs at most the batch in hand. What the table is,
and how it is asked, is its owner's affair: see `VectorTable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engram.kernel.errors import EmbeddingFailed
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.search.embeddings import Embedder, Together

if TYPE_CHECKING:
    from engram.search.embeddings import Matrix, Vector

log = logging.getLogger(__name__)

BATCH = 64
# A caller waits this long for a vector; without it, it is answered by words.
PATIENCE_SECONDS = 1.0
_TELL_EVERY_SECONDS = 5.0
_PROBE = "is anybody there?"


# A text as it was read: `content`, and what tells its table which version that was.
Version = Mapping[str, Any]


class VectorTable(Protocol):
    """Where the vectors go. `subject` names it in log lines."""

    subject: str

    async def use(self, model: str, dimensions: int) -> str | None:
        """Make ready for this model's vectors; answers why that cannot be, or None."""

    async def waiting(self, limit: int) -> Sequence[Version]: ...

    async def count_waiting(self) -> int: ...

    async def fill(self, batch: Sequence[Version], vectors: Matrix) -> None:
        """Keep a row of `vectors` for each text, unless it has changed since it was read."""

    async def leave(self, batch: Sequence[Version]) -> None:
        """Of these no vector can be made: they wait no longer."""


class Vectors:
    def __init__(self, table: VectorTable, embedder: Embedder) -> None:
        self.embedder = embedder
        self.state = "starting"
        self.because = "the embedding model has not answered yet"
        self.wake = asyncio.Event()
        self._table = table
        self._together = Together(embedder)
        self._dimensions: int | None = None
        self._progress = _Progress(table)

    async def vector(self, text: str) -> Vector | None:
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
        return vector if self._fits(vector) else None

    async def batch(self, texts: Sequence[str]) -> Matrix | None:
        """A row for each text; None where no vectors can be kept, or these texts have none.

        For whoever would rather try again later than do without: a model that
        fails for the moment raises `EmbeddingFailed`.
        """
        try:
            if self._dimensions is None and self.state != "off":
                await self._begin()
            if self.state == "off":
                return None
            found = await self.embedder.embed(texts)
        except EmbeddingFailed as error:
            if error.retryable:
                raise
            if self._dimensions is None:
                self._off(error.message)
            return None
        if not self._fits(found):
            raise EmbeddingFailed("the embedding model has changed", retryable=True)
        return found

    async def run_once(self) -> int:
        """Make ready if need be, then give one batch of waiting texts their vectors."""
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
        batch = await self._table.waiting(BATCH)
        if batch:
            await self._fill(batch)
        elif self.state == "resting":
            await self.embedder.embed([_PROBE])
        if self.state == "resting":
            self._ready()
        await self._progress.tell(len(batch))
        return len(batch)

    async def _begin(self) -> None:
        dimensions = await self.embedder.dimensions()
        why_not = await self._table.use(self.embedder.name, dimensions)
        if why_not:
            self._off(why_not)
        else:
            self._dimensions = dimensions
            self._ready()

    async def _fill(self, batch: Sequence[Version]) -> None:
        try:
            found = await self.embedder.embed([row["content"] for row in batch])
        except EmbeddingFailed as error:
            if error.retryable:
                raise
            await self._without(batch, error)
            return
        if self._fits(found):
            await self._table.fill(batch, found)
            failpoint("vectors.after_fill")

    async def _without(self, batch: Sequence[Version], error: EmbeddingFailed) -> None:
        """Something in the batch was refused: find out what, and let the rest have their vectors."""
        if len(batch) > 1:
            for row in batch:
                await self._fill([row])
            return
        self._warn("no_vector", id=str(batch[0]["id"]), why=error.message)
        await self._table.leave(batch)

    def _fits(self, found: Vector | Matrix) -> bool:
        """A model whose vectors have become longer or shorter is another model: begin anew."""
        if found.shape[-1] == self._dimensions:
            return True
        self._dimensions = None
        self._rest("the embedding model has changed")
        return False

    def _ready(self) -> None:
        self.state, self.because = "ready", ""
        ready = fields(model=self.embedder.name, dimensions=self._dimensions)
        log.info(f"{self._table.subject}.vectors_ready", extra=ready)

    def _rest(self, because: str) -> None:
        if self.state != "resting":
            self._warn("vectors_resting", because=because)
        self.state, self.because = "resting", because
        self.wake.set()

    def _off(self, because: str) -> None:
        self.state, self.because = "off", because
        self._warn("words_only", because=because)

    def _warn(self, event: str, **said: str) -> None:
        log.warning(f"{self._table.subject}.{event}", extra=fields(**said))


class _Progress:
    """Tells how far a long filling has come; a few stragglers are not worth a line."""

    def __init__(self, table: VectorTable) -> None:
        self._table = table
        self._done = 0
        self._told_at: float | None = None

    async def tell(self, filled: int) -> None:
        now = asyncio.get_running_loop().time()
        if filled == BATCH and self._told_at is None:
            self._told_at = now - _TELL_EVERY_SECONDS
        if self._told_at is None:
            return
        self._done += filled
        if filled and now - self._told_at >= _TELL_EVERY_SECONDS:
            self._told_at = now
            left = await self._table.count_waiting()
            log.info(f"{self._table.subject}.vectors_filling", extra=fields(done=self._done, left=left))
        elif not filled:
            log.info(f"{self._table.subject}.vectors_filled", extra=fields(done=self._done))
            self._done, self._told_at = 0, None
