"""The outbox worker's process, and reconciliation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engram.assembly.addresses import dsn_of
from engram.assembly.parts import open_client, open_executor
from engram.gateway.alerts import open_alerts
from engram.gateway.erasing import Eraser
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.reconcile_outbox import Reconciler
from engram.kernel.settings import Settings
from engram.logbook import outbox
from engram.postgres.notify import Listener, running


@asynccontextmanager
async def open_worker(
    settings: Settings, *, stop: asyncio.Event | None = None
) -> AsyncIterator[tuple[OutboxWorker, Reconciler]]:
    async with (
        open_executor(settings, "engram-worker") as db,
        open_client(settings) as client,
        open_alerts(settings.alert_webhook_url) as alerts,
    ):
        worker = OutboxWorker(db, client, settings, alerts=alerts, stop=stop)
        yield worker, Reconciler(db, Eraser(db, client))


@asynccontextmanager
async def outbox_wake_ups(settings: Settings) -> AsyncIterator[asyncio.Event]:
    """Set when something was parked, if the database can tell: a hint, beside polling."""
    listener = Listener(dsn_of(settings), outbox.CHANNEL, application_name="engram-worker-listen")
    async with running(listener):
        yield listener.heard


@asynccontextmanager
async def open_reconciler(settings: Settings) -> AsyncIterator[Reconciler]:
    async with open_executor(settings, "engram-reconcile") as db, open_client(settings) as client:
        yield Reconciler(db, Eraser(db, client))
