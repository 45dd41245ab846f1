"""What goes to PostgreSQL in thousands and comes back in thousands, made cheap."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader


class _JsonLoader(Loader):
    """Most of engram's JSON columns are empty in most rows; those need no parser."""

    def load(self, data: Buffer) -> Any:
        return {} if data == b"{}" else json.loads(bytes(data))


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    for name in ("json", "jsonb"):
        adapters.register_loader(name, _JsonLoader)
    return adapters


# For engram's own connections; those of a script that uses engram beside others stay as they are.
ADAPTERS = _adapters()


def numbers(given: Iterable[int | None]) -> str:
    """Whole numbers as PostgreSQL writes an array: a fifth of what adapting them one by one costs."""
    return "{" + ",".join("NULL" if number is None else f"{number:d}" for number in given) + "}"


def texts(given: Iterable[str | None]) -> str:
    """Texts as PostgreSQL writes an array."""
    return "{" + ",".join("NULL" if text is None else _quoted(text) for text in given) + "}"


def _quoted(text: str) -> str:
    if "\\" in text or '"' in text:
        text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
