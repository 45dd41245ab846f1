"""From bytes to passages, under a lease: each once, none without it, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engram.ingest import segments, tasks
from engram.ingest.chroma import ChromaVectors
from engram.ingest.chunking import Passage
from engram.ingest.ingest_worker import IngestWorker, TaskLease
from engram.ingest.redis_queue import RedisQueue
from engram.ingest.seam import Work
from engram.ingest.vectors import RowVectors
from engram.kernel.errors import (
    ConstraintViolated,
    DocumentRefused,
    EmbeddingFailed,
    LeaseLost,
    StateConflict,
    VectorStoreFailed,
)
from engram.kernel.settings import Settings
from engram.postgres import AsyncExecutor
from engram.postgres.pool import connect
from engram.search.embeddings import LocalEmbedder
from ingest import samples
from ingest.documents import LosingLease, Shelf, asked, shelf_on

pytestmark = pytest.mark.anyio

PARTS = 10
LONG = "".join(f"# Part {n}\n\nThis is what part number {n} says about leases.\n\n" for n in range(PARTS))


@pytest.fixture
async def shelf(db: AsyncExecutor, tmp_path: Path) -> AsyncIterator[Shelf]:
    async with shelf_on(db, tmp_path) as shelf:
        yield shelf


async def test_a_document_becomes_passages_with_their_place_and_vector(shelf: Shelf) -> None:
    pages = [["Outages", "An outage is not an attempt."], ["Leases", "Only the holder may settle a row."]]
    work = await shelf.started(samples.pdf(pages), "rules.pdf")
    assert await shelf.ingest(work) == 2
    rows = await shelf.segments(work.document_id)
    assert [(r["ordinal"], r["heading"], r["page"], r["content"]) for r in rows] == [
        (0, "Outages", 1, "An outage is not an attempt."),
        (1, "Leases", 2, "Only the holder may settle a row."),
    ]
    assert all(row["embedding"] is not None and not row["to_embed"] for row in rows)
    assert rows[0]["tags"] == ["owner:ada", f"document:{work.document_id}"]


async def test_progress_is_told_between_batches(shelf: Shelf) -> None:
    work = await shelf.started(LONG.encode(), "long.md")
    lease = LosingLease(shelf.db, work, after=100)
    assert await shelf.pipeline.ingest(work, lease) == PARTS
    assert lease.told == [(4, PARTS), (8, PARTS)]


async def test_a_second_time_leaves_each_passage_once_and_untouched(shelf: Shelf) -> None:
    document = await shelf.add(LONG, "long.md")
    before = await shelf.db.run(asked("SELECT xmin::text, ordinal FROM ingest.knowledge_segment ORDER BY 2"))
    assert await shelf.add(LONG, "long.md") == document
    after = await shelf.db.run(asked("SELECT xmin::text, ordinal FROM ingest.knowledge_segment ORDER BY 2"))
    assert before == after
    assert len(after) == PARTS


async def test_what_an_earlier_longer_version_left_is_removed(shelf: Shelf) -> None:
    document = await shelf.add(LONG, "long.md")
    work = await shelf.started(LONG.encode(), "long.md")
    await shelf.db.run(
        asked(
            "INSERT INTO ingest.knowledge_segment (document_id, ordinal, tags, heading, content, words)"
            " VALUES (%(id)s, 10, ARRAY['owner:ada', 'document:' || %(id)s::uuid], '', 'old', '') RETURNING ordinal",
            id=document,
        )
    )
    await shelf.ingest(work)
    assert len(await shelf.segments(document)) == PARTS


@pytest.mark.parametrize("after", [1, 2])
async def test_a_lost_lease_stops_the_writing_at_once(shelf: Shelf, after: int) -> None:
    work = await shelf.started(LONG.encode(), "long.md")
    with pytest.raises(LeaseLost, match="any more"):
        await shelf.pipeline.ingest(work, LosingLease(shelf.db, work, after))
    assert len(await shelf.segments(work.document_id)) == after * 4


@pytest.mark.parametrize(
    "taken",
    [
        "SET lease_token = lease_token + 1",
        "SET locked_at = now() - interval '61 seconds'",
        "SET status = 'RETRYING', locked_by = NULL, locked_at = NULL, lease_seconds = NULL",
    ],
)
async def test_nothing_is_written_or_removed_without_the_lease(shelf: Shelf, taken: str) -> None:
    work = await shelf.started(b"# One\n\ntext", "one.md")
    await shelf.ingest(work)
    (row,) = await shelf.segments(work.document_id)
    await shelf.db.run(
        asked(f"UPDATE ingest.ingest_task {taken} WHERE id = %(id)s RETURNING id", id=work.task_id)
    )
    other = [Passage(0, "One", None, "other text", 0), Passage(1, "Two", None, "more", 0)]
    assert not await shelf.db.run(segments.write(work, other, None))
    assert not await shelf.db.run(segments.write(work, [], None, count=0))
    assert await shelf.segments(work.document_id) == [row]


ROWS = "Row by row. " * 40
BOTH = "".join(f"# Part {n}\n\nWhat part {n} says. {ROWS}\n" for n in range(30)).encode()


class Interrupting(TaskLease):
    """Something happens after the first batch."""

    def __init__(self, db: AsyncExecutor, work: Work, then: Callable[[], Awaitable[object]]) -> None:
        super().__init__(db, work)
        self.then: Callable[[], Awaitable[object]] | None = then

    async def progress(self, processed: int, total: int) -> None:
        await super().progress(processed, total)
        if self.then is not None:
            then, self.then = self.then, None
            await then()


@pytest.mark.parametrize(("first", "second"), [("a.md", "a.txt"), ("a.txt", "a.md")])
async def test_the_same_bytes_as_two_kinds_at_once_leave_one_of_them_whole(
    shelf: Shelf, first: str, second: str
) -> None:
    expected = await shelf.add(BOTH, second, owner="bob", title="Rows")
    older = await shelf.started(BOTH, first, title="Rows")

    async def uploaded_anew() -> None:
        assert await shelf.add(BOTH, second, title="Rows") == older.document_id

    with pytest.raises(StateConflict, match="another kind"):
        await shelf.pipeline.ingest(older, Interrupting(shelf.db, older, uploaded_anew))
    await whole(shelf, older.document_id, expected)
    # Its next try reads what the document is now.
    failure = tasks.Failure(older.task_id, older.lease_token, "overtaken", 0.0)
    await shelf.db.run(tasks.fail([failure], 10))
    again = (await shelf.db.run(tasks.start_due("worker", 1, 60)))[older.task_id].work
    count = await shelf.ingest(again)
    assert await shelf.db.run(tasks.succeed([(again, count)])) == [older.task_id]
    await whole(shelf, older.document_id, expected)


async def test_a_late_success_does_not_tell_of_what_the_document_was_before(shelf: Shelf) -> None:
    expected = await shelf.add(BOTH, "a.txt", owner="bob", title="Rows")
    older = await shelf.started(BOTH, "a.md", title="Rows")
    count = await shelf.ingest(older)
    await shelf.add(BOTH, "a.txt", title="Rows")
    assert await shelf.db.run(tasks.succeed([(older, count)])) == [older.task_id]
    await whole(shelf, older.document_id, expected)


async def test_another_title_at_once_is_in_all_words_or_in_none(shelf: Shelf) -> None:
    older = await shelf.started(BOTH, "a.md", title="Harbour")

    async def uploaded_anew() -> None:
        await shelf.add(BOTH, "a.md", title="Lighthouse")

    with pytest.raises(StateConflict, match="another title"):
        await shelf.pipeline.ingest(older, Interrupting(shelf.db, older, uploaded_anew))
    rows = await shelf.segments(older.document_id)
    assert len(rows) == 30
    assert all("lighthouse" in row["words"] and "harbour" not in row["words"] for row in rows)


async def test_two_workers_and_many_uploads_of_the_same_bytes_leave_one_whole_document(
    shelf: Shelf, queue: RedisQueue, ingest_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.ingest.ingest_worker.TAKE_SECONDS", 0.02)
    monkeypatch.setattr("engram.ingest.ingest_worker.DUE_SECONDS", 0.02)
    expected = await shelf.add(BOTH, "last.txt", owner="bob")
    patient = replace(ingest_settings, ingest_max_attempts=100)
    workers = [IngestWorker(shelf.db, queue, shelf.pipeline, patient) for _ in range(2)]

    async def step() -> None:
        for worker in workers:
            await worker.settle()
            if worker.room:
                await worker.run_once()

    async with asyncio.timeout(60):
        for n in range(8):
            upload = await shelf.uploaded(BOTH, "last.txt" if n % 2 else "first.md")
            await queue.put([upload.task_id])
            await step()
        while await shelf.db.run(
            asked("SELECT id FROM ingest.ingest_task WHERE status <> 'SUCCEEDED' AND owner = 'ada'")
        ):
            await step()
    (document,) = await shelf.db.run(tasks.documents("ada", 10))
    await whole(shelf, document["id"], expected)
    died = "SELECT task_id AS id FROM ingest.ingest_task_transition WHERE to_status = 'DEAD'"
    assert await shelf.db.run(asked(died)) == []


async def test_an_upload_waits_for_the_batch_that_is_being_written(shelf: Shelf, dsn: str) -> None:
    """Whoever makes another kind of a document and whoever writes it are never at it together."""
    work = await shelf.started(BOTH, "a.md")
    with connect(dsn) as uploading:
        uploading.execute("BEGIN")
        changed = "UPDATE ingest.knowledge_document SET media_type = 'text/plain' WHERE id = %s"
        uploading.execute(changed, [work.document_id])
        writing = asyncio.create_task(
            shelf.db.run(segments.write(work, [Passage(0, "", None, "as Markdown", 0)], None))
        )
        waits = (
            "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        async with asyncio.timeout(20):
            while not await shelf.db.run(asked(waits)):
                await asyncio.sleep(0.01)
        uploading.execute("COMMIT")
        assert await writing == {"same": False}
    assert await shelf.segments(work.document_id) == []


async def whole(shelf: Shelf, document_id: UUID, expected: UUID) -> None:
    """It has the passages of the other document, which was never anything else."""
    found, wanted = [
        [(row["ordinal"], row["heading"], row["content"]) for row in await shelf.segments(each)]
        for each in (document_id, expected)
    ]
    assert found == wanted
    document = await shelf.db.run(tasks.document("ada", document_id))
    assert document is not None
    assert (document["status"], document["segments"]) == ("READY", len(wanted))


async def test_a_document_that_cannot_be_read_writes_nothing(shelf: Shelf) -> None:
    work = await shelf.started(b"%PDF-1.4 nonsense", "a.pdf")
    with pytest.raises(DocumentRefused, match="damaged"):
        await shelf.ingest(work)
    assert await shelf.segments(work.document_id) == []


async def test_deleting_a_document_takes_its_passages(shelf: Shelf) -> None:
    document = await shelf.add(LONG, "long.md")
    await shelf.db.run(
        asked("DELETE FROM ingest.knowledge_document WHERE id = %(id)s RETURNING id", id=document)
    )
    assert await shelf.segments(document) == []


async def test_the_table_keeps_passages_with_their_document(shelf: Shelf) -> None:
    document = await shelf.add("# A\n\ntext", "a.md")
    with pytest.raises(ConstraintViolated) as refused:
        await shelf.db.run(
            asked(
                "UPDATE ingest.knowledge_segment SET tags = ARRAY['owner:bob', 'document:x'] RETURNING ordinal"
            )
        )
    assert refused.value.constraint == "segment_is_of_its_document"
    assert document


class FailingEmbedder(LocalEmbedder):
    """The real model, behind a service that fails as told."""

    def __init__(self) -> None:
        super().__init__()
        self.error: EmbeddingFailed | None = None

    async def embed(self, texts: Sequence[str]) -> Any:
        if self.error is not None:
            raise self.error
        return await super().embed(texts)


async def test_a_model_that_is_away_fails_the_try_and_the_next_goes_on(
    db: AsyncExecutor, tmp_path: Path
) -> None:
    embedder = FailingEmbedder()
    async with shelf_on(db, tmp_path, embedder=embedder) as shelf:
        embedder.error = EmbeddingFailed("away", retryable=True)
        work = await shelf.started(LONG.encode(), "long.md")
        with pytest.raises(EmbeddingFailed, match="away"):
            await shelf.ingest(work)
        embedder.error = None
        assert await shelf.ingest(work) == PARTS
        assert not [row for row in await shelf.segments(work.document_id) if row["to_embed"]]


async def test_texts_that_a_model_refuses_are_kept_and_found_by_words(
    db: AsyncExecutor, tmp_path: Path
) -> None:
    embedder = FailingEmbedder()
    async with shelf_on(db, tmp_path, embedder=embedder) as shelf:
        await shelf.vectors.batch(["begin"])
        embedder.error = EmbeddingFailed("refused", retryable=False)
        document = await shelf.add(LONG, "long.md")
        assert all(row["to_embed"] for row in await shelf.segments(document))
        embedder.error = None
        while await shelf.vectors.run_once():
            pass
        assert not [row for row in await shelf.segments(document) if row["to_embed"]]


async def test_another_model_means_new_vectors_for_everything(db: AsyncExecutor, tmp_path: Path) -> None:
    async with shelf_on(db, tmp_path) as shelf:
        document = await shelf.add(LONG, "long.md")

    class Other(LocalEmbedder):
        name = "another"

    async with shelf_on(db, tmp_path, embedder=Other()) as shelf:
        await shelf.vectors.run_once()
        assert all(row["to_embed"] for row in await shelf.segments(document))
        while await shelf.vectors.run_once():
            pass
        assert all(row["embedding"] is not None for row in await shelf.segments(document))


async def test_without_pgvector_words_are_kept_and_it_is_said(db: AsyncExecutor, tmp_path: Path) -> None:
    class Bare(RowVectors):
        async def use(self, model: str, dimensions: int) -> str | None:
            return "this PostgreSQL has no pgvector"

    async with shelf_on(db, tmp_path, home=Bare(db)) as shelf:
        document = await shelf.add(LONG, "long.md")
        found = await shelf.search.search("ada", "what does part number 7 say?")
        assert found.words_only_because == "this PostgreSQL has no pgvector"
        assert found.hits[0].heading == "Part 7"
        assert all(row["embedding"] is None for row in await shelf.segments(document))


async def test_an_unreachable_chroma_fails_the_try_and_is_worth_another(
    db: AsyncExecutor, tmp_path: Path
) -> None:
    chroma = ChromaVectors("http://127.0.0.1:1")
    try:
        async with shelf_on(db, tmp_path, home=chroma) as shelf:
            work = await shelf.started(LONG.encode(), "long.md")
            with pytest.raises(VectorStoreFailed, match="cannot be reached") as failed:
                await shelf.pipeline.ingest(work, TaskLease(db, work))
            assert failed.value.retryable
            found = await shelf.search.search("ada", "anything")
            assert "Chroma" in (found.words_only_because or "")
            await shelf.vectors.discard(work.document_id)  # a document can be deleted all the same
            assert await shelf.db.run(tasks.succeed([(work, 0)]))
    finally:
        await chroma.shut()
