"""Deleting the memory server's copy of what was forgotten.

A forgotten memory is unreadable at once; its copy is erased by whoever leases
that. While the lease is on, the same content cannot be written anew: the memory
server might take the new one for the old, and it would be deleted with it. A
copy that another memory uses stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, Row, any_row, one_row
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "erasures.sql")

# Longer than finding and deleting a copy may take.
ERASE_LEASE_SECONDS = 60.0
ON_ITS_WAY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Erasure:
    """The right to delete one copy. `memory_id` None: it is not known whether there is one."""

    memory_record_id: int
    erase_token: int
    erase_tries: int
    target_space: str
    payload_sha: str
    payload_md: str
    delivery_key: UUID
    memory_id: str | None


@primitive
def due(limit: int = 100, config: Config | None = None) -> Query[list[int]]:
    """Records whose copy is to be deleted now."""
    params = {"limit": limit, "lease_seconds": ERASE_LEASE_SECONDS}
    return Query(SQL["due"], lambda found: [row["memory_record_id"] for row in found], params)


@primitive
def claim(memory_record_id: int, config: Config | None = None) -> Query[Erasure | None]:
    """None: not due, leased by somebody else, or the same content is on its way again.

    Raises `ConstraintViolated` when the same content began to be written this moment.
    """
    params = {
        "memory_record_id": memory_record_id,
        "lease_seconds": ERASE_LEASE_SECONDS,
        "later_seconds": ON_ITS_WAY_SECONDS,
    }
    return Query(SQL["claim"], _erasure, params)


@primitive
def finish(memory_record_id: int, erase_token: int, config: Config | None = None) -> Query[bool]:
    """False: the lease was lost."""
    return Query(SQL["finish"], any_row, {"memory_record_id": memory_record_id, "erase_token": erase_token})


@primitive
def postpone(
    memory_record_id: int, erase_token: int, delay_seconds: float, config: Config | None = None
) -> Query[bool]:
    params = {
        "memory_record_id": memory_record_id,
        "erase_token": erase_token,
        "delay_seconds": delay_seconds,
    }
    return Query(SQL["postpone"], any_row, params)


@primitive
def still_used(memory_ids: Sequence[str], config: Config | None = None) -> Query[set[str]]:
    """Those ids that a memory which is not forgotten has: they must not be deleted."""
    return Query(
        SQL["still_used"],
        lambda found: {row["memory_id"] for row in found},
        {"memory_ids": list(memory_ids)},
    )


@primitive
def waiting(config: Config | None = None) -> Query[Row]:
    return Query(SQL["waiting"], one_row)


def _erasure(found: list[Row]) -> Erasure | None:
    if not found or found[0].pop("on_its_way"):
        return None
    return Erasure(**found[0])
