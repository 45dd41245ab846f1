"""Every part has an address: the configured one, or that of the embedded part.

`addresses` starts or adopts what is embedded and holds it for as long as it is open.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from engram.embedded import EmbeddedPostgres, EmbeddedRedis
from engram.kernel.errors import ConfigError, SchemaError
from engram.kernel.logs import hide
from engram.kernel.settings import Settings
from engram.postgres.migrations import Migration, load_migrations, migrate, pending
from engram.web.sockets import bound, free_port

MEMORY_DATABASE = "engram_memory"

Progress = Callable[[str], None]


def silent(_: str) -> None:
    return None


@contextmanager
def addresses(settings: Settings, on_progress: Progress = silent) -> Iterator[Settings]:
    """Settings in which every part that a role needs has an address."""
    with ExitStack() as held:
        dsn = settings.postgres_dsn
        if dsn is None:
            dsn = held.enter_context(EmbeddedPostgres(settings.data_dir, on_progress=on_progress)).dsn()
            migrate_all(dsn, on_progress)
        yield with_memory_server(replace(settings, postgres_dsn=dsn))


@contextmanager
def with_redis(settings: Settings, on_progress: Progress = silent) -> Iterator[Settings]:
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


def migrate_all(dsn: str, on_progress: Progress = silent) -> list[Migration]:
    return migrate(dsn, own_migrations(), on_progress=on_progress)


def require_schema(settings: Settings) -> None:
    """Refuse a database that is behind; somebody else's is not migrated unasked."""
    if todo := pending(dsn_of(settings), own_migrations()):
        raise SchemaError(
            f"the database lacks {len(todo)} migration(s), first {todo[0]}", hint="run `engram migrate`"
        )


def dsn_of(settings: Settings) -> str:
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
