"""A stand-in for somebody's embeddings service, written from OpenAI's public API; it fails when told to.

A text's vector is the sum of its words' own directions, and words of `ALIKE`
share one, so what is near to what is plain to see.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engram.search.embeddings import RemoteEmbedder
from engram.search.tokens import tokenize
from support.serving import serving

ALIKE = {"automobile": "car", "physician": "doctor"}
KEY = "sk-hunter2"


class EmbeddingService:
    """`calls` has the texts of every call but the one that asks how long a vector is; `let_go` holds them."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.keys: set[str | None] = set()
        self.down = False
        self.nonsense: object = None
        self.refuses = ""
        self.dimensions = 256
        self.let_go = threading.Event()
        self.let_go.set()
        self.url = ""
        self._app = Starlette(routes=[Route("/v1/embeddings", self._embed, methods=["POST"])])

    async def __call__(self, scope, receive, send) -> None:
        await self._app(scope, receive, send)

    def embedder(self, model: str = "stand-in", **more) -> RemoteEmbedder:
        return RemoteEmbedder(f"{self.url}/v1/embeddings", KEY, model, **more)

    async def _embed(self, request: Request) -> Response:
        body = await request.json()
        self.keys.add(request.headers.get("authorization"))
        if body["input"] != ["how long is a vector?"]:
            self.calls.append(body["input"])
            while not self.let_go.is_set():
                await asyncio.sleep(0.005)
        if self.down:
            return JSONResponse({"error": "told to"}, 503)
        if self.refuses and any(self.refuses in text for text in body["input"]):
            return JSONResponse({"error": "told to"}, 400)
        if self.nonsense is not None:
            return JSONResponse(self.nonsense)
        entries = [
            {"index": at, "embedding": [float(x) for x in self._vector(text)]}
            for at, text in enumerate(body["input"])
        ]
        return JSONResponse({"data": entries[::-1]})

    def _vector(self, text: str) -> np.ndarray:
        return sum((self._direction(word) for word in tokenize(text)), np.zeros(self.dimensions))

    def _direction(self, word: str) -> np.ndarray:
        seed = hashlib.sha256(ALIKE.get(word, word).encode()).digest()[:8]
        return np.random.default_rng(int.from_bytes(seed)).standard_normal(self.dimensions)


@contextmanager
def running() -> Iterator[EmbeddingService]:
    service = EmbeddingService()
    with serving(service) as url:
        service.url = url
        yield service
        service.let_go.set()
