"""The only place that turns settings into services.

`addresses` gives every part an address: the configured one, or that of the
embedded part, which it starts or adopts and holds for as long as it is open.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from engram.api.app import create_app
from engram.api.services import Services
from engram.api.tokens_file import TokensFile
from engram.embedded import EmbeddedPostgres, EmbeddedRedis, running_redis
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
from engram.gateway.scm_consumer import Consumed, ScmConsumer
from engram.ingest.chroma import ChromaVectors
from engram.ingest.ingest_worker import IngestWorker, new_worker_id
from engram.ingest.kafka_queue import GROUP, TOPIC, KafkaQueue, KafkaSweeper
from engram.ingest.media import detect
from engram.ingest.parsing import Limits as ParserLimits
from engram.ingest.parsing import Parsers
from engram.ingest.pipeline import DocumentPipeline
from engram.ingest.publisher import EventPublisher, message_seconds
from engram.ingest.queue import Queue
from engram.ingest.reclaimer import Reclaimer
from engram.ingest.redis_queue import RedisQueue
from engram.ingest.seam import Pipeline
from engram.ingest.search import KnowledgeSearch
from engram.ingest.sweeper import Sweeper
from engram.ingest.upkeep import KnowledgeUpkeep
from engram.ingest.uploads import Uploads
from engram.ingest.vectors import KnowledgeVectors, RowVectors
from engram.kernel.errors import ConfigError, NotFound, SchemaError
from engram.kernel.logs import hide
from engram.kernel.runloop import RunOnce, cut_off, run_loop
from engram.kernel.settings import Settings
from engram.logbook import facts, outbox
from engram.logbook.artifacts import LocalArtifacts
from engram.logbook.idempotency import IdempotencyService
from engram.postgres.executors import AsyncExecutor
from engram.postgres.migrations import Migration, load_migrations, migrate, pending
from engram.postgres.near_index import searching
from engram.postgres.notify import Listener, Notifier, running
from engram.postgres.pool import async_pool
from engram.postgres.query import Row
from engram.sandboxes.driver import Driver, Limits
from engram.sandboxes.profiles import reachable
from engram.sandboxes.sandlock_driver import SandlockDriver
from engram.sandboxes.service import Sandboxes
from engram.scm import store as scm_store
from engram.scm.patches import Kept, Materializer
from engram.scm.source import Source
from engram.scm.sources import source_of
from engram.scm.store import Counts, Repo
from engram.scm.sync import Mode, Syncing
from engram.search.embeddings import embedder_for
from engram.web.guards import is_loopback
from engram.web.sockets import bound, free_port

MEMORY_DATABASE = "engram_memory"
SANDBOXES_OF_ROOT = Path("/var/lib/engram/sandboxes")
REAP_SECONDS = 5.0
INGEST_POLL_SECONDS = 0.5
INGEST_UPKEEP_SECONDS = 5.0
KAFKA_SWEEP_SECONDS = 1.0

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


@contextmanager
def with_redis(settings: Settings, on_progress: Progress = _silent) -> Iterator[Settings]:
    """Settings in which Redis has an address: the configured one, or the embedded one's, held meanwhile."""
    if settings.redis_url is not None:
        yield settings
        return
    with EmbeddedRedis(settings.data_dir, on_progress=on_progress) as redis:
        yield replace(settings, redis_url=redis.url())


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
        open_queue(settings, db) as queue,
        open_sandboxes(settings, db) as sandboxes,
        open_knowledge(settings) as knowledge,
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


@asynccontextmanager
async def open_sandboxes(settings: Settings, db: AsyncExecutor) -> AsyncIterator[Sandboxes]:
    """Sandboxes, and beside them whatever ends what is over."""
    sandboxes = Sandboxes(db, lambda database: sandbox_driver(settings, database), settings)
    stop = asyncio.Event()
    reaping = asyncio.create_task(
        run_loop("sandboxes.reaper", sandboxes.reap_quietly, idle_seconds=REAP_SECONDS, stop=stop)
    )
    try:
        yield sandboxes
    finally:
        stop.set()
        await reaping
        await sandboxes.close()


async def reap_sandboxes(settings: Settings, db: AsyncExecutor) -> int:
    """One pass of what every gateway does now and then; how much there was to do."""
    sandboxes = Sandboxes(db, lambda database: sandbox_driver(settings, database), settings)
    try:
        return await sandboxes.reap()
    finally:
        await sandboxes.close()


def sandbox_driver(settings: Settings, database: str) -> Driver | None:
    """What runs sandboxes on this host, for this database; None: switched off."""
    if settings.sandbox_driver == "none":
        return None
    uid = settings.sandbox_uid if os.geteuid() == 0 else None
    limits = Limits(
        memory_bytes=settings.sandbox_memory_mb << 20,
        cpu_seconds=settings.sandbox_cpu_seconds,
        processes=settings.sandbox_processes,
        output_bytes=settings.sandbox_output_bytes,
        disk_bytes=settings.sandbox_disk_mb << 20,
        file_bytes=settings.sandbox_file_mb << 20,
    )
    return SandlockDriver(_sandbox_root(settings, uid) / database, limits=limits, uid=uid)


def _sandbox_root(settings: Settings, uid: int | None) -> Path:
    """In the data folder, unless that is hidden from the user as whom commands run."""
    if settings.sandbox_dir is not None:
        return settings.sandbox_dir
    return settings.data_dir / "sandboxes" if reachable(settings.data_dir, uid) else SANDBOXES_OF_ROOT


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
async def open_queue(settings: Settings, db: AsyncExecutor, *, reads: bool = False) -> AsyncIterator[Queue]:
    """What tells ingest workers that there is work; it need not be there yet."""
    queue: RedisQueue | KafkaQueue
    if settings.ingest_queue == "kafka":
        queue = _kafka_queue(settings, db, reads=reads)
    else:
        queue = _redis_queue(settings)
    try:
        yield queue
    finally:
        await queue.close()


def _redis_queue(settings: Settings) -> RedisQueue:
    data_dir = settings.data_dir
    return RedisQueue(
        lambda: settings.redis_url or running_redis(data_dir), dlq=settings.ingest_dlq_stream_key
    )


def _kafka_queue(settings: Settings, db: AsyncExecutor, *, reads: bool) -> KafkaQueue:
    if not reads:
        return KafkaQueue(db, None)
    # Imported here: its library is needed by nobody else.
    from engram.ingest.kafka import KafkaSubscriber

    return KafkaQueue(db, KafkaSubscriber(kafka_servers(settings), [TOPIC], GROUP))


@dataclass(frozen=True, slots=True)
class IngestParts:
    """What an ingest worker process runs."""

    queue: Queue
    worker: IngestWorker
    reclaimer: Reclaimer | None
    sweeper: Sweeper | KafkaSweeper
    upkeep: RunOnce | None = None

    def loops(self, settings: Settings, stop: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """Everything it does, each at its own pace, until `stop`."""
        work, keep, kafka = self.worker, self.reclaimer, isinstance(self.sweeper, KafkaSweeper)
        lease = settings.ingest_lease_seconds
        paces: list[tuple[str, RunOnce, float]] = [
            ("ingest", work.run_once, INGEST_POLL_SECONDS),
            ("ingest.renew", work.renew, lease / 3),
            ("ingest.lapsed", work.count_lapsed, min(lease / 2, INGEST_UPKEEP_SECONDS)),
            ("ingest.sweep", self.sweeper.run_once, KAFKA_SWEEP_SECONDS if kafka else INGEST_UPKEEP_SECONDS),
            ("ingest.measure", self.queue.measure, INGEST_UPKEEP_SECONDS),
        ]
        if keep is not None:
            paces.append(("ingest.heartbeat", keep.beat, INGEST_UPKEEP_SECONDS))
        if keep is not None and settings.ingest_reclaim_enabled:
            paces.append(("ingest.reclaim", keep.run_once, settings.ingest_reclaim_interval_ms / 1000))
        if self.upkeep is not None:
            paces.append(("knowledge.upkeep", cut_off(self.upkeep, stop), INGEST_UPKEEP_SECONDS))
        settling = run_loop(
            "ingest.settle", work.settle, idle_seconds=INGEST_POLL_SECONDS, stop=stop, wake=work.ended
        )
        return [settling, *(run_loop(name, run, idle_seconds=pace, stop=stop) for name, run, pace in paces)]


@asynccontextmanager
async def open_ingest(
    settings: Settings, pipeline: Pipeline | None = None, *, stop: asyncio.Event | None = None
) -> AsyncIterator[IngestParts]:
    """`pipeline` None: the one that the settings ask for."""
    async with AsyncExitStack() as held:
        db = await held.enter_async_context(open_executor(settings, "engram-ingest"))
        queue = await held.enter_async_context(open_queue(settings, db, reads=True))
        upkeep: RunOnce | None = None
        if pipeline is None:
            real, upkeep = await held.enter_async_context(open_pipeline(settings, db))
        worker = IngestWorker(db, queue, pipeline or real, settings, stop=stop)
        reclaimer = Reclaimer(db, queue, worker, settings) if isinstance(queue, RedisQueue) else None
        yield IngestParts(queue, worker, reclaimer, _sweeper(db, queue, worker.worker_id), upkeep)


def _sweeper(db: AsyncExecutor, queue: Queue, name: str = "") -> Sweeper | KafkaSweeper:
    return Sweeper(db, queue, name) if isinstance(queue, RedisQueue) else KafkaSweeper(db)


@asynccontextmanager
async def open_publishers(settings: Settings) -> AsyncIterator[list[EventPublisher]]:
    """Two publishers, each with a producer of its own: one settles while the other sends."""
    # Imported here: its library is needed by nobody else.
    from engram.ingest.kafka import KafkaPublisher

    servers, seconds = kafka_servers(settings), message_seconds(settings.ingest_kafka_lease_seconds)
    producers = [KafkaPublisher(servers, message_seconds=seconds) for _ in range(2)]
    async with open_executor(settings, "engram-publisher") as db:
        name = new_worker_id()
        try:
            yield [
                EventPublisher(db, producer, settings, worker_id=f"{name}:{number}")
                for number, producer in enumerate(producers)
            ]
        finally:
            for producer in producers:
                producer.close()


def kafka_servers(settings: Settings) -> str:
    if settings.kafka_bootstrap_servers is None:
        raise ConfigError(
            "KAFKA_BOOTSTRAP_SERVERS is not set", hint="e.g. KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092"
        )
    return settings.kafka_bootstrap_servers


@asynccontextmanager
async def open_pipeline(settings: Settings, db: AsyncExecutor) -> AsyncIterator[tuple[Pipeline, RunOnce]]:
    """Reads documents in child processes and writes their passages; and what their table needs."""
    limits = ParserLimits(
        memory_bytes=settings.parser_memory_mb << 20,
        cpu_seconds=settings.parser_seconds,
        wall_seconds=3 * settings.parser_seconds,
    )
    # More children than processors would only wait for each other.
    parsers = Parsers(at_once=min(settings.ingest_concurrency, os.cpu_count() or 1), limits=limits)
    async with open_knowledge_vectors(settings, db, fills=True) as vectors:
        try:
            pipeline = DocumentPipeline(db, artifacts(settings), parsers, vectors)
            yield pipeline, KnowledgeUpkeep(_dsn(settings), db, vectors).run_once
        finally:
            await parsers.shut()


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
    pool = async_pool(searching(_dsn(settings)), min_size=0, application_name="engram-knowledge")
    async with pool:
        db = AsyncExecutor(pool)
        async with open_knowledge_vectors(settings, db) as vectors:
            search = KnowledgeSearch(db, vectors)
            try:
                yield search
            finally:
                await search.shut()


@asynccontextmanager
async def open_sweeper(settings: Settings) -> AsyncIterator[Sweeper | KafkaSweeper]:
    async with open_executor(settings, "engram-rebuild") as db, open_queue(settings, db) as queue:
        yield _sweeper(db, queue)


@dataclass(frozen=True, slots=True)
class Scm:
    """What the commands about source control do; each call has a source of its own."""

    settings: Settings
    db: AsyncExecutor

    async def add(self, project_key: str, kind: str, url: str) -> Row:
        return await self.db.run(scm_store.add_repo(project_key, kind, url))

    async def repos(self, repo_ids: Sequence[int] | None = None) -> list[Repo]:
        found = await self.db.run(scm_store.list_repos(repo_ids))
        if lost := set(repo_ids or ()) - {repo.repo_id for repo in found}:
            raise NotFound(f"there is no repository {min(lost)}", hint="`engram scm status` lists them")
        return found

    async def sync(
        self, repo: Repo, *, best_effort: bool = False, told: Callable[[str], None] = _silent
    ) -> Counts:
        def page(counts: Counts) -> None:
            told(f"{counts.read} read")

        mode: Mode = "best_effort" if best_effort else "strict"
        async with self._source(repo) as source:
            syncing = Syncing(self.db, self.settings.scm_lease_seconds, mode, page)
            return await syncing.run_once(repo, source)

    async def materialize(
        self, repo: Repo, *, told: Callable[[str], None] = _silent, limit: int | None = None
    ) -> Kept:
        def patch(kept: Kept) -> None:
            told(f"{kept.done} patches")

        store = artifacts(self.settings)
        async with self._source(repo) as source:
            work = Materializer(self.db, store, self.settings.scm_max_patch_bytes, patch)
            return await work.run_once(repo, source, limit)

    async def status(self) -> list[Row]:
        waiting = await self.db.run(facts.waiting.query())
        return [
            {**row, "waiting": waiting.get(row["repo_id"], 0)}
            for row in await self.db.run(scm_store.status())
        ]

    async def consumer_rules(self, project_key: str, rules: dict[str, Any]) -> None:
        async with self.consumer() as consumer:
            await consumer.set_rules(project_key, rules)

    @asynccontextmanager
    async def consumer(self, told: Callable[[str], None] = _silent) -> AsyncIterator[ScmConsumer]:
        def fact(consumed: Consumed) -> None:
            told(f"{consumed.facts} facts")

        async with open_client(self.settings) as client:
            store = MemoryStore(self.db, client, self.settings)
            yield ScmConsumer(self.db, store, fact)
            await store.drain()

    @asynccontextmanager
    async def _source(self, repo: Repo) -> AsyncIterator[Source]:
        hide(self.settings.gitlab_token)
        source = source_of(
            repo,
            mirrors=self.settings.data_dir / "scm",
            silent_seconds=self.settings.scm_timeout_seconds,
            gitlab_token=self.settings.gitlab_token,
        )
        try:
            yield source
        finally:
            await source.close()


@asynccontextmanager
async def open_scm(settings: Settings) -> AsyncIterator[Scm]:
    async with open_executor(settings, "engram-scm") as db:
        yield Scm(settings, db)


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
