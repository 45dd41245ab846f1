"""What the routes and tools work with; made by `engram.assembly`, held by the application."""

from __future__ import annotations

from dataclasses import dataclass

from engram.gateway.capabilities import Gatekeeper
from engram.gateway.evidence import Evidence
from engram.gateway.governing import Governing
from engram.gateway.memory_forget import MemoryForget
from engram.gateway.memory_query import MemoryQuery
from engram.gateway.memory_store import MemoryStore
from engram.gateway.notebook import Notebook
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.ingest.search import KnowledgeSearch
from engram.ingest.uploads import Uploads
from engram.kernel.settings import Settings
from engram.logbook.idempotency import IdempotencyService
from engram.postgres.executors import AsyncExecutor
from engram.sandboxes.service import Sandboxes


@dataclass(frozen=True, slots=True)
class Services:
    settings: Settings
    db: AsyncExecutor
    client: OpenMemoryClient
    idempotency: IdempotencyService
    store: MemoryStore
    query: MemoryQuery
    forget: MemoryForget
    governing: Governing
    evidence: Evidence
    notebook: Notebook
    gatekeeper: Gatekeeper
    sandboxes: Sandboxes
    uploads: Uploads
    knowledge: KnowledgeSearch
