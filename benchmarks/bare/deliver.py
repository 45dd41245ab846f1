"""The bare delivery: so many tasks, each adding one memory after the other, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import httpx2


async def deliver(url: str, api_key: str, memories: Iterable[tuple[str, str, str]], concurrency: int) -> int:
    """Adds every `(content, space, sha)`; answers how many the server took."""
    waiting = iter(memories)
    ids: list[str] = []
    limits = httpx2.Limits(max_connections=64, max_keepalive_connections=32, keepalive_expiry=30)
    async with httpx2.AsyncClient(
        base_url=url, headers={"x-api-key": api_key}, limits=limits, timeout=5, trust_env=False
    ) as http:
        await asyncio.gather(*(_add_all(http, waiting, ids) for _ in range(concurrency)))
    return len(ids)


async def _add_all(http: httpx2.AsyncClient, waiting: Iterator[tuple[str, str, str]], ids: list[str]) -> None:
    for content, space, sha in waiting:
        body = {"content": content, "tags": [f"space:{space}", f"sha:{sha}"], "metadata": {}}
        answer = await http.post("/memory/add", json=body, headers={"Idempotency-Key": f"bare-{sha}"})
        answer.raise_for_status()
        ids.append(answer.json()["id"])
