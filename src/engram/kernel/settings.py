"""Every setting engram has, typed, in one class.

Values come from the environment, then from `engram.toml` (`ENGRAM_CONFIG`
names another file), then from the default. A value that does not parse, and a
key in the file that no setting has, is refused with its name, the problem and
an example. This is the only module that reads the environment for settings.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engram.kernel.errors import ConfigError

Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """How one setting is spelled, read and explained."""

    env: str
    key: str
    parse: Parse
    example: str
    doc: str
    secret: bool = False
    empty: bool = False  # set to nothing, it is nothing; any other setting is then as if not set


def _setting(
    env: str, key: str, parse: Parse, default: Any, example: str, doc: str,
    *, secret: bool = False, empty: bool = False,
) -> Any:  # fmt: skip
    described = Setting(env, key, parse, example, doc, secret, empty)
    return field(default=default, repr=not secret, metadata={"setting": described})


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def _url(*schemes: str) -> Parse:
    def parse(value: str) -> str:
        value = _text(value).rstrip("/")
        if not value.startswith(tuple(f"{s}://" for s in schemes)):
            raise ValueError(f"must start with {' or '.join(f'{s}://' for s in schemes)}")
        return value

    return parse


def _dsn(value: str) -> str:
    value = _text(value)
    if not (value.startswith(("postgresql://", "postgres://")) or "=" in value):
        raise ValueError("is neither a postgresql:// URL nor a key=value connection string")
    return value


def _integer(low: int, high: int) -> Parse:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a whole number") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}, not {number}")
        return number

    return parse


def _number(low: float, high: float) -> Parse:
    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a number") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low:g} and {high:g}, not {value}")
        return number

    return parse


def _choice(*options: str, fold: Callable[[str], str] = str.lower) -> Parse:
    def parse(value: str) -> str:
        folded = fold(value.strip())
        if folded not in options:
            raise ValueError(f"must be one of {', '.join(options)}, not {value!r}")
        return folded

    return parse


def _flag(value: str) -> bool:
    known = {"1": True, "true": True, "0": False, "false": False}
    if value.strip().lower() not in known:
        raise ValueError("must be 1 or 0, true or false")
    return known[value.strip().lower()]


def _servers(value: str) -> str:
    servers = [part.strip() for part in value.split(",")]
    for server in servers:
        host, _, port = server.rpartition(":")
        if not host or not port.isdigit() or any(c.isspace() or c == "/" for c in host):
            raise ValueError("must be host:port, or several with commas between")
    return ",".join(servers)


def _stream_key(value: str) -> str:
    """A key of Redis, or nothing."""
    value = value.strip()
    if any(c.isspace() or not c.isprintable() for c in value) or len(value) > 200:
        raise ValueError("takes at most 200 characters and no spaces")
    return value


def _path(value: str) -> Path:
    try:
        return Path(_text(value)).expanduser().absolute()
    except RuntimeError:
        raise ValueError("names the home of a user that does not exist") from None


def _names(value: str) -> tuple[str, ...]:
    return tuple(part.strip().lower() for part in value.split(",") if part.strip())


def _key(value: str) -> str:
    value = _text(value)
    if len(value) > 64 or not all(c.isalnum() or c in "._-" for c in value):
        raise ValueError("takes at most 64 letters, digits, dots, dashes and underscores")
    return value


def _skip(capability: str) -> Any:
    """One of the gate's switches; `engram.gateway.gate` says what they are for."""
    return _setting(
        f"GATEWAY_SKIP_{capability.upper()}", f"gateway.skip_{capability}", _flag, False,
        "1", f"Leave {capability} out of the gate: it is neither looked at nor required.",
    )  # fmt: skip


def default_data_dir(environ: Mapping[str, str]) -> Path:
    given = Path(environ.get("XDG_DATA_HOME") or "")
    # A relative one is to be ignored, says its specification: it would move with the caller.
    base = given if given.is_absolute() else Path(environ.get("HOME") or Path.home()) / ".local/share"
    return base / "engram"


@dataclass(frozen=True, kw_only=True)
class Settings:
    data_dir: Path = _setting(
        "ENGRAM_DATA_DIR", "engram.data-dir", _path, Path(),
        "~/.local/share/engram", "Where the embedded parts keep everything.",
    )  # fmt: skip
    postgres_dsn: str | None = _setting(
        "POSTGRES_DSN", "postgres.dsn", _dsn, None,
        "postgresql://engram@db.internal/engram", "Your PostgreSQL (15 or later) instead of the embedded one.",
        secret=True,
    )  # fmt: skip
    memory_dsn: str | None = _setting(
        "ENGRAM_MEMORY_DSN", "memory.dsn", _dsn, None,
        "postgresql://engram@db.internal/engram_memory", "The embedded memory server's own database.",
        secret=True,
    )  # fmt: skip
    embeddings_url: str | None = _setting(
        "ENGRAM_EMBEDDINGS_URL", "embeddings.url", _url("http", "https"), None,
        "https://api.internal/v1/embeddings",
        "An OpenAI-compatible service that makes the vectors, instead of the model that comes with engram.",
        secret=True,
    )  # fmt: skip
    embeddings_key: str | None = _setting(
        "ENGRAM_EMBEDDINGS_KEY", "embeddings.key", _text, None,
        "sk-…", "Sent to that service as a bearer token.", secret=True,
    )  # fmt: skip
    embeddings_model: str = _setting(
        "ENGRAM_EMBEDDINGS_MODEL", "embeddings.model", _text, "text-embedding-3-small",
        "text-embedding-3-small", "Which of that service's models; another one means new vectors for everything.",
    )  # fmt: skip
    redis_url: str | None = _setting(
        "REDIS_URL", "redis.url", _url("redis", "rediss", "unix"), None,
        "redis://cache.internal:6379/0", "Your Redis instead of the embedded one.", secret=True,
    )  # fmt: skip
    openmemory_base_url: str | None = _setting(
        "OPENMEMORY_BASE_URL", "openmemory.base-url", _url("http", "https"), None,
        "http://127.0.0.1:8080", "Your OpenMemory server instead of the embedded memory server.", secret=True,
    )  # fmt: skip
    openmemory_api_key: str | None = _setting(
        "OPENMEMORY_API_KEY", "openmemory.api-key", _text, None,
        "om-…", "Sent to the memory server as x-api-key.", secret=True,
    )  # fmt: skip
    openmemory_timeout_seconds: float = _setting(
        "OPENMEMORY_TIMEOUT_SECONDS", "openmemory.timeout-seconds", _number(0.1, 300), 5.0,
        "5", "How long one call to the memory server may take.",
    )  # fmt: skip
    breaker_failures: int = _setting(
        "OPENMEMORY_BREAKER_FAILURES", "openmemory.breaker-failures", _integer(1, 1000), 3,
        "3", "Failures in a row after which the memory server is left alone for a while.",
    )  # fmt: skip
    breaker_cooldown_seconds: float = _setting(
        "OPENMEMORY_BREAKER_COOLDOWN_SECONDS", "openmemory.breaker-cooldown-seconds", _number(0.05, 600), 2.0,
        "2", "How long it is left alone before one call may probe it.",
    )  # fmt: skip
    project_key: str = _setting(
        "PROJECT_KEY", "project.key", _key, "default",
        "payments", "The project whose governance settings and team space apply.",
    )  # fmt: skip
    gateway_host: str = _setting(
        "GATEWAY_HOST", "gateway.host", _text, "127.0.0.1",
        "127.0.0.1", "The address to listen on; another than loopback needs ENGRAM_TOKENS_FILE.",
    )  # fmt: skip
    gateway_port: int = _setting(
        "GATEWAY_PORT", "gateway.port", _integer(0, 65535), 8787,
        "8787", "The HTTP port; 0 takes any free one.",
    )  # fmt: skip
    gateway_mode: str = _setting(
        "GATEWAY_MODE", "gateway.mode", _choice("FULL", "DEGRADED", fold=str.upper), "DEGRADED",
        "FULL", "FULL: every capability must be there for /readyz to say so.",
    )  # fmt: skip
    skip_database: bool = _skip("database")
    skip_migrations: bool = _skip("migrations")
    skip_openmemory: bool = _skip("openmemory")
    skip_outbox_worker: bool = _skip("outbox_worker")
    skip_reconcile: bool = _skip("reconcile")
    skip_evidence_store: bool = _skip("evidence_store")
    skip_redis: bool = _skip("redis")
    tokens_file: Path | None = _setting(
        "ENGRAM_TOKENS_FILE", "gateway.tokens-file", _path, None,
        "/etc/engram/tokens.toml", "Who may call: hashed tokens with owner and scopes. See `engram token`.",
    )  # fmt: skip
    token: str | None = _setting(
        "ENGRAM_TOKEN", "client.token", _text, None,
        "engram_…", "What engram's own commands send to a gateway that asks for a token.", secret=True,
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = _setting(
        "ENGRAM_ALLOWED_HOSTS", "gateway.allowed-hosts", _names, (),
        "memory.internal,memory.internal:8787", "Host headers accepted besides loopback.",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = _setting(
        "ENGRAM_ALLOWED_ORIGINS", "gateway.allowed-origins", _names, (),
        "https://console.internal", "Browser origins accepted besides loopback.",
    )  # fmt: skip
    max_body_bytes: int = _setting(
        "ENGRAM_MAX_BODY_BYTES", "gateway.max-body-bytes", _integer(1024, 1 << 30), 1 << 20,
        "1048576", "The largest JSON body that is read.",
    )  # fmt: skip
    store_deadline_seconds: float = _setting(
        "ENGRAM_STORE_DEADLINE_SECONDS", "gateway.store-deadline-seconds", _number(0.2, 300), 8.0,
        "8", "After this a store that has no answer from the memory server is parked.",
    )  # fmt: skip
    query_deadline_seconds: float = _setting(
        "ENGRAM_QUERY_DEADLINE_SECONDS", "gateway.query-deadline-seconds", _number(0.2, 300), 5.0,
        "5", "After this a query is answered from the logbook.",
    )  # fmt: skip
    idempotency_ttl_seconds: int = _setting(
        "IDEMPOTENCY_TTL_SECONDS", "idempotency.ttl-seconds", _integer(1, 31_536_000), 86_400,
        "86400", "How long a request's answer is kept for its repeats.",
    )  # fmt: skip
    outbox_batch_size: int = _setting(
        "OUTBOX_BATCH_SIZE", "outbox.batch-size", _integer(1, 1000), 10,
        "10", "Rows that each of a worker's three lanes leases at once.",
    )  # fmt: skip
    outbox_lease_seconds: int = _setting(
        "OUTBOX_LEASE_SECONDS", "outbox.lease-seconds", _integer(1, 86400), 120,
        "120", "How long a worker may hold a row without renewing.",
    )  # fmt: skip
    outbox_base_backoff_seconds: int = _setting(
        "OUTBOX_BASE_BACKOFF_SECONDS", "outbox.base-backoff-seconds", _integer(1, 86400), 60,
        "60", "Delivery back-off: base.",
    )  # fmt: skip
    outbox_max_backoff_seconds: int = _setting(
        "OUTBOX_MAX_BACKOFF_SECONDS", "outbox.max-backoff-seconds", _integer(1, 604800), 3600,
        "3600", "Delivery back-off: ceiling before jitter.",
    )  # fmt: skip
    outbox_jitter_factor: float = _setting(
        "OUTBOX_JITTER_FACTOR", "outbox.jitter-factor", _number(0, 1), 0.3,
        "0.3", "Delivery back-off: share by which a delay varies.",
    )  # fmt: skip
    outbox_max_retries: int = _setting(
        "OUTBOX_MAX_RETRIES", "outbox.max-retries", _integer(1, 1000), 5,
        "5", "Failed tries after which a row is dead.",
    )  # fmt: skip
    outbox_poll_seconds: float = _setting(
        "OUTBOX_POLL_SECONDS", "outbox.poll-seconds", _number(0.05, 3600), 1.0,
        "1", "How often an idle worker looks for work.",
    )  # fmt: skip
    ingest_queue: str = _setting(
        "INGEST_QUEUE", "app.ingest.queue", _choice("redis", "kafka"), "redis",
        "redis", "What tells the ingest workers that there is work: redis or kafka.",
    )  # fmt: skip
    ingest_max_attempts: int = _setting(
        "INGEST_REDIS_MAX_ATTEMPTS", "app.ingest.redis.max-attempts", _integer(1, 1000), 10,
        "10", "Failures after which an ingest task is dead.",
    )  # fmt: skip
    ingest_base_backoff_ms: int = _setting(
        "INGEST_REDIS_RETRY_BASE_BACKOFF_MS", "app.ingest.redis.retry.base-backoff-ms",
        _integer(0, 86_400_000), 1000,
        "1000", "Ingest back-off: base; doubled with each failure.",
    )  # fmt: skip
    ingest_max_backoff_ms: int = _setting(
        "INGEST_REDIS_RETRY_MAX_BACKOFF_MS", "app.ingest.redis.retry.max-backoff-ms",
        _integer(0, 604_800_000), 600_000,
        "600000", "Ingest back-off: ceiling.",
    )  # fmt: skip
    ingest_reclaim_enabled: bool = _setting(
        "INGEST_REDIS_RECLAIM_ENABLED", "app.ingest.redis.reclaim-enabled", _flag, True,
        "1", "Take over stream entries whose consumer is gone or has been silent for long.",
    )  # fmt: skip
    ingest_reclaim_interval_ms: int = _setting(
        "INGEST_REDIS_RECLAIM_INTERVAL_MS", "app.ingest.redis.reclaim-interval-ms",
        _integer(10, 3_600_000), 5000,
        "5000", "How often they are looked for.",
    )  # fmt: skip
    ingest_reclaim_idle_ms: int = _setting(
        "INGEST_REDIS_RECLAIM_IDLE_MS", "app.ingest.redis.reclaim-idle-ms", _integer(0, 604_800_000), 600_000,
        "600000", "How long a living consumer's entry must have been silent to be taken over.",
    )  # fmt: skip
    ingest_reclaim_batch_size: int = _setting(
        "INGEST_REDIS_RECLAIM_BATCH_SIZE", "app.ingest.redis.reclaim-batch-size", _integer(1, 10_000), 20,
        "20", "How many are taken over at once.",
    )  # fmt: skip
    ingest_dlq_stream_key: str = _setting(
        "INGEST_REDIS_DLQ_STREAM_KEY", "app.ingest.redis.dlq-stream-key", _stream_key, "ingest:tasks:dlq",
        "ingest:tasks:dlq", "The stream that tells of dead tasks; set to nothing, there is none.",
        empty=True,
    )  # fmt: skip
    kafka_bootstrap_servers: str | None = _setting(
        "KAFKA_BOOTSTRAP_SERVERS", "kafka.bootstrap-servers", _servers, None,
        "kafka-1:9092,kafka-2:9092", "Kafka's brokers, for INGEST_QUEUE=kafka.",
    )  # fmt: skip
    ingest_kafka_max_attempts: int = _setting(
        "INGEST_KAFKA_MAX_ATTEMPTS", "app.ingest.kafka.max-attempts", _integer(1, 1000), 10,
        "10", "Failures to publish after which an event is dead.",
    )  # fmt: skip
    ingest_kafka_base_backoff_ms: int = _setting(
        "INGEST_KAFKA_RETRY_BASE_BACKOFF_MS", "app.ingest.kafka.retry.base-backoff-ms",
        _integer(0, 86_400_000), 1000,
        "1000", "Publishing's back-off: base; doubled with each failure.",
    )  # fmt: skip
    ingest_kafka_max_backoff_ms: int = _setting(
        "INGEST_KAFKA_RETRY_MAX_BACKOFF_MS", "app.ingest.kafka.retry.max-backoff-ms",
        _integer(0, 604_800_000), 600_000,
        "600000", "Publishing's back-off: ceiling.",
    )  # fmt: skip
    ingest_kafka_publish_batch_size: int = _setting(
        "INGEST_KAFKA_PUBLISH_BATCH_SIZE", "app.ingest.kafka.publish-batch-size", _integer(1, 100_000), 20,
        "20", "How many events a publisher leases at once.",
    )  # fmt: skip
    ingest_kafka_publish_interval_ms: int = _setting(
        "INGEST_KAFKA_PUBLISH_INTERVAL_MS", "app.ingest.kafka.publish-interval-ms",
        _integer(10, 3_600_000), 1000,
        "1000", "How often an idle publisher looks for events.",
    )  # fmt: skip
    ingest_kafka_lease_seconds: float = _setting(
        "INGEST_KAFKA_LEASE_SECONDS", "app.ingest.kafka.lease-seconds", _number(2, 86_400), 30.0,
        "30", "How long a publisher may hold events; a message may take a third of it at most.",
    )  # fmt: skip
    ingest_concurrency: int = _setting(
        "INGEST_CONCURRENCY", "app.ingest.concurrency", _integer(1, 1000), 4,
        "4", "Documents that one ingest worker works on at a time.",
    )  # fmt: skip
    ingest_lease_seconds: float = _setting(
        "INGEST_LEASE_SECONDS", "app.ingest.lease-seconds", _number(0.5, 86_400), 60.0,
        "60", "How long a worker may hold a task without renewing; it renews three times as often.",
    )  # fmt: skip
    chroma_base_url: str | None = _setting(
        "CHROMA_BASE_URL", "chroma.base-url", _url("http", "https"), None,
        "http://127.0.0.1:8000", "Your Chroma, to keep the vectors of documents instead of pgvector.",
        secret=True,
    )  # fmt: skip
    parser_memory_mb: int = _setting(
        "INGEST_PARSER_MEMORY_MB", "app.ingest.parser.memory-mb", _integer(256, 1 << 20), 1024,
        "1024", "Address space that reading one document may take.",
    )  # fmt: skip
    parser_seconds: int = _setting(
        "INGEST_PARSER_SECONDS", "app.ingest.parser.seconds", _integer(1, 86_400), 60,
        "60", "Processor time that reading one document may take; three times as long by the clock.",
    )  # fmt: skip
    ingest_max_upload_bytes: int = _setting(
        "INGEST_MAX_UPLOAD_BYTES", "app.ingest.max-upload-bytes", _integer(1024, 1 << 40), 100 << 20,
        "104857600", "The largest document that is taken.",
    )  # fmt: skip
    metrics_port: int = _setting(
        "ENGRAM_METRICS_PORT", "metrics.port", _integer(0, 65535), 0,
        "9464", "Where a worker process serves /metrics, on loopback; 0 takes any free port and logs it.",
    )  # fmt: skip
    alert_webhook_url: str | None = _setting(
        "ENGRAM_ALERT_WEBHOOK_URL", "alerts.webhook-url", _url("http", "https"), None,
        "https://hooks.internal/engram", "Where dead letters and refused keys are reported, as JSON.",
        secret=True,
    )  # fmt: skip
    artifacts_dir: Path | None = _setting(
        "ENGRAM_ARTIFACTS_DIR", "evidence.artifacts-dir", _path, None,
        "/var/lib/engram/artifacts", "Where evidence is kept; by default in the data folder.",
    )  # fmt: skip
    gitlab_token: str | None = _setting(
        "GITLAB_TOKEN", "scm.gitlab-token", _text, None,
        "glpat-…", "Sent to GitLab as PRIVATE-TOKEN; it needs the scope read_api.", secret=True,
    )  # fmt: skip
    scm_timeout_seconds: float = _setting(
        "ENGRAM_SCM_TIMEOUT_SECONDS", "scm.timeout-seconds", _number(0.1, 86400), 60.0,
        "60", "How long git, svn or GitLab may be silent before a try counts as failed.",
    )  # fmt: skip
    scm_lease_seconds: int = _setting(
        "ENGRAM_SCM_LEASE_SECONDS", "scm.lease-seconds", _integer(1, 86400), 60,
        "60", "How long a sync may hold its repository without renewing.",
    )  # fmt: skip
    scm_poll_seconds: float = _setting(
        "ENGRAM_SCM_POLL_SECONDS", "scm.poll-seconds", _number(0.05, 86400), 60.0,
        "60", "How often `engram scm sync --loop` and `consume --loop` look for something new.",
    )  # fmt: skip
    scm_max_patch_bytes: int = _setting(
        "ENGRAM_SCM_MAX_PATCH_BYTES", "scm.max-patch-bytes", _integer(1024, 1 << 30), 1 << 20,
        "1048576", "A diff that is larger is kept as a list of files and counts.",
    )  # fmt: skip
    sandbox_driver: str = _setting(
        "ENGRAM_SANDBOX_DRIVER", "sandboxes.driver", _choice("sandlock", "none"), "sandlock",
        "none", "What runs sandboxes; none switches them off.",
    )  # fmt: skip
    sandbox_dir: Path | None = _setting(
        "ENGRAM_SANDBOX_DIR", "sandboxes.dir", _path, None,
        "/var/lib/engram/sandboxes",
        "Where sandboxes have their folders; by default in the data folder, or there if commands cannot reach it.",
    )  # fmt: skip
    sandbox_uid: int = _setting(
        "ENGRAM_SANDBOX_UID", "sandboxes.uid", _integer(1, (1 << 32) - 2), 65534,
        "65534", "As whom commands run where engram runs as root.",
    )  # fmt: skip
    sandbox_max_per_owner: int = _setting(
        "ENGRAM_SANDBOX_MAX_PER_OWNER", "sandboxes.max-per-owner", _integer(0, 100_000), 50,
        "50", "How many sandboxes one owner may have at once.",
    )  # fmt: skip
    sandbox_execs_per_owner: int = _setting(
        "ENGRAM_SANDBOX_EXECS_PER_OWNER", "sandboxes.execs-per-owner", _integer(1, 10_000), 32,
        "32", "How many commands of one owner a gateway runs at once.",
    )  # fmt: skip
    sandbox_ttl_seconds: int = _setting(
        "ENGRAM_SANDBOX_TTL_SECONDS", "sandboxes.ttl-seconds", _integer(1, 31_536_000), 3600,
        "3600", "How long a sandbox lives if nobody says.",
    )  # fmt: skip
    sandbox_min_ttl_seconds: int = _setting(
        "ENGRAM_SANDBOX_MIN_TTL_SECONDS", "sandboxes.min-ttl-seconds", _integer(1, 31_536_000), 10,
        "10", "The shortest life that may be asked for.",
    )  # fmt: skip
    sandbox_max_ttl_seconds: int = _setting(
        "ENGRAM_SANDBOX_MAX_TTL_SECONDS", "sandboxes.max-ttl-seconds", _integer(1, 31_536_000), 86_400,
        "86400", "The longest life that may be asked for, from the moment of asking.",
    )  # fmt: skip
    sandbox_exec_seconds: int = _setting(
        "ENGRAM_SANDBOX_EXEC_SECONDS", "sandboxes.exec-seconds", _integer(1, 86_400), 600,
        "600", "The longest a command may run.",
    )  # fmt: skip
    sandbox_cpu_seconds: int = _setting(
        "ENGRAM_SANDBOX_CPU_SECONDS", "sandboxes.cpu-seconds", _integer(1, 86_400), 600,
        "600", "The processor time that a command and all it starts may use.",
    )  # fmt: skip
    sandbox_memory_mb: int = _setting(
        "ENGRAM_SANDBOX_MEMORY_MB", "sandboxes.memory-mb", _integer(16, 1 << 20), 512,
        "512", "The memory of a command and all it starts.",
    )  # fmt: skip
    sandbox_processes: int = _setting(
        "ENGRAM_SANDBOX_PROCESSES", "sandboxes.processes", _integer(1, 10_000), 64,
        "64", "How many processes a command may have at once.",
    )  # fmt: skip
    sandbox_disk_mb: int = _setting(
        "ENGRAM_SANDBOX_DISK_MB", "sandboxes.disk-mb", _integer(1, 1 << 20), 512,
        "512", "What a sandbox may keep on disk.",
    )  # fmt: skip
    sandbox_file_mb: int = _setting(
        "ENGRAM_SANDBOX_FILE_MB", "sandboxes.file-mb", _integer(1, 1 << 20), 64,
        "64", "The largest file that may be put into a sandbox.",
    )  # fmt: skip
    sandbox_output_bytes: int = _setting(
        "ENGRAM_SANDBOX_OUTPUT_BYTES", "sandboxes.output-bytes", _integer(1024, 1 << 30), 1 << 20,
        "1048576", "How much of what a command writes is passed on.",
    )  # fmt: skip
    instance: str | None = _setting(
        "ENGRAM_INSTANCE", "engram.instance", _key, None,
        "a1b2c3", "Told by /health, so that a supervisor knows its own roles.",
    )  # fmt: skip
    log_level: str = _setting(
        "ENGRAM_LOG_LEVEL", "log.level", _choice("debug", "info", "warning", "error"), "info",
        "info", "The least severe line that is written.",
    )  # fmt: skip
    log_format: str = _setting(
        "ENGRAM_LOG_FORMAT", "log.format", _choice("auto", "human", "json"), "auto",
        "json", "human on a terminal and JSON elsewhere, unless said otherwise.",
    )  # fmt: skip

    @property
    def gateway_url(self) -> str:
        """Where it is reached from this machine: one that listens everywhere also does on loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.gateway_host, self.gateway_host)  # noqa: S104
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.gateway_port}"

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, *, file: Path | None = None) -> Settings:
        """Read the environment and `engram.toml`; raise `ConfigError` naming what is wrong."""
        environ = os.environ if environ is None else environ
        path = file or _file_of(environ)
        from_file = dict(_flatten(_read_toml(path))) if path else {}
        values: dict[str, Any] = {"data_dir": default_data_dir(environ)}
        for name, setting in described():
            text, origin = _raw(setting, environ, from_file, path)
            if text is not None:
                values[name] = _parsed(setting, text, origin)
        unknown = sorted(set(from_file) - {s.key for _, s in described()})
        if unknown:
            raise ConfigError(
                f"{path}: unknown setting {', '.join(unknown)}",
                hint=f"{_nearly(unknown)}`engram settings` lists every setting",
            )
        return cls(**values)


def described() -> Iterator[tuple[str, Setting]]:
    """Every field with its description: what the reference is generated from."""
    for f in fields(Settings):
        yield f.name, f.metadata["setting"]


def _nearly(unknown: list[str]) -> str:
    """What was probably meant, as a question."""
    from difflib import get_close_matches

    known = [setting.key for _, setting in described()]
    meant = [found[0] for key in unknown if (found := get_close_matches(key, known, n=1, cutoff=0.75))]
    return f"did you mean {', '.join(dict.fromkeys(meant))}? " if meant else ""


_CONFIG_FILE = Setting("ENGRAM_CONFIG", "", _path, "/etc/engram.toml", "Where the settings file is.")


def _file_of(environ: Mapping[str, str]) -> Path | None:
    named = environ.get("ENGRAM_CONFIG")
    if named:
        path = _parsed(_CONFIG_FILE, named, _CONFIG_FILE.env)
        if not path.is_file():
            raise ConfigError(f"ENGRAM_CONFIG: there is no file {path}", hint=f"e.g. {_CONFIG_FILE.example}")
        return Path(path)
    default = Path("engram.toml")
    return default if default.is_file() else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            return tomllib.load(handle)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def _raw(
    setting: Setting, environ: Mapping[str, str], from_file: Mapping[str, Any], path: Path | None
) -> tuple[str | None, str]:
    if environ.get(setting.env) or (setting.empty and setting.env in environ):
        return environ[setting.env], setting.env
    if setting.key in from_file:
        value = from_file[setting.key]
        if isinstance(value, list) and setting.parse is not _names:
            raise ConfigError(
                f"{path}: {setting.key}: takes one value, not a list", hint=f"e.g. {setting.example}"
            )
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return text, f"{path}: {setting.key}"
    return None, setting.env


def _parsed(setting: Setting, text: str, origin: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        shown = "" if setting.secret else f" (got {text!r})"
        raise ConfigError(f"{origin}: {error}{shown}", hint=f"e.g. {setting.env}={setting.example}") from None
