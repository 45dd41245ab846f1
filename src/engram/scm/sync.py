"""One sync of one repository: lease it, write page after page, hand it back.

Nothing is open between the source and the database: a page is read, then
written with the watermark that stands for it, in one statement that checks the
lease. Whatever stops a sync (a kill, a time-out, a refused key) leaves the
watermark at the last page that was written, and the next sync goes on there.

A row that cannot be written stops a `strict` sync. `best_effort` finds it by
halving the page, leaves it out, notes it in `logbook.events`, and every later
sync tries it again. A failure of the database itself is nobody's row: it stops
both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

from engram.kernel.errors import (
    ConstraintViolated,
    DatabaseError,
    EngramError,
    InputError,
    SchemaError,
    StateConflict,
)
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.logbook import items
from engram.logbook.items import Event
from engram.postgres.executors import AsyncExecutor
from engram.scm import store
from engram.scm.source import SOURCE_TYPE, Page, Source, Table, identity
from engram.scm.store import Counts, Held, Repo, Written

log = logging.getLogger(__name__)

Mode = Literal["strict", "best_effort"]
OnPage = Callable[[Counts], None]
SOURCE_TABLE: dict[str, Table] = {kind: table for table, kind in SOURCE_TYPE.items()}


@dataclass(frozen=True, slots=True)
class Syncing:
    """What every sync of a process shares."""

    db: AsyncExecutor
    lease_seconds: int
    mode: Mode = "strict"
    on_page: OnPage = lambda counts: None

    async def run_once(self, repo: Repo, source: Source) -> Counts:
        """Bring the repository's facts up to date; `StateConflict` when somebody else is at it."""
        held = await self.db.run(store.acquire(repo.repo_id, _holder(), self.lease_seconds, self.mode))
        if held is None:
            raise StateConflict(
                f"repository {repo.repo_id} is being synced by another process",
                hint="wait for it; if it was killed, its lease runs out by itself",
            )
        counts = Counts()
        error: str | None = "stopped"
        try:
            async with _renewing(self.db, held, self.lease_seconds):
                await _Run(self, repo, source, held, counts).whole()
            failpoint("sync.after_watermark")
            error = None
        except EngramError as failed:
            error = str(failed)
            raise
        finally:
            await self.db.run(store.release(held, counts, error))
        return counts


@dataclass(frozen=True, slots=True)
class _Run:
    shared: Syncing
    repo: Repo
    source: Source
    held: Held
    counts: Counts

    async def whole(self) -> None:
        skipped = await self.shared.db.run(store.list_skipped(self.repo.repo_id))
        marks = await self.shared.db.run(store.marks(self.held))
        async with aclosing(self.source.pages(marks)) as pages:
            async for page in pages:
                self.counts.read += len(page.rows)
                await self._write(page)
                self.shared.on_page(self.counts)
                if page.rows:
                    failpoint("sync.after_page")
        for row in skipped:
            await self._again(row["source_type"], row["source_id"])

    async def _write(self, page: Page) -> None:
        try:
            await self._put(page)
        except (DatabaseError, InputError) as error:
            if not _is_about_a_row(error) or not page.rows or self.shared.mode == "strict":
                raise
            await self._halve(replace(page, move=None, progress=None), error)
            # What could be written is; the watermark follows, and stands for the skipped ones too.
            await self._put(replace(page, rows=[]))

    async def _halve(self, page: Page, error: EngramError) -> None:
        """Write what can be written of a page that cannot be written whole."""
        if len(page.rows) == 1:
            await self._skip(page, error)
            return
        middle = len(page.rows) // 2
        for rows in (page.rows[:middle], page.rows[middle:]):
            part = replace(page, rows=rows)
            try:
                await self._put(part)
            except (DatabaseError, InputError) as again:
                if not _is_about_a_row(again):
                    raise
                await self._halve(part, again)

    async def _skip(self, page: Page, error: EngramError) -> None:
        source_type, source_id = SOURCE_TYPE[page.table], identity(page.table, page.rows[0])
        log.warning("scm.row_skipped", extra=fields(source=f"{source_type}/{source_id}", error=str(error)))
        event = Event(
            event_type="scm_row_skipped",
            target_space=f"team:{self.repo.project_key}",
            content_md=f"{source_type} {source_id} of repository {self.repo.repo_id} could not be written: {error}",
            actor_user_id="scm",
            payload_json={"repo_id": self.repo.repo_id, "source_type": source_type, "source_id": source_id},
            request_id=f"scm:{self.repo.repo_id}:{source_type}:{source_id}",
        )
        await self.shared.db.run(items.record_event(event))
        await self.shared.db.run(store.skip(self.repo.repo_id, source_type, source_id, str(error)))
        self.counts.skipped += 1

    async def _again(self, source_type: str, source_id: str) -> None:
        """What an earlier sync could not write; what its source no longer has stays noted."""
        if found := await self.source.again(source_type, source_id):
            self.counts.read += len(found)
            await self._write(Page(SOURCE_TABLE[source_type], found, pass_number=self.held.run_id))

    async def _put(self, page: Page) -> None:
        written: Written = await self.shared.db.run(store.put_page(self.held, page))
        if not written.let_in:
            raise StateConflict(
                f"repository {self.repo.repo_id}: the lease is lost, or its watermark was moved by somebody else",
                hint="sync again; nothing of this page was written",
            )
        self.counts.written += written.written
        self.counts.superseded += written.superseded


def _is_about_a_row(error: EngramError) -> bool:
    """Refused for what it holds; not because the database is away, busy or behind."""
    if isinstance(error, ConstraintViolated | InputError):
        return True
    return isinstance(error, DatabaseError) and not error.retryable and not isinstance(error, SchemaError)


@asynccontextmanager
async def _renewing(db: AsyncExecutor, held: Held, lease_seconds: int) -> AsyncIterator[None]:
    """Renew the lease while the work runs; losing it ends nothing here: no page gets in without it."""

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease_seconds / 3)
            try:
                if not await db.run(store.renew(held)):
                    return
            except DatabaseError as error:
                log.warning("scm.renew_failed", extra=fields(error=str(error)))

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _holder() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
