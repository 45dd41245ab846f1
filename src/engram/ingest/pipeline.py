"""What becomes of a document: read, cut, embedded, written; in batches, each under the task's lease.

A try that fails half-way leaves whole batches behind. The next finds them and
writes only what differs, and what an earlier, longer version left is removed
with the last batch: so each passage is there once, however often a document
comes in. A small document is one statement. The same bytes may be uploaded again
as another kind or by another title: whoever is still writing what they were
before writes nothing more, and its next try reads what they are now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engram.ingest import segments
from engram.ingest.chunking import Passage, passages
from engram.ingest.parsing import REFUSALS, Parsers
from engram.ingest.seam import Lease, Work
from engram.ingest.vectors import KnowledgeVectors
from engram.kernel.errors import DocumentRefused, LeaseLost, StateConflict
from engram.kernel.failpoints import failpoint
from engram.logbook.artifacts import ArtifactStore
from engram.postgres import AsyncExecutor

BATCH = 64


class DocumentPipeline:
    """`engram.ingest.seam.Pipeline`, with real parts."""

    def __init__(
        self,
        db: AsyncExecutor,
        artifacts: ArtifactStore,
        parsers: Parsers,
        vectors: KnowledgeVectors,
        *,
        batch: int = BATCH,
    ) -> None:
        self._db = db
        self._artifacts = artifacts
        self._parsers = parsers
        self._vectors = vectors
        self._batch = batch

    async def ingest(self, work: Work, lease: Lease) -> int:
        found = await self._passages(work)
        total = len(found)
        for start in range(0, total, self._batch):
            if start:
                # Between batches: the end of the last one is the task's success.
                await lease.progress(start, total)
            await self._write(work, found[start : start + self._batch], total)
            failpoint("pipeline.after_batch")
        await self._vectors.home.trim(work.document_id, total)
        return total

    async def _passages(self, work: Work) -> list[Passage]:
        with self._artifacts.open(work.artifact_key) as content:
            blocks = await self._parsers.parse(content, work.media_type, owner=work.owner)
        # In a thread: a large document takes seconds, and leases are renewed meanwhile.
        found = await asyncio.to_thread(passages, blocks)
        if not found:
            raise DocumentRefused(REFUSALS["empty"])
        return found

    async def _write(self, work: Work, batch: Sequence[Passage], total: int) -> None:
        vectors = await self._vectors.batch([_meaning(passage) for passage in batch])
        home = self._vectors.home
        count = total if batch[-1].ordinal + 1 == total else None
        guarded = segments.write(work, batch, vectors if home.in_rows else None, count=count)
        written = await self._db.run(guarded)
        if written is None:
            raise LeaseLost(f"task {work.task_id} is not this worker's any more")
        if not written["same"]:
            raise StateConflict(
                "the document was uploaded anew meanwhile, as another kind or by another title"
            )
        if vectors is not None:
            await home.put(work, batch, vectors)


def _meaning(passage: Passage) -> str:
    """What is embedded: a passage says more under its heading."""
    return f"{passage.heading}\n{passage.content}"
