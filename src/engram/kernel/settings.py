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


def _setting(
    env: str, key: str, parse: Parse, default: Any, example: str, doc: str, *, secret: bool = False
) -> Any:
    described = Setting(env, key, parse, example, doc, secret)
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
    alert_webhook_url: str | None = _setting(
        "ENGRAM_ALERT_WEBHOOK_URL", "alerts.webhook-url", _url("http", "https"), None,
        "https://hooks.internal/engram", "Where dead letters and refused keys are reported, as JSON.",
        secret=True,
    )  # fmt: skip
    artifacts_dir: Path | None = _setting(
        "ENGRAM_ARTIFACTS_DIR", "evidence.artifacts-dir", _path, None,
        "/var/lib/engram/artifacts", "Where evidence is kept; by default in the data folder.",
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
                hint="`engram settings` lists every setting",
            )
        return cls(**values)


def described() -> Iterator[tuple[str, Setting]]:
    """Every field with its description: what the reference is generated from."""
    for f in fields(Settings):
        yield f.name, f.metadata["setting"]


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
    if environ.get(setting.env):
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
