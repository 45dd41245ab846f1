"""Connections: READ COMMITTED, one statement per transaction, every wait bounded."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from engram.kernel.errors import ConfigError
from engram.postgres.adapters import ADAPTERS
from engram.postgres.errors import translated
from engram.postgres.query import Row

SyncPool = ConnectionPool[psycopg.Connection[Row]]
AsyncPool = AsyncConnectionPool[psycopg.AsyncConnection[Row]]

CONNECT_TIMEOUT_SECONDS = 5
STATEMENT_TIMEOUT_MS = 15_000
LOCK_TIMEOUT_MS = 5_000
IDLE_IN_TRANSACTION_MS = 30_000
WAIT_FOR_CONNECTION_SECONDS = 5.0
CLEAR_AT_MOST_EVERY_SECONDS = 1.0

_SESSION = (
    f"-c statement_timeout={STATEMENT_TIMEOUT_MS}"
    f" -c lock_timeout={LOCK_TIMEOUT_MS}"
    f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_MS}"
    " -c default_transaction_isolation=read\\ committed"
    " -c TimeZone=UTC"
)
_CONNECT = {"autocommit": True, "row_factory": dict_row, "context": ADAPTERS}
# A host that vanished is noticed by the kernel, not waited for.
_NETWORK: dict[str, str | int] = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "tcp_user_timeout": (CONNECT_TIMEOUT_SECONDS + STATEMENT_TIMEOUT_MS // 1000) * 1000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}


def bounded(dsn: str, *, application_name: str = "engram") -> str:
    """`dsn` with engram's time-outs; what the DSN itself says in `options` wins."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's complaint quotes what it could not read, which may be a password.
        raise ConfigError(
            "the PostgreSQL connection string cannot be read",
            hint="e.g. POSTGRES_DSN=postgresql://engram@db.internal/engram",
        ) from None
    options = f"{_SESSION} {given.get('options') or ''}".strip()
    defaults = {**_NETWORK, "application_name": application_name}
    return make_conninfo(dsn, **{k: v for k, v in defaults.items() if k not in given}, options=options)


def without_password(dsn: str) -> tuple[str, str | None]:
    """The DSN fit to be shown, and the password that was in it."""
    given = conninfo_to_dict(dsn)
    password = given.pop("password", None)
    return make_conninfo("", **{k: v for k, v in given.items() if v is not None}), str(
        password
    ) if password else None


def connect(dsn: str, *, application_name: str = "engram") -> psycopg.Connection[Row]:
    """One connection outside any pool."""
    with translated("connect"):
        return psycopg.connect(
            bounded(dsn, application_name=application_name),
            autocommit=True,
            row_factory=dict_row,
            context=ADAPTERS,
        )


def _has_spoken(connection: psycopg.Connection[Row] | psycopg.AsyncConnection[Row]) -> bool:
    """An idle server is silent. One that has said something has mostly said goodbye."""
    watch = select.poll()
    watch.register(connection.pgconn.socket, select.POLLIN)
    return bool(watch.poll(0))


class _Checks:
    """Refuses connections that broke while they were idle; costs a microsecond when none did.

    One that broke is seldom alone: the server went away, and the pool is full of
    others like it. Left to itself the pool tries them one by one and waits ever
    longer in between. So the first one clears out all of them.
    """

    def __init__(self) -> None:
        self._cleared_at = float("-inf")

    def _is_first(self) -> bool:
        now = time.monotonic()
        if now - self._cleared_at < CLEAR_AT_MOST_EVERY_SECONDS:
            return False
        self._cleared_at = now
        return True

    def blocking(self, pool: Callable[[], SyncPool], connection: psycopg.Connection[Row]) -> None:
        if not _has_spoken(connection):
            return
        try:
            ConnectionPool.check_connection(connection)
        except psycopg.Error:
            if self._is_first():
                pool().drain()
            raise

    async def waiting(self, pool: Callable[[], AsyncPool], connection: psycopg.AsyncConnection[Row]) -> None:
        if not _has_spoken(connection):
            return
        try:
            await AsyncConnectionPool.check_connection(connection)
        except psycopg.Error:
            if self._is_first():
                await pool().drain()
            raise


def sync_pool(dsn: str, *, max_size: int = 8, application_name: str = "engram") -> SyncPool:
    checks = _Checks()
    pool: SyncPool = ConnectionPool(
        bounded(dsn, application_name=application_name),
        connection_class=psycopg.Connection[Row],
        kwargs=_CONNECT,
        check=lambda connection: checks.blocking(lambda: pool, connection),
        min_size=1,
        max_size=max_size,
        timeout=WAIT_FOR_CONNECTION_SECONDS,
        reconnect_timeout=WAIT_FOR_CONNECTION_SECONDS,
        open=True,
    )
    return pool


def async_pool(
    dsn: str, *, min_size: int = 1, max_size: int = 16, application_name: str = "engram"
) -> AsyncPool:
    """Not open yet: `async with` it, or `await pool.open()`, inside the event loop."""
    checks = _Checks()
    pool: AsyncPool = AsyncConnectionPool(
        bounded(dsn, application_name=application_name),
        connection_class=psycopg.AsyncConnection[Row],
        kwargs=_CONNECT,
        check=lambda connection: checks.waiting(lambda: pool, connection),
        min_size=min_size,
        max_size=max_size,
        timeout=WAIT_FOR_CONNECTION_SECONDS,
        reconnect_timeout=WAIT_FOR_CONNECTION_SECONDS,
        max_waiting=1000,
        open=False,
    )
    return pool
