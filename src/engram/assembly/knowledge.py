"""Search in documents, and where their vectors are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engram.assembly.addresses import dsn_of
from engram.ingest.chroma import ChromaVectors
from engram.ingest.search import KnowledgeSearch
from engram.ingest.vectors import KnowledgeVectors, RowVectors
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from engram.postgres.near_index import searching
from engram.postgres.pool import async_pool
from engram.search.embeddings import embedder_for


@asynccontextmanager
async def open_knowledge_vectors(
    settings: Settings, db: AsyncExecutor, *, fills: bool = False
) -> AsyncIterator[KnowledgeVectors]:
    """The vectors of documents: in their rows, or in Chroma where one is configured."""
    embedder = embedder_for(settings.embeddings_url, settings.embeddings_key, settings.embeddings_model)
    chroma = ChromaVectors(settings.chroma_base_url) if settings.chroma_base_url else None
    try:
        yield KnowledgeVectors(chroma or RowVectors(db, fills=fills), embedder)
    finally:
        await embedder.shut()
        if chroma is not None:
            await chroma.shut()


@asynccontextmanager
async def open_knowledge(settings: Settings) -> AsyncIterator[KnowledgeSearch]:
    """Search in documents, over connections whose plans and index scans suit it."""
    pool = async_pool(searching(dsn_of(settings)), min_size=0, application_name="engram-knowledge")
    async with pool:
        db = AsyncExecutor(pool)
        async with open_knowledge_vectors(settings, db) as vectors:
            search = KnowledgeSearch(db, vectors)
            try:
                yield search
            finally:
                await search.shut()
