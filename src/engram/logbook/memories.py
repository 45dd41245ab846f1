"""What engram itself knows of every memory: enough to answer when the memory server cannot."""

from __future__ import annotations

from collections.abc import Sequence

from engram.postgres.query import Query, Row, maybe_row, rows
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import any_of, tokenize

SQL = load_sql("engram.logbook", "memories.sql")

_MAX_ASKED_TOKENS = 64


def search(text: str, *, spaces: Sequence[str], states: Sequence[str], limit: int) -> Query[list[Row]]:
    params = {
        "asked": any_of(tokenize(text)[:_MAX_ASKED_TOKENS]),
        "spaces": list(spaces),
        "states": list(states),
        "limit": limit,
    }
    return Query(SQL["search"], rows, params)


def by_memory_ids(memory_ids: Sequence[str], *, spaces: Sequence[str]) -> Query[list[Row]]:
    return Query(SQL["by_memory_ids"], rows, {"memory_ids": list(memory_ids), "spaces": list(spaces)})


def stored_content(target_space: str, payload_sha: str) -> Query[Row | None]:
    return Query(SQL["stored_content"], maybe_row, {"target_space": target_space, "payload_sha": payload_sha})


def records_of(outbox_ids: Sequence[int]) -> Query[dict[int, int]]:
    """memory_record_id by outbox_id."""
    return Query(SQL["record_of_outbox"], _by_outbox, {"outbox_ids": list(outbox_ids)})


def _by_outbox(found: list[Row]) -> dict[int, int]:
    return {row["outbox_id"]: row["memory_record_id"] for row in found}
