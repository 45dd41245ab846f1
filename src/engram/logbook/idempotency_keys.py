"""The rows behind idempotency: a key's request, its lease, and the answer once there is one.

Values and statements only; `idempotency` is where they are put to use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from engram.postgres.query import Query, Row, any_row, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "idempotency_keys.sql")

NewId = Callable[[], str]
SWEEP_LIMIT = 256
# Answers that ask for another try; storing them would answer the next one too.
_PASSING = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class Answer:
    """What the request is answered with; `replayed`: somebody else's effect made it."""

    status_code: int
    body: Any
    replayed: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {"Idempotency-Replayed": "true"} if self.replayed else {}


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right to run the effect. `resumed`: an earlier try may have made `resource_id` already."""

    owner: str
    key: str
    resource_id: str
    lease_token: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as far as its key is concerned."""

    owner: str
    key: str
    fingerprint: str
    resumable: bool


@dataclass(frozen=True, slots=True)
class Found:
    request_fingerprint: str
    resource_id: str
    lease_token: int
    status_code: int | None
    response_snapshot: str | None
    lease_left: float

    @property
    def answer(self) -> Answer | None:
        if self.status_code is None:
            return None
        return Answer(self.status_code, json.loads(self.response_snapshot or "null"), replayed=True)


@dataclass(frozen=True, slots=True)
class Running:
    lease_left: float


def fingerprint(method: str, path: str, body: bytes | str) -> str:
    """SHA-256 of the three, each after its length: no two different requests read the same."""
    digest = hashlib.sha256()
    for part in (method.encode(), path.encode(), body if isinstance(body, bytes) else body.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def new_uuid() -> str:
    return str(uuid4())


def storable(status_code: int) -> bool:
    return status_code < 500 and status_code not in _PASSING


def find(owner: str, key: str) -> Query[Found | None]:
    return Query(SQL["find"], _found, {"owner": owner, "key": key})


def reserve(
    asked: Asked, resource_id: str, *, lease_seconds: float, ttl_seconds: float
) -> Query[Reservation | Found | None]:
    """The right to the key, or what it stands for. None: taken this moment; ask again, as a new statement."""

    def read(found: list[Row]) -> Reservation | Found | None:
        if not found:
            return None
        resource_id, lease_token = found[0]["resource_id"], found[0]["lease_token"]
        if (resumed := found[0].pop("resumed")) is None:
            return Found(**found[0])
        return Reservation(asked.owner, asked.key, resource_id, lease_token, resumed)

    params = {
        "owner": asked.owner,
        "key": asked.key,
        "fingerprint": asked.fingerprint,
        "resumable": asked.resumable,
        "resource_id": resource_id,
        "lease_seconds": lease_seconds,
        "ttl_seconds": ttl_seconds,
    }
    return Query(SQL["reserve"], read, params)


def renew(held: Reservation, *, ttl_seconds: float) -> Query[bool]:
    return Query(SQL["renew"], any_row, _lease(held, ttl_seconds))


def complete(held: Reservation, answer: Answer, *, ttl_seconds: float) -> Query[bool]:
    params = {
        **_lease(held, ttl_seconds),
        "status_code": answer.status_code,
        "response_snapshot": json.dumps(answer.body, allow_nan=False),
    }
    return Query(SQL["complete"], any_row, params)


def release(held: Reservation, *, ttl_seconds: float) -> Query[bool]:
    return Query(SQL["release"], any_row, _lease(held, ttl_seconds))


def withdraw(held: Reservation) -> Query[bool]:
    """For what cannot be resumed and was not begun: as if the key had not been used."""
    params = {"owner": held.owner, "key": held.key, "lease_token": held.lease_token}
    return Query(SQL["withdraw"], any_row, params)


def sweep(limit: int = SWEEP_LIMIT) -> Query[int]:
    """How many expired keys were deleted; fewer than `limit` means that none is left."""
    return Query(SQL["sweep"], scalar, {"limit": limit})


def _lease(held: Reservation, ttl_seconds: float) -> dict[str, Any]:
    return {
        "owner": held.owner,
        "key": held.key,
        "lease_token": held.lease_token,
        "ttl_seconds": ttl_seconds,
    }


def _found(found: list[Row]) -> Found | None:
    return Found(**found[0]) if found else None
