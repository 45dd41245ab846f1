"""Whether the right memory is found: words alone, vectors alone, both; and a real OpenMemory's answer.

The set is in tests/retrieval. Where OPENMEMORY_BASE_URL (and OPENMEMORY_API_KEY)
name a server, the memories are added to it and it is asked the same questions.
"""

from __future__ import annotations

import asyncio
import os

import httpx2
from tests.retrieval.judging import FIRST, Rank, Score, corpus, judge, questions, rankings

from benchmarks.measuring import database_server, verdict
from engram.embedded import EmbeddedPostgres
from engram.memory.server import prepare

LANGUAGES = {"en": "English", "zh": "Chinese", "mix": "mixed"}


async def openmemory(url: str, key: str | None) -> dict[str, Score]:
    headers = {"x-api-key": key} if key else {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        names = {}
        for name, content in corpus().items():
            reply = await http.post("/memory/add", json={"content": content, "tags": ["retrieval"]})
            names[reply.raise_for_status().json()["id"]] = name

        async def rank(question: str) -> list[str]:
            reply = await http.post("/memory/query", json={"query": question, "k": 50})
            return [names.get(match["id"], "") for match in reply.raise_for_status().json()["matches"]]

        return await scores(rank)


async def scores(rank: Rank) -> dict[str, Score]:
    asked = questions()
    by_language = {
        name: await judge(rank, [q for q in asked if q.language == code]) for code, name in LANGUAGES.items()
    }
    return {"all": await judge(rank, asked), **by_language}


async def embedded(server: EmbeddedPostgres) -> dict[str, dict[str, Score]]:
    server.ensure_database("bench_retrieval")
    prepare(server.dsn("bench_retrieval"))
    async with rankings(server.dsn("bench_retrieval")) as ways:
        return {name: await scores(rank) for name, rank in ways.items()}


def main() -> None:
    print(f"retrieval: {len(questions())} questions about {len(corpus())} memories, recall@{FIRST} (MRR)")
    with database_server() as server:
        table = asyncio.run(embedded(server))
    if url := os.environ.get("OPENMEMORY_BASE_URL"):
        table["OpenMemory"] = asyncio.run(openmemory(url, os.environ.get("OPENMEMORY_API_KEY")))
    print(f"  {'':<12}" + "".join(f"{name:>16}" for name in ("all", *LANGUAGES.values())))
    for name, row in table.items():
        print(f"  {name:<12}" + "".join(f"{f'{s.recall:.3f} ({s.mrr:.3f})':>16}" for s in row.values()))
    for other in ("words", "vectors"):
        ratio = table["fused"]["all"].recall / table[other]["all"].recall
        verdict(f"recall@{FIRST}, fused against {other} alone", ratio, 1.0)


if __name__ == "__main__":
    main()
