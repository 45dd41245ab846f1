"""An embedded PostgreSQL and an embedded Redis: started, adopted, shared and stopped.

Only the servers' binaries are used, as the wheels bring them. Nothing here
knows a table, a stream or a client library, and nothing outside the data
folder is changed.
"""

from engram.embedded.binaries import postgres_binary, redis_binary
from engram.embedded.postgres import EmbeddedPostgres, running_postgres
from engram.embedded.redis import EmbeddedRedis, running_redis

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "postgres_binary",
    "redis_binary",
    "running_postgres",
    "running_redis",
]
