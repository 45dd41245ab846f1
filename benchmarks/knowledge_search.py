"""Search in documents against its bare statements, at 200,000 passages.

    python -m benchmarks knowledge_search
    ENGRAM_BENCH_SEGMENTS=20000 python -m benchmarks knowledge_search

One owner has a hundredth of the passages, another the rest; questions are drawn
by word frequency, and are the ten commonest words. They are asked one at a time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from uuid import NAMESPACE_URL, uuid5

import psycopg

from benchmarks.bare.knowledge_search import BareSearch
from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from benchmarks.memory_corpus import SMALL_SPACE, Corpus, Memory
from engram.ingest.search import KnowledgeSearch
from engram.ingest.upkeep import KnowledgeUpkeep
from engram.ingest.vectors import KnowledgeVectors, RowVectors
from engram.postgres import AsyncExecutor
from engram.postgres.near_index import searching
from engram.postgres.pool import async_pool, connect
from engram.search.embeddings import LocalEmbedder, embed_locally
from engram.search.tokens import tokenize, tsvector

SEGMENTS = int(os.environ.get("ENGRAM_BENCH_SEGMENTS", "200000"))
IN_A_DOCUMENT = 50
QUESTIONS = 100
K = 10
_BATCH = 5_000
_COLUMNS = "document_id, ordinal, tags, heading, content, words, embedding, to_embed"
_DOCUMENT = "id, owner, title, filename, media_type, sha256, bytes, artifact_key"


def load(dsn: str) -> None:
    """Documents of two owners, analysed and indexed as they would be after a while."""
    asyncio.run(_kept(dsn))
    by_owner: dict[str, list[Memory]] = {"few": [], "many": []}
    for memory in Corpus().memories(SEGMENTS):
        by_owner["few" if memory.space == SMALL_SPACE else "many"].append(memory)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for owner, texts in by_owner.items():
            for start in range(0, len(texts), _BATCH):
                _copy(connection, owner, start, [memory.content for memory in texts[start : start + _BATCH]])
        connection.execute("VACUUM ANALYZE ingest.knowledge_segment")
    asyncio.run(_kept(dsn))


def _copy(
    connection: psycopg.Connection[tuple[object, ...]], owner: str, start: int, texts: list[str]
) -> None:
    vectors = embed_locally(texts)
    places = [divmod(start + n, IN_A_DOCUMENT) for n in range(len(texts))]
    ids = {number: uuid5(NAMESPACE_URL, f"{owner}/{number}") for number, _ in places}
    with connection.cursor() as cursor:
        for number, document in ids.items():
            sha = f"{number:032x}{ord(owner[0]):032x}"
            cursor.execute(
                f"INSERT INTO ingest.knowledge_document ({_DOCUMENT})"
                f" VALUES ('{document}', '{owner}', 'd{number}', 'd', 'text/plain', '{sha}', 1, 'k')"
                " ON CONFLICT DO NOTHING".encode()
            )
        with cursor.copy(f"COPY ingest.knowledge_segment ({_COLUMNS}) FROM STDIN".encode()) as copy:
            for (number, ordinal), text, vector in zip(places, texts, vectors, strict=True):
                document = ids[number]
                tags = [f"owner:{owner}", f"document:{document}"]
                words = tsvector(tokenize(text))
                copy.write_row(
                    (document, ordinal, tags, f"Part {ordinal}", text, words, _literal(vector), False)
                )


def _literal(vector: Sequence[float]) -> str:
    return f"[{','.join(f'{number:.5f}' for number in vector)}]"


async def _kept(dsn: str) -> None:
    """What a worker does in the background: make ready for vectors, build their index."""
    async with async_pool(dsn) as pool:
        db, embedder = AsyncExecutor(pool), LocalEmbedder()
        vectors = KnowledgeVectors(RowVectors(db), embedder)
        upkeep = KnowledgeUpkeep(dsn, db, vectors)
        while await upkeep.run_once():
            pass
        await embedder.shut()


def by_statements(dsn: str, owner: str, questions: list[str]) -> float:
    """Milliseconds a search, on average."""
    search = BareSearch(dsn)
    times = []
    for question in questions:
        started = time.perf_counter()
        search.search(owner, question, K)
        times.append(time.perf_counter() - started)
    search.close()
    return 1000 * statistics.mean(times)


def by_engram(dsn: str, owner: str, questions: list[str]) -> float:
    return asyncio.run(_by_engram(dsn, owner, questions))


async def _by_engram(dsn: str, owner: str, questions: list[str]) -> float:
    async with async_pool(searching(dsn)) as pool:
        db, embedder = AsyncExecutor(pool), LocalEmbedder()
        search = KnowledgeSearch(db, KnowledgeVectors(RowVectors(db), embedder))
        await search.search(owner, "the first one makes ready", K)
        times = []
        for question in questions:
            started = time.perf_counter()
            found = await search.search(owner, question, K)
            times.append(time.perf_counter() - started)
            if found.words_only_because is not None:
                raise SystemExit(f"searched by words only: {found.words_only_because}")
        await search.shut()
        await embedder.shut()
        return 1000 * statistics.mean(times)


def main() -> None:
    print(f"search in documents: {K} of {SEGMENTS:,} passages")
    corpus = Corpus(31)
    kinds = {"drawn by frequency": corpus.questions(QUESTIONS), "the ten commonest words": corpus.commonest()}
    with database_server() as server, fresh_database(server) as dsn:
        load(dsn)
        with connect(dsn) as connection:
            (row,) = connection.execute("SELECT count(*) AS n FROM ingest.knowledge_segment").fetchall()
            print(f"  {row['n']:,} passages are in", flush=True)
        for owner in ("many", "few"):
            for name, questions in kinds.items():
                by_statements(dsn, owner, questions[:10])
                values = alternate(
                    statements=partial(by_statements, dsn, owner, questions),
                    engram=partial(by_engram, dsn, owner, questions),
                )
                for side, measured in values.items():
                    told(f"{name}, owner of {owner}, {side}", measured, "ms")
                ratio = median(values["engram"]) / median(values["statements"])
                verdict(f"{name}, owner of {owner}, against the statements", ratio, 1.5, at_most=True)


if __name__ == "__main__":
    main()
