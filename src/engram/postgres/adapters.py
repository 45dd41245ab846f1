"""How values of PostgreSQL's become Python's on engram's connections, and the other way round."""

from __future__ import annotations

import json
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader

from engram.postgres.arrays import Reals, RealsDumper


class _JsonLoader(Loader):
    """Most of engram's JSON columns are empty in most rows; those need no parser."""

    def load(self, data: Buffer) -> Any:
        return {} if data == b"{}" else json.loads(bytes(data))


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(Reals, RealsDumper)
    for name in ("json", "jsonb"):
        adapters.register_loader(name, _JsonLoader)
    return adapters


# For engram's own connections; those of a script that uses engram beside others stay as they are.
ADAPTERS = _adapters()
