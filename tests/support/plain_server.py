"""A stand-in for OpenMemory's JS server, written from its public API, as plain as it can be.

It keeps what it is given in a list: no idempotency keys, no deduplication. What
is added twice is there twice, so it shows what a cleverer server would hide.
"""

from __future__ import annotations

import threading
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


class PlainServer:
    def __init__(self) -> None:
        self.memories: list[dict] = []
        self._lock = threading.Lock()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/memory/add", self._add, methods=["POST"]),
                Route("/memory/query", self._query, methods=["POST"]),
                Route("/memory/all", self._all),
                Route("/memory/{memory_id}", self._get, methods=["GET"]),
                Route("/memory/{memory_id}", self._delete, methods=["DELETE"]),
            ]
        )

    async def __call__(self, scope, receive, send) -> None:
        await self.app(scope, receive, send)

    def contents(self) -> list[str]:
        return [memory["content"] for memory in self.memories]

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"ok": True})

    async def _add(self, request: Request) -> JSONResponse:
        body = await request.json()
        memory = {
            "id": str(uuid4()),
            "content": body["content"],
            "tags": body["tags"],
            "metadata": body["metadata"],
        }
        with self._lock:
            self.memories.append(memory)
        return JSONResponse({"id": memory["id"], "primary_sector": "semantic", "sectors": ["semantic"]})

    async def _query(self, request: Request) -> JSONResponse:
        body = await request.json()
        words = set(body["query"].lower().split())
        found = [m for m in self.memories if words & set(m["content"].lower().split())]
        matches = [{"id": m["id"], "content": m["content"], "score": 0.5} for m in found[: body["k"]]]
        return JSONResponse({"query": body["query"], "matches": matches})

    async def _all(self, request: Request) -> JSONResponse:
        return JSONResponse({"items": self.memories[:1]})

    async def _get(self, request: Request) -> JSONResponse:
        found = [m for m in self.memories if m["id"] == request.path_params["memory_id"]]
        return JSONResponse(found[0]) if found else JSONResponse({"error": "not_found"}, 404)

    async def _delete(self, request: Request) -> JSONResponse:
        with self._lock:
            found = [m for m in self.memories if m["id"] == request.path_params["memory_id"]]
            for memory in found:
                self.memories.remove(memory)
        return JSONResponse({"ok": True}) if found else JSONResponse({"error": "not_found"}, 404)
