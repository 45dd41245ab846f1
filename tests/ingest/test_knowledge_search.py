"""The right paragraph is found, in English and Chinese, by its owner and nobody else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import httpx2
import pytest

from engram.ingest import segments
from engram.ingest.chroma import ChromaVectors
from engram.ingest.upkeep import KnowledgeUpkeep
from engram.kernel.errors import InputError
from engram.postgres import AsyncExecutor
from engram.web.sockets import free_port
from ingest import samples
from ingest.documents import Shelf, asked, shelf_on
from support.parts import used

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("knowledge_search")]

RULES = """# engram

Some words about the whole.

## Leases

Only the holder of a live lease may settle a row. A lease that ran out belongs to nobody.

## Back-off

Each failed delivery doubles the wait before the next, up to an hour.

## Backups

The database is copied every night and kept for thirty days.
"""
CHINESE = """# 手册

## 租约

只有持有有效租约的工作者才能结算一行数据。租约过期后，任何人都可以接管。

## 备份

数据库每天夜里备份一次，保留三十天。
"""


@pytest.fixture
async def shelf(db: AsyncExecutor, tmp_path: Path) -> AsyncIterator[Shelf]:
    async with shelf_on(db, tmp_path) as shelf:
        yield shelf


async def fill(shelf: Shelf) -> None:
    await shelf.add(RULES, "rules.md", title="The rules")
    await shelf.add(CHINESE, "handbook.md", title="手册")
    await shelf.add(
        samples.pdf([["Kitchen", "Tea is served at four."], ["Parking", "Cars stay behind the house."]]),
        "house.pdf",
    )


QUESTIONS = {
    "who may settle a row?": ("The rules", "engram › Leases", None, "Only the holder"),
    "how long are backups kept": ("The rules", "engram › Backups", None, "thirty days"),
    "谁可以结算一行数据？": ("手册", "手册 › 租约", None, "只有持有"),
    "备份保留多久": ("手册", "手册 › 备份", None, "三十天"),
    "where do cars park": ("house.pdf", "Parking", 2, "behind the house"),
}


async def test_the_right_paragraph_comes_first(shelf: Shelf) -> None:
    await fill(shelf)
    for question, (title, heading, page, words) in QUESTIONS.items():
        found = await shelf.search.search("ada", question, 3)
        best = found.hits[0]
        assert (best.title, best.heading, best.page) == (title, heading, page), question
        assert words in best.passage
        assert 0 < best.score <= 1
        assert found.words_only_because is None


async def test_what_was_meant_is_found_though_no_word_of_it_was_said(shelf: Shelf) -> None:
    await fill(shelf)
    assert await shelf.search.by_words("ada", "automobile garage", 3) == []
    found = await shelf.search.search("ada", "automobile garage", 3)
    assert found.hits[0].heading == "Parking"


async def test_a_document_is_its_owners_alone(shelf: Shelf) -> None:
    theirs = await shelf.add(RULES, "rules.md", owner="bob")
    own = await shelf.add(RULES + "\nand mine", "rules.md", owner="ada")
    for question in QUESTIONS:
        for document in (None, own, theirs):
            hits = (await shelf.search.search("ada", question, 50, document)).hits
            assert {hit.document_id for hit in hits} <= {own}
    assert (await shelf.search.search("ada", "lease", 5)).hits
    assert not (await shelf.search.search("eve", "lease", 5)).hits
    # Each of the three statements by itself, not only all of them together.
    assert await shelf.search.by_words("eve", "lease", 5) == []
    assert await shelf.search.by_vectors("eve", "lease", 5) == []
    assert await shelf.db.run(segments.contents("eve", None, [(own, 0), (theirs, 0)])) == []
    assert await shelf.db.run(segments.contents("ada", theirs, [(own, 0)])) == []
    # A name that says more than a name.
    assert not (await shelf.search.search("bob', 'owner:ada", "lease", 5)).hits


async def test_a_document_can_be_asked_alone(shelf: Shelf) -> None:
    rules = await shelf.add(RULES, "rules.md")
    other = await shelf.add("# Leases\n\nA lease on a flat runs for two years.", "flat.md")
    hits = (await shelf.search.search("ada", "lease", 10, other)).hits
    assert [hit.document_id for hit in hits] == [other]
    assert (await shelf.search.search("ada", "lease", 10, rules)).hits[0].document_id == rules
    assert not (await shelf.search.search("ada", "lease", 10, uuid4())).hits


async def test_a_deleted_document_is_not_found(shelf: Shelf) -> None:
    document = await shelf.add(RULES, "rules.md")
    await shelf.db.run(
        asked("DELETE FROM ingest.knowledge_document WHERE id = %(id)s RETURNING id", id=document)
    )
    assert not (await shelf.search.search("ada", "lease", 10)).hits


@pytest.mark.parametrize(("query", "k"), [("", 3), (" \n", 3), ("x" * 2001, 3), ("lease", 0), ("lease", 51)])
async def test_questions_that_cannot_be_understood(shelf: Shelf, query: str, k: int) -> None:
    with pytest.raises(InputError):
        await shelf.search.search("ada", query, k)


async def test_odd_questions_are_answered(shelf: Shelf) -> None:
    await fill(shelf)
    for question in ("???", "'); DROP TABLE", "a & b | !c", "的", "\u202e", "lease:*"):
        assert len((await shelf.search.search("ada", question, 3)).hits) <= 3, question
    assert (await shelf.search.search("ada", "lease", 3)).hits, "nothing was dropped"


async def test_many_at_once_begin_once(shelf: Shelf) -> None:
    await fill(shelf)
    answers = await asyncio.gather(*[shelf.search.search("ada", "who settles?", 3) for _ in range(20)])
    assert all(answer == answers[0] for answer in answers)


@pytest.fixture(scope="module")
def chroma_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Chroma."""
    port = free_port()
    folder = tmp_path_factory.mktemp("chroma")
    command = [
        str(Path(sys.executable).with_name("chroma")),
        "run",
        "--path",
        str(folder),
        "--port",
        str(port),
    ]
    environment = {**os.environ, "ANONYMIZED_TELEMETRY": "False"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, server)
            used("Chroma", "real: chroma run")
            yield url
        finally:
            server.kill()
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    with httpx2.Client(base_url=url, trust_env=False, transport=httpx2.HTTPTransport(retries=0)) as client:
        for _ in range(600):
            assert server.poll() is None, "chroma ended"
            try:
                client.get("/api/v2/heartbeat").raise_for_status()
            except httpx2.HTTPError:
                time.sleep(0.05)
            else:
                return
    raise AssertionError("chroma did not answer")


async def test_with_chroma(db: AsyncExecutor, tmp_path: Path, chroma_url: str) -> None:
    chroma = ChromaVectors(chroma_url)
    async with shelf_on(db, tmp_path, home=chroma) as shelf:
        await fill(shelf)
        theirs = await shelf.add(RULES, "rules.md", owner="bob")
        found = await shelf.search.search("ada", "automobile garage", 3)
        assert found.hits[0].heading == "Parking"
        assert found.words_only_because is None

        vector = await shelf.vectors.vector("Only the holder may settle a row.")
        assert vector is not None
        near = await chroma.nearest("bob", None, vector, -1.0, 100)
        assert {document for document, _ in near} == {theirs}
        assert len(near) == len(await shelf.segments(theirs)) == 4
        again = await shelf.add(RULES, "rules.md", owner="bob")
        assert again == theirs
        assert len(await chroma.nearest("bob", theirs, vector, -1.0, 100)) == 4, "each once"

        await chroma.trim(theirs, 1)
        assert await chroma.nearest("bob", theirs, vector, -1.0, 100) == [(theirs, 0)]
        assert len(await chroma.nearest("ada", None, vector, -1.0, 100)) > 5
        # What Chroma still has of a deleted document is no hit.
        await db.run(asked("DELETE FROM ingest.knowledge_document WHERE owner = 'bob' RETURNING id"))
        assert not (await shelf.search.search("bob", "settle a row", 5)).hits
        await shelf.vectors.discard(theirs)
        assert await chroma.nearest("bob", theirs, vector, -1.0, 100) == []
    await chroma.shut()


async def test_the_worker_builds_an_index_over_the_vectors_and_answers_stay_right(
    shelf: Shelf, dsn: str
) -> None:
    await fill(shelf)
    await shelf.add(
        "".join(f"# Filler {n}\n\nNothing of note, number {n}.\n\n" for n in range(60)), "filler.md"
    )
    upkeep = KnowledgeUpkeep(dsn, shelf.db, shelf.vectors, index_from=10)
    async with shelf.db.pool.connection() as connection:
        await connection.execute("ANALYZE ingest.knowledge_segment")
    while await upkeep.run_once():
        pass
    (index,) = await shelf.db.run(segments.near_indexes())
    assert index["finished"]
    await shelf.search.refresh()
    for question, (_, heading, _, _) in QUESTIONS.items():
        assert (await shelf.search.search("ada", question, 3)).hits[0].heading == heading, question


async def test_a_newcomer_reads_the_right_paragraph_of_our_own_documents(shelf: Shelf) -> None:
    for path in sorted(Path(__file__).parents[2].joinpath("docs").glob("*.md")):
        await shelf.add(path.read_bytes(), path.name)
    found = await shelf.search.search("ada", "who may settle a row?", 3)
    assert ("lease-protocol.md", "The lease protocol of the outbox › Who may settle a row") in [
        (hit.title, hit.heading) for hit in found.hits
    ]
