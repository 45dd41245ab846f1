"""Runs a `Query` for a plain script: one small pool per database and process."""

from __future__ import annotations

import atexit
import os
from threading import Lock
from typing import TypeVar

from engram.logbook.config import Config
from engram.postgres.executors import SyncExecutor
from engram.postgres.pool import sync_pool
from engram.postgres.query import Query

T = TypeVar("T")

# Keyed by process too: a pool inherited through fork must not be used.
_executors: dict[tuple[int, str], SyncExecutor] = {}
_lock = Lock()


def run(query: Query[T], config: Config | None) -> T:
    return _executor((config or Config.from_env()).postgres_dsn).run(query)


def close(config: Config | None = None) -> None:
    """Close the pool of one database, or all of this process's."""
    with _lock:
        for pid, dsn in list(_executors):
            if pid == os.getpid() and (config is None or config.postgres_dsn == dsn):
                _executors.pop((pid, dsn)).pool.close()


def _executor(dsn: str) -> SyncExecutor:
    key = (os.getpid(), dsn)
    with _lock:
        if key not in _executors:
            _executors[key] = SyncExecutor(sync_pool(dsn, application_name="engram-logbook"))
        return _executors[key]


atexit.register(close)
