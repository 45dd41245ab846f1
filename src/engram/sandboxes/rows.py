"""The rows behind sandboxes: values and statements only; `service` puts them to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.types.json import Jsonb

from engram.postgres.query import Query, Row, any_row, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.sandboxes", "rows.sql")

BATCH = 100


@dataclass(frozen=True, slots=True)
class SandboxRow:
    id: str
    number: int
    owner: str
    profile: str
    env: dict[str, str]
    host: str
    status: str
    reason: str | None
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sandbox as its owner asked for it."""

    owner: str
    profile: str
    env: dict[str, str]
    ttl_seconds: float


def begin(sandbox_id: str, wanted: Wanted, *, host: str, at_most: int) -> Query[SandboxRow | None]:
    """None: its owner has as many as may be."""
    params = {
        "id": sandbox_id,
        "owner": wanted.owner,
        "profile": wanted.profile,
        "env": Jsonb(wanted.env),
        "ttl_seconds": wanted.ttl_seconds,
        "host": host,
        "at_most": at_most,
    }
    return Query(SQL["begin"], _maybe, params)


def finish(sandbox_id: str) -> Query[bool]:
    return Query(SQL["finish"], any_row, {"id": sandbox_id})


def fail(sandbox_id: str, reason: str) -> Query[bool]:
    return Query(SQL["fail"], any_row, {"id": sandbox_id, "reason": reason})


def find(sandbox_id: str, owner: str) -> Query[SandboxRow | None]:
    return Query(SQL["find"], _maybe, {"id": sandbox_id, "owner": owner})


def page(owner: str, *, status: str | None, before: int | None, limit: int) -> Query[list[SandboxRow]]:
    params = {"owner": owner, "status": status, "before": before, "limit": limit}
    return Query(SQL["list"], lambda found: [SandboxRow(**row) for row in found], params)


def extend(sandbox_id: str, owner: str, ttl_seconds: float) -> Query[bool]:
    return Query(SQL["extend"], any_row, {"id": sandbox_id, "owner": owner, "ttl_seconds": ttl_seconds})


def stop(sandbox_id: str, owner: str) -> Query[bool]:
    return Query(SQL["stop"], any_row, {"id": sandbox_id, "owner": owner})


def delete(sandbox_id: str, owner: str) -> Query[bool]:
    return Query(SQL["delete"], any_row, {"id": sandbox_id, "owner": owner})


def expire() -> Query[list[str]]:
    return Query(SQL["expire"], _ids, {"limit": BATCH})


def half_made(seconds: float) -> Query[list[tuple[str, str]]]:
    """Id and host of each."""

    def read(found: list[Row]) -> list[tuple[str, str]]:
        return [(row["id"], row["host"]) for row in found]

    return Query(SQL["half_made"], read, {"seconds": seconds, "limit": BATCH})


def alive(ids: Sequence[str]) -> Query[set[str]]:
    return Query(SQL["alive"], lambda found: {row["id"] for row in found}, {"ids": list(ids)})


def purge(seconds: float) -> Query[list[str]]:
    return Query(SQL["purge"], _ids, {"seconds": seconds, "limit": BATCH})


def soonest_end(owner: str) -> Query[float]:
    return Query(SQL["soonest_end"], scalar, {"owner": owner})


def database() -> Query[str]:
    return Query(SQL["database"], scalar)


def _maybe(found: list[Row]) -> SandboxRow | None:
    return SandboxRow(**found[0]) if found else None


def _ids(found: list[Row]) -> list[str]:
    return [row["id"] for row in found]
