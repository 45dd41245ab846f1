"""The gateway's process: everything behind its routes and tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from fastapi import FastAPI

from engram.api.app import create_app
from engram.api.services import Services
from engram.assembly.addresses import dsn_of, own_migrations
from engram.assembly.callers import tokens_of
from engram.assembly.knowledge import open_knowledge
from engram.assembly.parts import artifacts, open_client, open_executor
from engram.assembly.queues import open_queue
from engram.assembly.sandboxes import open_sandboxes
from engram.embedded import running_redis
from engram.gateway.capabilities import Gatekeeper, Looks
from engram.gateway.erasing import Eraser
from engram.gateway.evidence import Evidence
from engram.gateway.gate import CAPABILITIES
from engram.gateway.governing import Governing
from engram.gateway.memory_forget import MemoryForget
from engram.gateway.memory_query import MemoryQuery
from engram.gateway.memory_store import MemoryStore
from engram.gateway.notebook import Notebook
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.placement import Placement
from engram.ingest.media import detect
from engram.ingest.uploads import Uploads
from engram.kernel.errors import ArtifactError
from engram.kernel.settings import Settings
from engram.logbook import outbox
from engram.logbook.idempotency import IdempotencyService
from engram.postgres.executors import AsyncExecutor
from engram.postgres.migrations import pending
from engram.postgres.notify import Notifier, running

DRAFTS_KEPT = timedelta(hours=1)


def build_app(settings: Settings) -> FastAPI:
    """The gateway."""
    return create_app(settings, lambda: open_services(settings), tokens=tokens_of(settings))


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    async with (
        open_executor(settings, "engram-gateway") as db,
        open_client(settings) as client,
        running(Notifier(db, outbox.CHANNEL)) as notifier,
        open_queue(settings, db) as queue,
        open_sandboxes(settings, db) as sandboxes,
        open_knowledge(settings) as knowledge,
    ):
        await asyncio.to_thread(_sweep_drafts, settings)
        project = settings.project_key
        placement = Placement(db, project)
        yield Services(
            settings=settings,
            db=db,
            client=client,
            idempotency=IdempotencyService(db, ttl_seconds=settings.idempotency_ttl_seconds),
            store=MemoryStore(db, client, settings, on_parked=notifier.poke),
            query=MemoryQuery(db, client, settings),
            forget=MemoryForget(db, Eraser(db, client), settings),
            governing=Governing(db, project),
            evidence=Evidence(db, artifacts(settings), placement, max_bytes=settings.max_body_bytes),
            notebook=Notebook(db, placement, project),
            gatekeeper=gatekeeper(settings, db, client),
            sandboxes=sandboxes,
            knowledge=knowledge,
            uploads=Uploads(
                db,
                artifacts(settings),
                queue,
                max_bytes=settings.ingest_max_upload_bytes,
                detect=detect,
                discard=knowledge.vectors.discard,
            ),
        )


def _sweep_drafts(settings: Settings) -> None:
    """What writers that died had begun to keep; whether the folder can be used at all is the gate's to say."""
    with suppress(ArtifactError):
        artifacts(settings).sweep(DRAFTS_KEPT)


def gatekeeper(settings: Settings, db: AsyncExecutor, client: OpenMemoryClient) -> Gatekeeper:
    dsn, known, data_dir = dsn_of(settings), own_migrations(), settings.data_dir
    looks = Looks(
        db,
        client,
        artifacts(settings),
        settings.project_key,
        pending=lambda: pending(dsn, known),
        redis_url=lambda: settings.redis_url or running_redis(data_dir),
    )
    skipped = [name for name in CAPABILITIES if getattr(settings, f"skip_{name}")]
    return Gatekeeper(looks.table(), mode=settings.gateway_mode, skipped=skipped)
