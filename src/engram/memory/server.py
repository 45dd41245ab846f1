"""The memory server as a process: migrate its database, then serve until told to stop."""

from __future__ import annotations

from collections.abc import Collection

import uvicorn

from engram.kernel.errors import ConfigError, DatabaseUnavailable
from engram.kernel.logs import hide
from engram.memory.app import create_app
from engram.memory.keys import OPEN_TENANT
from engram.postgres.migrations import load_migrations, migrate
from engram.search.embeddings import Embedder
from engram.web.guards import is_loopback

_GRACE_SECONDS = 5


def serve(
    dsn: str,
    host: str,
    port: int,
    *,
    api_key: str | None = None,
    allowed_hosts: Collection[str] = (),
    instance: str | None = None,
    embedder: Embedder | None = None,
) -> None:
    """Serve `dsn` on `host:port`; raises `EngramError` when it cannot start."""
    if not api_key and not is_loopback(host):
        raise ConfigError(
            f"the memory server will not listen on {host} without an API key",
            hint="give it a key, or listen on 127.0.0.1",
        )
    hide(api_key)
    prepare(dsn)
    keys = {api_key: OPEN_TENANT} if api_key else {}
    uvicorn.run(
        create_app(dsn, keys, {host, *allowed_hosts}, instance, embedder),
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )


def prepare(dsn: str) -> None:
    """Bring the server's database to the newest schema."""
    try:
        migrate(dsn, load_migrations("engram.memory.migrations"))
    except DatabaseUnavailable as error:
        raise DatabaseUnavailable(
            f"the memory server's database cannot be reached: {error.message}",
            hint="is PostgreSQL running, and does that database exist?",
        ) from error
