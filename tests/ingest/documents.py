"""A document and its running task, as an upload and a worker make them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID, uuid4

from engram.ingest import tasks
from engram.ingest.ingest_worker import TaskLease
from engram.ingest.media import detect
from engram.ingest.parsing import Parsers
from engram.ingest.pipeline import DocumentPipeline
from engram.ingest.seam import Work
from engram.ingest.search import KnowledgeSearch
from engram.ingest.vectors import KnowledgeVectors, RowVectors, VectorHome
from engram.kernel.errors import LeaseLost
from engram.logbook.artifacts import LocalArtifacts
from engram.postgres import AsyncExecutor, Query, Row
from engram.postgres.query import Statement, rows
from engram.search.embeddings import Embedder, LocalEmbedder


def asked(text: str, **params: object) -> Query[list[Row]]:
    return Query(Statement("test", text), rows, params)


class Shelf:
    """The pipeline's real parts over one database, and what a test does with them."""

    def __init__(self, db: AsyncExecutor, folder: Path, vectors: KnowledgeVectors, parsers: Parsers) -> None:
        self.db = db
        self.artifacts = LocalArtifacts(folder)
        self.vectors = vectors
        self.pipeline = DocumentPipeline(db, self.artifacts, parsers, vectors, batch=4)
        self.search = KnowledgeSearch(db, vectors)

    async def uploaded(
        self, content: bytes, name: str, *, owner: str = "ada", title: str | None = None
    ) -> tasks.Upload:
        artifact = self.artifacts.put(content)
        upload = tasks.Upload(
            task_id=uuid4(),
            document_id=uuid4(),
            owner=owner,
            title=title,
            filename=name,
            media_type=detect(content[:8192], name),
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
            artifact_key=artifact.key,
        )
        await self.db.run(tasks.create(upload))
        return upload

    async def started(
        self, content: bytes, name: str, *, owner: str = "ada", title: str | None = None, lease: float = 60
    ) -> Work:
        """Uploaded, and leased to this worker."""
        task_id = (await self.uploaded(content, name, owner=owner, title=title or name)).task_id
        started = await self.db.run(tasks.start("worker", [(task_id, "1-1")], lease))
        return started[task_id].work

    async def ingest(self, work: Work) -> int:
        return await self.pipeline.ingest(work, TaskLease(self.db, work))

    async def add(
        self, content: str | bytes, name: str, *, owner: str = "ada", title: str | None = None
    ) -> UUID:
        content = content.encode() if isinstance(content, str) else content
        work = await self.started(content, name, owner=owner, title=title)
        count = await self.ingest(work)
        assert await self.db.run(tasks.succeed([(work, count)]))
        return work.document_id

    async def segments(self, document_id: UUID) -> list[Row]:
        return await self.db.run(
            asked(
                "SELECT * FROM ingest.knowledge_segment WHERE document_id = %(id)s ORDER BY ordinal",
                id=document_id,
            )
        )


@asynccontextmanager
async def shelf_on(
    db: AsyncExecutor, folder: Path, *, home: VectorHome | None = None, embedder: Embedder | None = None
) -> AsyncIterator[Shelf]:
    vectors = KnowledgeVectors(home or RowVectors(db, fills=True), embedder or LocalEmbedder())
    parsers = Parsers()
    shelf = Shelf(db, folder, vectors, parsers)
    try:
        yield shelf
    finally:
        await shelf.search.shut()
        await parsers.shut()
        await vectors.embedder.shut()


class LosingLease(TaskLease):
    """Somebody else takes the task over after so many reports."""

    def __init__(self, db: AsyncExecutor, work: Work, after: int) -> None:
        super().__init__(db, work)
        self.db, self.work, self.left = db, work, after
        self.told: list[tuple[int, int]] = []

    async def progress(self, processed: int, total: int) -> None:
        self.told.append((processed, total))
        self.left -= 1
        if self.left == 0:
            await self.db.run(
                asked(
                    "UPDATE ingest.ingest_task SET lease_token = lease_token + 1000 WHERE id = %(id)s RETURNING id",
                    id=self.work.task_id,
                )
            )
            return  # it does not know yet: only the write can find out
        if self.left < 0:
            raise LeaseLost("reported too late")
        await super().progress(processed, total)
