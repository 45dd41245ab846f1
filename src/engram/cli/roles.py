"""Commands that run one role each: the gateway, the memory server, a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engram.kernel.settings import Settings

GRACE_SECONDS = 10
RECONCILE_SECONDS = 15.0
HEARTBEAT_SECONDS = 5.0
GAUGE_SECONDS = 5.0
# What a stopping worker may take in all: less than the supervisor waits for it.
STOP_SECONDS = 7.0


def prepared(*, quiet: bool = False) -> Settings:
    """Settings, logging, and the promise to end with the supervisor.

    `quiet` is for what answers on the terminal and ends: how it came by its parts is nobody's concern.
    """
    from engram.kernel import logs
    from engram.kernel.settings import Settings
    from engram.supervisor import die_with_parent

    settings = Settings.load()
    level = "warning" if quiet and settings.log_level == "info" else settings.log_level
    logs.configure(level, settings.log_format)
    die_with_parent()
    return settings


def serve() -> None:
    """Run the gateway: HTTP and MCP only, no worker."""
    from dataclasses import replace

    import uvicorn

    from engram.assembly.addresses import addresses, require_schema
    from engram.assembly.gateway import build_app
    from engram.web.sockets import bound

    settings = prepared()
    with addresses(settings, _told) as found:
        app = build_app(found)
        require_schema(found)
        sock = bound(found.gateway_host, found.gateway_port)
        _told(f"listening on {replace(found, gateway_port=sock.getsockname()[1]).gateway_url}")
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[sock])


def memory_server() -> None:
    """Run the embedded memory server."""
    from engram.assembly.addresses import MEMORY_DATABASE, memory_api_key, memory_port
    from engram.embedded import EmbeddedPostgres
    from engram.memory.server import serve as serve_memory
    from engram.search.embeddings import embedder_for

    settings = prepared()
    key = settings.openmemory_api_key or memory_api_key(settings.data_dir)
    port = memory_port(settings.data_dir)
    embedder = embedder_for(settings.embeddings_url, settings.embeddings_key, settings.embeddings_model)

    def serve_from(dsn: str) -> None:
        serve_memory(dsn, "127.0.0.1", port, api_key=key, instance=settings.instance, embedder=embedder)

    if settings.memory_dsn:
        serve_from(settings.memory_dsn)
        return
    with EmbeddedPostgres(settings.data_dir, on_progress=_told) as postgres:
        postgres.ensure_database(MEMORY_DATABASE)
        serve_from(postgres.dsn(MEMORY_DATABASE))


def worker_outbox(
    once: Annotated[bool, typer.Option("--once", help="Deliver what is due, then stop.")] = False,
    loop: Annotated[bool, typer.Option("--loop", help="Keep delivering (the default).")] = False,
) -> None:
    """Deliver parked memories to the memory server."""
    if once and loop:
        raise typer.BadParameter("--once and --loop exclude each other")
    import asyncio

    from engram.assembly.addresses import addresses, require_schema
    from engram.web.metrics_listener import serving_metrics

    settings = prepared()
    with addresses(settings, _told) as found:
        require_schema(found)
        if once:
            asyncio.run(_worker_once(found))
            return
        with serving_metrics(found.metrics_port):
            asyncio.run(_worker_loop(found))


def worker_ingest() -> None:
    """Bring uploaded documents in: new tasks, retries, and what dead workers left."""
    import asyncio

    from engram.assembly.addresses import addresses, require_schema, with_redis
    from engram.web.metrics_listener import serving_metrics

    settings = prepared()
    with addresses(settings, _told) as found, with_redis(found, _told) as whole:
        require_schema(whole)
        with serving_metrics(whole.metrics_port):
            asyncio.run(_ingest_loop(whole))


async def _ingest_loop(settings: Settings) -> None:
    from engram.assembly.ingest import open_ingest
    from engram.kernel.runloop import run_together, stop_on_signals

    stop = stop_on_signals()
    async with open_ingest(settings, stop=stop) as parts:
        if parts.reclaimer is not None:
            await parts.reclaimer.beat()
        loops = parts.loops(settings, stop)
        await run_together(*loops, parts.worker.finish(), stop=stop, patience_seconds=STOP_SECONDS)
        if parts.reclaimer is not None:
            await parts.reclaimer.leave()


def worker_publisher() -> None:
    """Publish waiting events to Kafka; as many of these as wanted."""
    import asyncio

    from engram.assembly.addresses import addresses, require_schema
    from engram.assembly.queues import kafka_servers
    from engram.web.metrics_listener import serving_metrics

    settings = prepared()
    with addresses(settings, _told) as found:
        kafka_servers(found)
        require_schema(found)
        with serving_metrics(found.metrics_port):
            asyncio.run(_publisher_loop(found))


async def _publisher_loop(settings: Settings) -> None:
    from engram.assembly.ingest import open_publishers
    from engram.kernel.runloop import run_loop, run_together, stop_on_signals

    stop = stop_on_signals()
    idle = settings.ingest_kafka_publish_interval_ms / 1000
    async with open_publishers(settings) as publishers:
        loops = [run_loop("publisher", each.run_once, idle_seconds=idle, stop=stop) for each in publishers]
        gauges = run_loop("publisher.gauges", publishers[0].measure, idle_seconds=GAUGE_SECONDS, stop=stop)
        patience = settings.ingest_kafka_lease_seconds
        await run_together(*loops, gauges, stop=stop, patience_seconds=patience)


def run_worker_command() -> None:
    """`python -m engram.gateway.outbox_worker`: the same role under the specification's name."""
    from engram.cli import run

    run(worker_outbox)


def reconcile(
    once: Annotated[bool, typer.Option("--once", help="Repair what may be repaired (the default).")] = False,
    report: Annotated[bool, typer.Option("--report", help="Only say what is found.")] = False,
) -> None:
    """Finish what processes that died could not, and check the sums: 0 clean, 1 repaired, 2 violated."""
    if once and report:
        raise typer.BadParameter("--once and --report exclude each other")
    import asyncio

    from engram.assembly.addresses import addresses, require_schema

    settings = prepared(quiet=True)
    with addresses(settings, _told) as found:
        require_schema(found)
        raise typer.Exit(asyncio.run(_reconciled(found, repair=not report)))


def run_reconcile_command() -> None:
    """`python -m engram.gateway.reconcile_outbox`: the same under the specification's name."""
    from engram.cli import run

    run(reconcile)


async def _reconciled(settings: Settings, *, repair: bool) -> int:
    from engram.assembly.outbox import open_reconciler

    async with open_reconciler(settings) as reconciler:
        found = await reconciler.run_whole(repair=repair)
    verb = "repaired" if repair else "found"
    for name in ("abandoned_writes", "missing_redirects", "missing_audits", "stale_locks", "erased_copies"):
        print(f"{verb} {getattr(found, name)} {_FINDINGS[name]}")
    for row in found.redirects_without_row:
        print(f"✗ audit {row['audit_id']} says parked as {row['outbox_id']}, and that row is gone")
    for row in found.invariants:
        print(f"{'✓' if row['ok'] else '✗'} {row['name']}: {row['left']} and {row['right']}")
    if found.violated:
        return 2
    return 1 if found.repaired else 0


_FINDINGS = {
    "abandoned_writes": "abandoned write(s), parked",
    "missing_redirects": "row(s) without the audit of their parking",
    "missing_audits": "row(s) without the audit of their settling",
    "stale_locks": "stale lock(s)",
    "erased_copies": "forgotten copy(ies) in the memory server",
}


async def _worker_once(settings: Settings) -> None:
    """Batches until nothing is due; what it did goes to standard output."""
    from engram.assembly.outbox import open_worker
    from engram.kernel.runloop import run_together, stop_on_signals

    stop = stop_on_signals()
    async with open_worker(settings, stop=stop) as (worker, reconciler):

        async def deliver() -> None:
            parked = await reconciler.run_once()
            counts = await worker.drain()
            said = " ".join(f"{name}={count}" for name, count in counts.numbers().items())
            down = "" if counts.probed else " (the memory server is down)"
            print(f"{said} parked_intents={parked}{down}")
            stop.set()

        await run_together(deliver(), stop=stop, patience_seconds=STOP_SECONDS)


async def _worker_loop(settings: Settings) -> None:
    from engram.assembly.outbox import open_worker, outbox_wake_ups
    from engram.gateway.outbox_worker import LANES
    from engram.kernel.runloop import run_loop, run_together, stop_on_signals

    stop = stop_on_signals()
    async with (
        open_worker(settings, stop=stop) as (worker, reconciler),
        outbox_wake_ups(settings) as parked,
    ):

        async def deliver() -> int:
            counts = await worker.run_once()
            return counts.claimed - counts.handed_back

        async def mend() -> int:
            await worker.measure()
            mended = await reconciler.run_once()
            await reconciler.beat(worker.worker_id)
            return mended

        poll = settings.outbox_poll_seconds
        lanes = [run_loop("outbox", deliver, idle_seconds=poll, stop=stop, wake=parked) for _ in range(LANES)]
        await run_together(
            *lanes,
            run_loop("reconcile", mend, idle_seconds=RECONCILE_SECONDS, stop=stop),
            run_loop("heartbeat", worker.beat, idle_seconds=HEARTBEAT_SECONDS, stop=stop),
            stop=stop,
            patience_seconds=STOP_SECONDS,
        )


def _told(text: str) -> None:
    import logging

    logging.getLogger("engram").info(text)
