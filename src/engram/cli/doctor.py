"""`engram doctor`: the state of every part, the invariants, and what to do about what is wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx2

from engram.assembly.addresses import has_memory_server, own_migrations, with_memory_server
from engram.assembly.ingest import parsers_of
from engram.assembly.parts import open_client
from engram.assembly.queues import kafka_servers
from engram.assembly.sandboxes import sandbox_driver
from engram.embedded import running_postgres, running_redis
from engram.gateway.capabilities import WORKER_FRESH_SECONDS
from engram.gateway.outbox_worker import HEARTBEATS
from engram.gateway.redis_probe import ping
from engram.ingest import confined, media
from engram.ingest.parser_child import EMPTY_PDF
from engram.ingest.reclaimer import GONE_SECONDS
from engram.ingest.reclaimer import HEARTBEATS as INGEST_HEARTBEATS
from engram.kernel import seccomp
from engram.kernel.errors import DocumentRefused, EngramError
from engram.kernel.logs import redact
from engram.kernel.settings import Settings
from engram.logbook import governance, kv, outbox
from engram.logbook.config import Config
from engram.postgres.migrations import pending
from engram.postgres.pool import connect


@dataclass(frozen=True, slots=True)
class Finding:
    part: str
    ok: bool
    told: str
    next_step: str = ""


def examine(settings: Settings) -> Iterator[Finding]:
    """One finding after another, as they are made."""
    dsn = settings.postgres_dsn or running_postgres(settings.data_dir)
    if dsn is None:
        yield Finding("PostgreSQL", False, f"not running in {settings.data_dir}", "start it with `engram up`")
    else:
        yield _looked("PostgreSQL", lambda: _postgres(dsn), "check POSTGRES_DSN")
        yield _looked("schema", lambda: _schema(dsn), "run `engram migrate`")
    yield _looked("Redis", lambda: _redis(settings), "start it with `engram up`, or check REDIS_URL")
    if settings.ingest_queue == "kafka":
        yield _looked("Kafka", lambda: _kafka(settings), "check KAFKA_BOOTSTRAP_SERVERS")
    if settings.chroma_base_url:
        yield _looked("Chroma", lambda: _chroma(settings.chroma_base_url or ""), "check CHROMA_BASE_URL")
    remedy = (
        "check OPENMEMORY_BASE_URL and its key"
        if settings.openmemory_base_url
        else "start it with `engram up`"
    )
    yield _looked("memory server", lambda: _memory_server(settings), remedy)
    yield _looked("gateway", lambda: _gateway(settings), "start it with `engram up` or `engram serve`")
    yield _looked("sandboxes", lambda: _sandboxes(settings), "`docs/sandboxes.md` says what a host needs")
    yield _looked("documents", lambda: _documents(settings), "`docs/knowledge.md` says how they are read")
    if dsn is not None:
        yield _looked("outbox worker", lambda: _outbox_worker(dsn), "start one with `engram worker outbox`")
        if settings.ingest_queue == "redis":
            yield _looked(
                "ingest worker", lambda: _ingest_worker(dsn), "start one with `engram worker ingest`"
            )
        yield _looked("outbox", lambda: _outbox(dsn), "look with `engram psql`")
        yield from _invariants(dsn)


def _looked(part: str, look: Callable[[], str], next_step: str) -> Finding:
    try:
        return Finding(part, True, look())
    except (EngramError, httpx2.HTTPError, OSError) as error:
        return Finding(part, False, redact(str(error)), next_step)


def _postgres(dsn: str) -> str:
    with connect(dsn) as connection:
        version = connection.info.server_version
    return f"{version // 10000}.{version % 10000}"


def _schema(dsn: str) -> str:
    todo = pending(dsn, own_migrations())
    if todo:
        raise EngramError(f"{len(todo)} migration(s) are missing, first {todo[0]}")
    return f"version {len(own_migrations())}"


def _redis(settings: Settings) -> str:
    url = settings.redis_url or running_redis(settings.data_dir)
    if url is None:
        raise EngramError(f"not running in {settings.data_dir}")
    asyncio.run(ping(url))
    return "yours (REDIS_URL), answers" if settings.redis_url else "embedded, answers"


def _kafka(settings: Settings) -> str:
    """Whether somebody listens at one of the addresses."""
    tried = []
    for address in kafka_servers(settings).split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            tried.append(f"{address}: {error}")
        else:
            return f"a broker listens at {address.strip()}"
    raise EngramError("; ".join(tried))


def _chroma(url: str) -> str:
    httpx2.get(f"{url.rstrip('/')}/api/v2/heartbeat", timeout=5).raise_for_status()
    return f"{url} answers"


def _outbox_worker(dsn: str) -> str:
    return _beating(dsn, HEARTBEATS, "outbox:", WORKER_FRESH_SECONDS)


def _ingest_worker(dsn: str) -> str:
    return _beating(dsn, INGEST_HEARTBEATS, "", GONE_SECONDS)


def _beating(dsn: str, namespace: str, prefix: str, fresh_seconds: float) -> str:
    age = kv.seconds_since_beat(namespace, prefix, Config(postgres_dsn=dsn))
    if age is None:
        raise EngramError("none has said that it is alive")
    if age > fresh_seconds:
        raise EngramError(f"the last sign of life is {age:.0f} s old")
    return f"alive {max(age, 0):.0f} s ago"


def _memory_server(settings: Settings) -> str:
    if settings.openmemory_base_url is None and not has_memory_server(settings.data_dir):
        raise EngramError(f"none was ever started in {settings.data_dir}")
    addressed = with_memory_server(settings)

    async def probe() -> None:
        async with open_client(addressed) as client:
            await client.probe()

    asyncio.run(probe())
    return f"{addressed.openmemory_base_url} answers and takes our key"


def _gateway(settings: Settings) -> str:
    url = settings.gateway_url
    reply = httpx2.get(f"{url}/readyz", trust_env=False, timeout=10)
    if reply.status_code != 200:
        raise EngramError(f"{url} is not ready: {reply.text[:300]}")
    return f"{url} is ready, mode {reply.json()['mode']}"


def _sandboxes(settings: Settings) -> str:
    """Run a command in one, here and now."""
    driver = sandbox_driver(settings, "doctor")
    if driver is None:
        return "switched off (ENGRAM_SANDBOX_DRIVER)"

    async def try_it() -> str | None:
        try:
            return await driver.why_not()
        finally:
            await driver.close()

    if reason := asyncio.run(try_it()):
        raise EngramError(reason)
    return "this host can run them"


def _documents(settings: Settings) -> str:
    """Have one read, here and now, and tell what holds its reader in."""

    async def try_it() -> None:
        parsers = parsers_of(settings)
        try:
            await parsers.parse([EMPTY_PDF], media.PDF)
        except DocumentRefused:
            pass  # it was read: there is nothing in it
        finally:
            await parsers.shut()

    asyncio.run(try_it())
    files = (
        "no files but its libraries" if confined.landlock_version() else "all our files (no Landlock here)"
    )
    calls = "no network" if seccomp.available() else "the network (this kernel filters no calls)"
    return f"are read by a child that has {files} and {calls}"


def _outbox(dsn: str) -> str:
    stats = outbox.stats(Config(postgres_dsn=dsn))
    told = f"{stats['pending']} pending, {stats['sent']} sent, {stats['dead']} dead"
    if stats["pending"]:
        told += f"; the oldest has waited {stats['oldest_pending_seconds']:.0f} s"
    return told


def _invariants(dsn: str) -> Iterator[Finding]:
    try:
        sums = governance.invariants(Config(postgres_dsn=dsn))
    except EngramError as error:
        yield Finding("invariants", False, redact(str(error)), "run `engram migrate`")
        return
    for row in sums:
        relation = "=" if row["ok"] else "≠"
        told = f"{row['left']} {relation} {row['right']}"
        yield Finding(
            f"invariant: {row['name']}",
            row["ok"],
            told,
            "" if row["ok"] else "run reconcile, then look again",
        )
