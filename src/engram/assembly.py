"""The only place that turns settings into services.

`addresses` gives every part an address: the configured one, or that of the
embedded part, which it starts or adopts and holds for as long as it is open.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from engram.api.app import create_app
from engram.api.services import Services
from engram.api.tokens_file import TokensFile
from engram.embedded import EmbeddedPostgres, running_redis
from engram.gateway.alerts import open_alerts
from engram.gateway.breaker import Breaker
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
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.placement import Placement
from engram.gateway.reconcile_outbox import Reconciler
from engram.kernel.errors import ConfigError, SchemaError
from engram.kernel.logs import hide
from engram.kernel.settings import Settings
from engram.logbook import outbox
from engram.logbook.artifacts import LocalArtifacts
from engram.logbook.idempotency import IdempotencyService
from engram.postgres.executors import AsyncExecutor
from engram.postgres.migrations import Migration, load_migrations, migrate, pending
from engram.postgres.notify import Listener, Notifier, running
from engram.postgres.pool import async_pool
from engram.web.guards import is_loopback
from engram.web.sockets import bound, free_port

MEMORY_DATABASE = "engram_memory"

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    return None


@contextmanager
def addresses(settings: Settings, on_progress: Progress = _silent) -> Iterator[Settings]:
    """Settings in which every part that a role needs has an address."""
    with ExitStack() as held:
        dsn = settings.postgres_dsn
        if dsn is None:
            dsn = held.enter_context(EmbeddedPostgres(settings.data_dir, on_progress=on_progress)).dsn()
            migrate_all(dsn, on_progress)
        yield with_memory_server(replace(settings, postgres_dsn=dsn))


def with_memory_server(settings: Settings) -> Settings:
    """The configured memory server, or the embedded one of this data folder."""
    if settings.openmemory_base_url is not None:
        hide(settings.openmemory_api_key)
        return settings
    key = settings.openmemory_api_key or memory_api_key(settings.data_dir)
    hide(key)
    url = f"http://127.0.0.1:{memory_port(settings.data_dir)}"
    return replace(settings, openmemory_base_url=url, openmemory_api_key=key)


def has_memory_server(data_dir: Path) -> bool:
    """Whether an embedded memory server was ever started in this data folder."""
    return _port_file(data_dir).exists()


def memory_api_key(data_dir: Path) -> str:
    """The embedded memory server's key: made once, readable by its owner only."""
    return _kept(data_dir / "memory" / "api-key", lambda: secrets.token_urlsafe(32))


def memory_port(data_dir: Path) -> int:
    """The embedded memory server's port: a free one, chosen once, so that restarts keep it."""
    return int(_kept(_port_file(data_dir), lambda: str(free_port())))


def renew_memory_port(data_dir: Path) -> None:
    """Forget the kept port if somebody else has it now."""
    if has_memory_server(data_dir):
        try:
            bound("127.0.0.1", memory_port(data_dir)).close()
        except ConfigError:
            _port_file(data_dir).unlink()


def own_migrations() -> list[Migration]:
    return load_migrations("engram.migrations")


def migrate_all(dsn: str, on_progress: Progress = _silent) -> list[Migration]:
    return migrate(dsn, own_migrations(), on_progress=on_progress)


def require_schema(settings: Settings) -> None:
    """Refuse a database that is behind; somebody else's is not migrated unasked."""
    if todo := pending(_dsn(settings), own_migrations()):
        raise SchemaError(
            f"the database lacks {len(todo)} migration(s), first {todo[0]}", hint="run `engram migrate`"
        )


def build_app(settings: Settings) -> FastAPI:
    """The gateway."""
    return create_app(settings, lambda: open_services(settings), tokens=tokens_of(settings))


def require_loopback(settings: Settings) -> None:
    """Refuse what `build_app` would refuse, before anything is started."""
    tokens_of(settings)


def tokens_of(settings: Settings) -> TokensFile | None:
    """Who may call. None: everybody on this machine, and nobody else can reach the gateway."""
    if settings.tokens_file is not None:
        return TokensFile(settings.tokens_file)
    if is_loopback(settings.gateway_host):
        return None
    raise ConfigError(
        f"GATEWAY_HOST: will not listen on {settings.gateway_host} without tokens,"
        " because anybody who reaches it could read and write everything",
        hint="make one with `engram token create OWNER` and set ENGRAM_TOKENS_FILE, or listen on 127.0.0.1",
    )


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    async with (
        open_executor(settings, "engram-gateway") as db,
        open_client(settings) as client,
        running(Notifier(db, outbox.CHANNEL)) as notifier,
    ):
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
        )


def gatekeeper(settings: Settings, db: AsyncExecutor, client: OpenMemoryClient) -> Gatekeeper:
    dsn, known, data_dir = _dsn(settings), own_migrations(), settings.data_dir
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


def artifacts(settings: Settings) -> LocalArtifacts:
    """Where evidence is kept."""
    return LocalArtifacts(settings.artifacts_dir or settings.data_dir / "artifacts")


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
    listener = Listener(_dsn(settings), outbox.CHANNEL, application_name="engram-worker-listen")
    async with running(listener):
        yield listener.heard


@asynccontextmanager
async def open_reconciler(settings: Settings) -> AsyncIterator[Reconciler]:
    async with open_executor(settings, "engram-reconcile") as db, open_client(settings) as client:
        yield Reconciler(db, Eraser(db, client))


@asynccontextmanager
async def open_executor(settings: Settings, application_name: str) -> AsyncIterator[AsyncExecutor]:
    async with async_pool(_dsn(settings), min_size=2, application_name=application_name) as pool:
        yield AsyncExecutor(pool)


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[OpenMemoryClient]:
    if settings.openmemory_base_url is None:
        raise ConfigError("OPENMEMORY_BASE_URL is not set", hint="e.g. http://127.0.0.1:8080")
    breaker = Breaker(failures=settings.breaker_failures, cooldown=settings.breaker_cooldown_seconds)
    client = OpenMemoryClient(
        settings.openmemory_base_url,
        api_key=settings.openmemory_api_key,
        timeout=settings.openmemory_timeout_seconds,
        breaker=breaker,
    )
    try:
        yield client
    finally:
        await client.close()


def _dsn(settings: Settings) -> str:
    if settings.postgres_dsn is None:
        raise ConfigError("POSTGRES_DSN is not set", hint="e.g. postgresql://engram@db.internal/engram")
    return settings.postgres_dsn


def _port_file(data_dir: Path) -> Path:
    return data_dir / "memory" / "port"


def _kept(path: Path, make: Callable[[], str]) -> str:
    """A value made once and kept; two processes at once agree on the first that was whole."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        draft.touch(mode=0o600)
        draft.write_text(make(), "utf-8")
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text("utf-8").strip()
