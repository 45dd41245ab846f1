"""What engram itself knows of every memory: enough to answer when the memory server cannot.

A memory is one content in one space: `intent` while it is being written,
`stored` or `parked` after, `forgotten` when somebody asked for that, after
which the same content may be stored anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, maybe_row, rows
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import any_of, tokenize

SQL = load_sql("engram.logbook", "memories.sql")

MAX_ASKED_WORDS = 32
# Enough candidates for a good order, few enough to rank in milliseconds.
ENOUGH_CANDIDATES = 500


@dataclass(frozen=True, slots=True)
class Filters:
    """What a memory must be, besides matching; None asks for nothing. Kinds in any case."""

    kinds: tuple[str, ...] | None = None
    actor_user_id: str | None = None
    item_id: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    meta: dict[str, Any] | None = None

    def params(self) -> dict[str, Any]:
        return {
            "kinds": None if self.kinds is None else [kind.lower() for kind in self.kinds],
            "actor": self.actor_user_id,
            "item_id": self.item_id,
            "since": self.since,
            "until": self.until,
            "meta": None if self.meta is None else Jsonb(self.meta),
        }


NO_FILTERS = Filters()


@primitive
def search(
    text: str,
    spaces: Sequence[str],
    states: Sequence[str] = ("stored", "parked"),
    limit: int = 10,
    config: Config | None = None,
    *,
    filters: Filters = NO_FILTERS,
) -> Query[list[dict[str, Any]]]:
    """Words, best first, within the given spaces and states; CJK text by pairs of characters."""
    words = list(dict.fromkeys(tokenize(text)))[:MAX_ASKED_WORDS]
    params = {
        "asked": [any_of([word]) for word in words],
        "spaces": list(spaces),
        "states": list(states),
        "limit": limit,
        "enough": ENOUGH_CANDIDATES,
        **filters.params(),
    }
    return Query(SQL["search"], rows, params)


@primitive
def search_unasked(
    text: str,
    spaces: Sequence[str],
    limit: int = 10,
    config: Config | None = None,
    *,
    filters: Filters = NO_FILTERS,
) -> Query[list[dict[str, Any]]]:
    """Among what the memory server cannot be asked for: it is parked, or its id is not known."""
    words = list(dict.fromkeys(tokenize(text)))[:MAX_ASKED_WORDS]
    params = {
        "asked": any_of(words),
        "spaces": list(spaces),
        "limit": limit,
        "enough": 2 * ENOUGH_CANDIDATES,
        **filters.params(),
    }
    return Query(SQL["search_unasked"], rows, params)


@primitive
def by_memory_ids(
    memory_ids: Sequence[str],
    spaces: Sequence[str],
    config: Config | None = None,
    *,
    filters: Filters = NO_FILTERS,
) -> Query[list[dict[str, Any]]]:
    params = {"memory_ids": list(memory_ids), "spaces": list(spaces), **filters.params()}
    return Query(SQL["by_memory_ids"], rows, params)


@primitive
def by_content(
    target_space: str, payload_sha: str, config: Config | None = None
) -> Query[dict[str, Any] | None]:
    return Query(SQL["by_content"], maybe_row, {"target_space": target_space, "payload_sha": payload_sha})


@primitive
def to_forget(
    memory_id: str | None = None, outbox_id: int | None = None, config: Config | None = None
) -> Query[list[dict[str, Any]]]:
    """What an id stands for. More than one, where two spaces share the memory server's copy."""
    return Query(SQL["to_forget"], rows, {"memory_id": memory_id, "outbox_id": outbox_id})


@primitive
def forget(
    memory_record_id: int,
    actor_user_id: str,
    reason: str = "memory_forget",
    correlation_id: str | None = None,
    config: Config | None = None,
    *,
    because: str | None = None,
) -> Query[dict[str, Any] | None]:
    """None: there is no such memory, or it is being written, or it was forgotten before.

    `because` is the caller's own reason. `to_erase`: the memory server may have a copy.
    """
    params = {
        "memory_record_id": memory_record_id,
        "actor_user_id": actor_user_id,
        "reason": reason,
        "correlation_id": correlation_id,
        "because": because,
    }
    return Query(SQL["forget"], maybe_row, params)
