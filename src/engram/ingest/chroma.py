"""Vectors with Chroma, over its HTTP API (v2): the only module that speaks to it.

A collection belongs to one model, by name, because vectors of two models cannot
be compared. An entry is named after its passage, so writing it twice leaves it
once. Every failure is `VectorStoreFailed`, which is worth another try.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx2

from engram.ingest.chunking import Passage
from engram.ingest.seam import Work
from engram.ingest.segments import Key
from engram.kernel.errors import VectorStoreFailed
from engram.search.vectors import Version

if TYPE_CHECKING:
    from engram.search.embeddings import Matrix, Vector

_COLLECTIONS = "/api/v2/tenants/default_tenant/databases/default_database/collections"
_TIMEOUT_SECONDS = 10.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_HINT = "check CHROMA_BASE_URL"


class ChromaVectors:
    subject = "knowledge"
    in_rows = False

    def __init__(self, base_url: str, *, timeout: float = _TIMEOUT_SECONDS) -> None:
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            timeout=timeout,
            # A proxy from the environment must never see traffic to this machine.
            trust_env=urlsplit(base_url).hostname not in _LOOPBACK,
        )
        self._collection: str | None = None

    async def shut(self) -> None:
        await self._client.aclose()

    async def use(self, model: str, dimensions: int) -> str | None:
        asked = {
            "name": f"engram-{hashlib.sha256(model.encode()).hexdigest()[:16]}-{dimensions}",
            "get_or_create": True,
            "configuration": {"hnsw": {"space": "cosine"}},
        }
        found = await self._post(_COLLECTIONS, asked)
        try:
            self._collection = str(UUID(found["id"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _nonsense() from error
        return None

    async def waiting(self, limit: int) -> Sequence[Version]:
        """Nothing waits: a passage's vector is written with its document or the task is tried again."""
        return []

    async def count_waiting(self) -> int:
        return 0

    async def fill(self, batch: Sequence[Version], vectors: Matrix) -> None:
        """Nothing waits."""

    async def leave(self, batch: Sequence[Version]) -> None:
        """Nothing waits."""

    async def put(self, work: Work, batch: Sequence[Passage], vectors: Matrix) -> None:
        document = str(work.document_id)
        entries = {
            "ids": [f"{document}:{passage.ordinal}" for passage in batch],
            "embeddings": vectors.tolist(),
            "metadatas": [
                {"owner": work.owner, "document": document, "ordinal": passage.ordinal} for passage in batch
            ],
        }
        await self._ask("upsert", entries)

    async def trim(self, document_id: UUID, count: int) -> None:
        where = {"$and": [{"document": str(document_id)}, {"ordinal": {"$gte": count}}]}
        await self._ask("delete", {"where": where})

    async def nearest(
        self, owner: str, document_id: UUID | None, vector: Vector, close: float, limit: int
    ) -> list[Key]:
        wanted: list[dict[str, str]] = [{"owner": owner}]
        if document_id is not None:
            wanted.append({"document": str(document_id)})
        asked = {
            "query_embeddings": [vector.tolist()],
            "n_results": limit,
            "where": wanted[0] if len(wanted) == 1 else {"$and": wanted},
            "include": ["distances"],
        }
        return _near(await self._ask("query", asked), close)

    async def _ask(self, verb: str, body: Mapping[str, Any]) -> Any:
        if self._collection is None:
            raise VectorStoreFailed("Chroma was not asked for its collection yet", hint=_HINT)
        return await self._post(f"{_COLLECTIONS}/{self._collection}/{verb}", body)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            reply = await self._client.post(path, json=body)
        except httpx2.HTTPError as error:
            raise VectorStoreFailed(
                f"Chroma cannot be reached: {type(error).__name__}", hint=_HINT
            ) from error
        if reply.status_code not in (200, 201):
            raise VectorStoreFailed(f"Chroma answered {reply.status_code}", hint=_HINT)
        try:
            return reply.json()
        except ValueError as error:
            raise _nonsense() from error


def _near(answer: Any, close: float) -> list[Key]:
    try:
        hits = zip(answer["ids"][0], answer["distances"][0], strict=True)
        return [_key(name) for name, distance in hits if float(distance) <= 1 - close]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _nonsense() from error


def _key(name: str) -> Key:
    document, _, ordinal = name.partition(":")
    return UUID(document), int(ordinal)


def _nonsense() -> VectorStoreFailed:
    return VectorStoreFailed("Chroma answered nonsense", hint=_HINT)
