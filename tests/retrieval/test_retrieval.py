"""Both ways together find more of the known items than either alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from engram.embedded import EmbeddedPostgres
from engram.memory.server import prepare
from engram.postgres.pool import connect
from retrieval.judging import corpus, judge, questions, rankings

pytestmark = pytest.mark.anyio


@pytest.fixture
def dsn(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    postgres_server.ensure_database("retrieval")
    prepare(postgres_server.dsn("retrieval"))
    yield postgres_server.dsn("retrieval")
    with connect(postgres_server.dsn("postgres")) as admin:
        admin.execute("DROP DATABASE retrieval WITH (FORCE)")


async def test_fused_is_better_than_words_and_better_than_vectors(dsn: str) -> None:
    async with rankings(dsn) as ways:
        words, vectors, fused = [await judge(ways[way], questions()) for way in ("words", "vectors", "fused")]
    assert fused.recall > max(words.recall, vectors.recall)
    assert fused.mrr > max(words.mrr, vectors.mrr)
    assert fused.recall >= 0.68
    assert words.recall >= 0.57
    assert vectors.recall >= 0.61


def test_the_set_is_what_it_says() -> None:
    asked, memories = questions(), corpus()
    assert len(asked) >= 200
    assert Counter(question.language for question in asked).keys() == {"en", "zh", "mix"}
    assert {question.expects for question in asked} <= set(memories)
    assert len({question.question for question in asked}) == len(asked)
    assert len(set(memories.values())) == len(memories)
