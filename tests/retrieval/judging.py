"""Known-item search: each question has one memory that answers it; is it among the first five?

The memories and questions were written for this: what a software team tells
itself, in English, Chinese and both, asked in other words than it was told.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engram.memory import store
from engram.memory.connections import memory_pool
from engram.memory.requests import Filters, Search
from engram.memory.search import HybridSearch
from engram.memory.upkeep import Upkeep
from engram.memory.vectors import Vectors
from engram.postgres import AsyncExecutor
from engram.search.embeddings import LocalEmbedder

HERE = Path(__file__).parent
FIRST = 5
TENANT = "retrieval"

Rank = Callable[[str], Awaitable[list[str]]]
"""A question -> the ids of memories, best first."""


@dataclass(frozen=True)
class Question:
    question: str
    expects: str
    language: str


@dataclass(frozen=True)
class Score:
    recall: float
    mrr: float


def corpus() -> dict[str, str]:
    lines = (HERE / "corpus.jsonl").read_text("utf-8").splitlines()
    return {entry["id"]: entry["content"] for entry in map(json.loads, lines)}


def questions() -> list[Question]:
    lines = (HERE / "questions.jsonl").read_text("utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


async def judge(rank: Rank, asked: Sequence[Question]) -> Score:
    """The share of questions answered within the first five, and the mean of 1/place."""
    places = []
    for question in asked:
        found = await rank(question.question)
        places.append(found.index(question.expects) + 1 if question.expects in found else None)
    return Score(
        recall=sum(place is not None and place <= FIRST for place in places) / len(places),
        mrr=sum(1 / place for place in places if place) / len(places),
    )


@asynccontextmanager
async def rankings(dsn: str) -> AsyncIterator[dict[str, Rank]]:
    """The corpus in the embedded memory server's database; three ways to ask it."""
    async with memory_pool(dsn) as pool:
        db = AsyncExecutor(pool)
        vectors = Vectors(db, LocalEmbedder())
        while vectors.state != "ready":
            await vectors.run_once()
            assert vectors.state != "off", vectors.because
        known = {}
        for name, content in corpus().items():
            added = store.add(TENANT, content, [], {}, vector=await vectors.of(content))
            known[(await db.run(added)).id] = name
        search = HybridSearch(db, vectors, Upkeep(dsn, db, vectors))

        def asked(question: str) -> Search:
            return Search(question, 50, Filters())

        async def words(question: str) -> list[str]:
            return [known[found] for found in await search.by_words(TENANT, asked(question))]

        async def near(question: str) -> list[str]:
            return [known[found] for found in await search.by_vectors(TENANT, asked(question)) or []]

        async def fused(question: str) -> list[str]:
            return [known[row["id"]] for row in await search.matches(TENANT, asked(question))]

        yield {"words": words, "vectors": near, "fused": fused}
