"""Connections to the memory server's own database."""

from __future__ import annotations

from engram.postgres.near_index import searching
from engram.postgres.pool import AsyncPool, async_pool

# A caller waits at most this long for a connection, be the database away or only
# busy; a reconnection gives up sooner, so that the next request tries anew at once.
_WAIT_SECONDS = 3.0
_RECONNECT_SECONDS = 2.0


def memory_pool(dsn: str) -> AsyncPool:
    """Not open yet: `async with` it."""
    pool = async_pool(searching(dsn), application_name="engram-memory")
    pool.timeout, pool.reconnect_timeout = _WAIT_SECONDS, _RECONNECT_SECONDS
    return pool
