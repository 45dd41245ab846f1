"""Documents and tasks as their owner sees them: upload, look, try again, delete.

An upload keeps the bytes first, writes document and task in one statement, and
then tells the queue. A crash after the bytes leaves bytes that nothing refers
to; a crash after the rows, or a queue that is away, leaves a task that the
sweeper puts on the stream. A file's name is kept for people and is never a path.

What another owner has does not exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO
from uuid import UUID, uuid4

from engram.ingest import tasks
from engram.ingest.lifecycle import TASK
from engram.ingest.queue import Queue
from engram.ingest.tasks import Place, Upload
from engram.kernel.errors import DocumentRefused, NotFound, RedisUnavailable, StateConflict
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.logbook.artifacts import Artifact, ArtifactStore
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

log = logging.getLogger(__name__)

HEAD_BYTES = 1 << 16
MAX_NAME_CHARS = 255
# A queue that is away must not keep an upload waiting: the sweeper comes later.
PUT_SECONDS = 3.0
MEASURE_SECONDS = 1.0

Detect = Callable[[bytes, str], str]
Discard = Callable[[UUID], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes in the artifact store, and what they are."""

    artifact: Artifact
    filename: str
    media_type: str


class Uploads:
    """`discard` removes what is known of a document outside the database."""

    def __init__(
        self,
        db: AsyncExecutor,
        artifacts: ArtifactStore,
        queue: Queue,
        *,
        max_bytes: int,
        detect: Detect,
        discard: Discard | None = None,
    ) -> None:
        self._db = db
        self._artifacts = artifacts
        self._queue = queue
        self._max_bytes = max_bytes
        self._detect = detect
        self._discard = discard

    @asynccontextmanager
    async def keep(self, file: BinaryIO, filename: str) -> AsyncIterator[Kept]:
        """Find out what the bytes are, and keep them; nobody deletes them before the block's end."""
        name = _shown(filename)
        with ExitStack() as keeping:
            kept = await asyncio.to_thread(self._kept, keeping, file, name)
            failpoint("uploads.after_bytes")
            yield kept

    async def enter(self, owner: str, kept: Kept, title: str | None, task_id: UUID | None = None) -> Row:
        """Make document and task and tell the queue; with the same `task_id`, only once."""
        upload = Upload(
            task_id or uuid4(),
            uuid4(),
            owner,
            title,
            kept.filename,
            kept.media_type,
            kept.artifact.sha256,
            kept.artifact.size,
            kept.artifact.key,
        )
        made = await self._db.run(tasks.create(upload, emits=self._queue.is_told_by_rows))
        failpoint("uploads.after_rows")
        if made["status"] == "QUEUED":
            await self._tell(made["id"])
        return made

    async def task(self, owner: str, task_id: UUID) -> Row:
        """A task with its transitions."""
        row = await self._found(owner, task_id)
        return {**row, "transitions": await self._db.run(tasks.transitions(task_id))}

    async def list_tasks(
        self, owner: str, limit: int, *, status: str | None, document_id: UUID | None, before: Place | None
    ) -> list[Row]:
        query = tasks.list_tasks(owner, limit, status=status, document_id=document_id, before=before)
        return await self._db.run(query)

    async def retry(self, owner: str, task_id: UUID) -> Row:
        """Try a dead task again, with all its attempts."""
        made = await self._db.run(tasks.retry(owner, task_id, emits=self._queue.is_told_by_rows))
        if made is None:
            row = await self._found(owner, task_id)
            TASK.require(row["status"], "QUEUED")
            raise StateConflict("the task changed this moment", hint="look at it again")
        await self._tell(task_id)
        return made

    async def documents(self, owner: str, limit: int, before: Place | None) -> list[Row]:
        return await self._db.run(tasks.documents(owner, limit, before=before))

    async def document(self, owner: str, document_id: UUID) -> Row:
        row = await self._db.run(tasks.document(owner, document_id))
        if row is None:
            raise NotFound(f"there is no document {document_id}")
        return row

    async def delete(self, owner: str, document_id: UUID) -> None:
        """The document, its tasks and segments; its bytes too, unless somebody else needs them."""
        await self.document(owner, document_id)
        if self._discard is not None:
            await self._discard(document_id)
        gone = await self._db.run(tasks.delete_document(owner, document_id))
        if gone is not None:
            await self._let_go(gone["artifact_key"])

    async def _let_go(self, key: str) -> None:
        """Delete bytes that nothing refers to; whoever is about to refer to them has them locked."""
        with ExitStack() as removing:
            remove = await asyncio.to_thread(removing.enter_context, self._artifacts.removing(key))
            if remove is not None and not await self._db.run(tasks.is_referred_to(key)):
                await asyncio.to_thread(remove)

    async def measure(self) -> None:
        """Set the queue's gauges, if it answers soon; they keep their last values otherwise."""
        try:
            async with asyncio.timeout(MEASURE_SECONDS):
                await self._queue.measure()
        except (RedisUnavailable, TimeoutError) as error:
            log.debug("ingest.not_measured", extra=fields(error=str(error)))

    async def _found(self, owner: str, task_id: UUID) -> Row:
        row = await self._db.run(tasks.get(owner, task_id))
        if row is None:
            raise NotFound(f"there is no task {task_id}")
        return row

    def _kept(self, keeping: ExitStack, file: BinaryIO, name: str) -> Kept:
        head = file.read(HEAD_BYTES)
        if not head:
            raise DocumentRefused("the file is empty")
        media_type = self._detect(head, name)
        file.seek(0)
        artifact = keeping.enter_context(self._artifacts.keeping(file, max_bytes=self._max_bytes))
        return Kept(artifact, name, media_type)

    async def _tell(self, task_id: UUID) -> None:
        """Put the task on the queue. Not being able to costs nothing but time."""
        if self._queue.is_told_by_rows:
            return
        try:
            async with asyncio.timeout(PUT_SECONDS):
                (entry,) = await self._queue.put([task_id])
        except (RedisUnavailable, TimeoutError) as error:
            log.warning("ingest.not_put", extra=fields(task_id=str(task_id), error=str(error)))
            return
        failpoint("uploads.after_put")
        await self._db.run(tasks.put_on_stream([(task_id, entry)]))


def _shown(filename: str) -> str:
    """A name as it may be shown: its last part, printable, not too long."""
    last = filename.replace("\\", "/").rpartition("/")[2]
    kept = "".join(c for c in last if c.isprintable()).encode("utf-8", "ignore").decode().strip()
    return kept[:MAX_NAME_CHARS] or "document"
