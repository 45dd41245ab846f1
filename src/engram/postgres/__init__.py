"""PostgreSQL without a domain: statements as values, executors, pools, migrations.

Nothing here knows what a memory or an outbox is.
"""

from engram.postgres.executors import AsyncExecutor, SyncExecutor
from engram.postgres.query import Query, Row, Statement
from engram.postgres.sqlfile import load_sql

__all__ = ["AsyncExecutor", "Query", "Row", "Statement", "SyncExecutor", "load_sql"]
