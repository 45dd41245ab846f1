"""Connections to the memory server's own database."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from engram.postgres.pool import AsyncPool, async_pool

# The best plan depends on how rare the asked words and tags are, so plans are not
# reused. A search looks at so many lists of the vector index, and at more until
# its filter has let enough through.
SESSION = "-c plan_cache_mode=force_custom_plan -c ivfflat.probes=20 -c ivfflat.iterative_scan=relaxed_order"

# A caller waits at most this long for a connection, be the database away or only
# busy; a reconnection gives up sooner, so that the next request tries anew at once.
_WAIT_SECONDS = 3.0
_RECONNECT_SECONDS = 2.0


def memory_pool(dsn: str) -> AsyncPool:
    """Not open yet: `async with` it."""
    options = f"{SESSION} {conninfo_to_dict(dsn).get('options') or ''}"
    pool = async_pool(make_conninfo(dsn, options=options), application_name="engram-memory")
    pool.timeout, pool.reconnect_timeout = _WAIT_SECONDS, _RECONNECT_SECONDS
    return pool
