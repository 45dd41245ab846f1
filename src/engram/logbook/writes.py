"""The two commits of a store, each one statement.

    begin          before the call: audit `pending` + memory `intent`, with the whole payload
    finish_stored  after it: audit `allow` + memory `stored`
    park           or: audit `redirect` + outbox row + memory `parked`

Both finishing statements start by locking the pending audit row, so of a
gateway and a reconciler only one can finish a write; the other finds no row
and asks for the `outcome`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from psycopg.types.json import Jsonb

from engram.kernel.content import storable
from engram.logbook.erasures import ERASE_LEASE_SECONDS
from engram.postgres.query import Query, Row, any_row, maybe_row, one_row, rows, scalar
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import tokenize, tsvector

SQL = load_sql("engram.logbook", "writes.sql")

Disposition = Literal["fresh", "in_flight", "erasing", "stored", "parked"]


@dataclass(frozen=True, slots=True)
class Write:
    """One memory to be written, after policy had its say."""

    payload_md: str
    payload_sha: str
    requested_space: str
    target_space: str
    actor_user_id: str
    correlation_id: str
    evidence_refs_json: dict[str, Any]
    reason: str | None = None
    kind: str | None = None
    meta_json: dict[str, Any] | None = None
    item_id: int | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """What commit one found.

    fresh      the caller owns `audit_id` and must finish it; `ambiguous` if an
               earlier delivery of this content may have arrived
    in_flight  a twin owns `audit_id`; `overdue` once its time is up
    erasing    it was forgotten and its old copy is being deleted: begin again in a moment
    stored     the memory server has it as `memory_id`
    parked     it waits in the outbox as `outbox_id`
    """

    disposition: Disposition
    memory_record_id: int
    delivery_key: UUID
    audit_id: int
    memory_id: str | None
    outbox_id: int | None
    ambiguous: bool
    overdue: bool


@dataclass(frozen=True, slots=True)
class Parked:
    """`fresh` False: the content was in the outbox already, as `outbox_id`."""

    outbox_id: int
    status: str
    memory_id: str | None
    fresh: bool


def begin(write: Write, *, deadline_seconds: float) -> Query[Begun]:
    params = {
        **_facts(write),
        "payload_md": write.payload_md,
        "kind": write.kind,
        "meta_json": Jsonb(write.meta_json or {}),
        "item_id": write.item_id,
        "deadline_seconds": deadline_seconds,
        "erase_lease_seconds": ERASE_LEASE_SECONDS,
        "words": tsvector(tokenize(write.payload_md)),
    }
    return Query(SQL["begin"], _begun, params)


def finish_stored(audit_id: int, memory_id: str) -> Query[bool]:
    """False: somebody else finished this write first."""
    return Query(SQL["finish_stored"], any_row, {"audit_id": audit_id, "memory_id": memory_id})


def park(
    audit_id: int,
    *,
    reason: str,
    error: str,
    ambiguous: bool,
    delay_seconds: float = 0.0,
    overdue_only: bool = False,
) -> Query[Parked | None]:
    """None: somebody else finished this write first, or (`overdue_only`) it still has time.

    `delay_seconds` keeps the worker away from a server that may still be applying the write.
    """
    params = {
        "audit_id": audit_id,
        "reason": reason,
        "error": storable(error),
        "delay_seconds": delay_seconds,
        "ambiguous": ambiguous,
        "overdue_only": overdue_only,
    }
    return Query(SQL["park"], _parked, params)


def park_abandoned(audit_id: int) -> Query[Parked | None]:
    """Park an intent whose gateway is gone: nobody knows what the memory server did."""
    return park(
        audit_id,
        reason="openmemory_write_failed:outcome_unknown",
        error="the gateway that was writing this did not finish",
        ambiguous=True,
        overdue_only=True,
    )


def outcome(audit_id: int) -> Query[Row | None]:
    return Query(SQL["outcome"], maybe_row, {"audit_id": audit_id})


def overdue(*, times: float, limit: int) -> Query[list[Row]]:
    """Intents older than `times` their own deadline."""
    return Query(SQL["overdue"], rows, {"times": times, "limit": limit})


def reject(write: Write) -> Query[int]:
    return Query(SQL["reject"], scalar, _facts(write))


def _facts(write: Write) -> dict[str, Any]:
    return {
        "actor_user_id": write.actor_user_id,
        "requested_space": write.requested_space,
        "target_space": write.target_space,
        "reason": write.reason,
        "payload_sha": write.payload_sha,
        "correlation_id": write.correlation_id,
        "evidence_refs_json": Jsonb(write.evidence_refs_json),
    }


def _begun(found: list[Row]) -> Begun:
    return Begun(**one_row(found))


def _parked(found: list[Row]) -> Parked | None:
    return Parked(**found[0]) if found else None
