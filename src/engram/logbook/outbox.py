"""The outbox: memories that are still to reach the memory server.

A worker leases rows (`claim`), delivers them, and settles each as sent, failed
or dead. Only the holder of a live lease can settle: every settling statement
checks the row's `locked_by`, that the lease is not over, and the `lease_token`
that the claim drew. A lost lease is answered with `False`, never raised.

The `*_many` queries judge each row on its own and write the worker's audits in
the same statement; the specification's single functions are the same
statements for one row, without audits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from engram.kernel.content import payload_sha as sha_of
from engram.kernel.errors import OutboxInvalid
from engram.logbook.config import Config
from engram.logbook.connection import run
from engram.postgres.query import Query, Row, any_row, maybe_row, one_row, scalar
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import tokenize, tsvector

SQL = load_sql("engram.logbook", "outbox.sql")


@dataclass(frozen=True, slots=True)
class Sent:
    """A delivery that arrived. `lease_token` None skips the token check."""

    outbox_id: int
    lease_token: int | None
    memory_id: str | None
    reason: str = "outbox_flush_success"


@dataclass(frozen=True, slots=True)
class Failed:
    """A delivery to be tried again: at `next_attempt_at`, or `delay` seconds from the database's now."""

    outbox_id: int
    lease_token: int | None
    error: str
    delay: float = 0.0
    next_attempt_at: datetime | str | None = None
    ambiguous: bool = False
    reason: str = "outbox_flush_retry"


@dataclass(frozen=True, slots=True)
class Dead:
    """A delivery that is given up."""

    outbox_id: int
    lease_token: int | None
    error: str
    reason: str = "outbox_flush_dead"


@dataclass(frozen=True, slots=True)
class Released:
    """A lease handed back without counting a try: what failed said nothing about this row."""

    outbox_id: int
    lease_token: int | None
    error: str | None = None
    delay: float = 0.0
    ambiguous: bool = False


Settlement = Sent | Failed | Dead | Released
D = TypeVar("D", Sent, Failed, Dead, Released)


def enqueue(
    payload_md: str, target_space: str, item_id: int | None = None, last_error: str | None = None
) -> Query[int]:
    _check_content(payload_md, target_space)
    params = {
        "target_space": target_space,
        "payload_sha": sha_of(payload_md),
        "payload_md": payload_md,
        "item_id": item_id,
        "last_error": last_error,
        "words": tsvector(tokenize(payload_md)),
    }
    return Query(SQL["enqueue"], scalar, params)


def claim(worker_id: str, limit: int, lease_seconds: int) -> Query[list[Row]]:
    if limit < 1 or lease_seconds < 1 or not worker_id:
        raise OutboxInvalid(
            "a claim needs a worker id, a limit and a lease length",
            fields={"worker_id": "not empty", "limit": "1 or more", "lease_seconds": "1 or more"},
        )
    params = {"worker_id": worker_id, "limit": limit, "lease_seconds": lease_seconds}
    return Query(SQL["claim"], _oldest_first, params)


def renew(outbox_id: int, worker_id: str, lease_token: int | None = None) -> Query[bool]:
    params = {"outbox_id": outbox_id, "worker_id": worker_id, "lease_token": lease_token}
    return Query(SQL["renew"], any_row, params)


def release_many(worker_id: str, leases: Iterable[Released]) -> Query[set[int]]:
    asked = _distinct(leases)
    params = {
        **_leases(worker_id, asked),
        "errors": [None if d.error is None else _trimmed(d.error) for d in asked],
        "delays": [d.delay for d in asked],
        "ambiguous": [d.ambiguous for d in asked],
    }
    return Query(SQL["release_many"], _ids, params)


def ack_many(worker_id: str, deliveries: Iterable[Sent], *, audited: bool = True) -> Query[set[int]]:
    """The ids that were settled; the others' leases were lost."""
    asked = _distinct(deliveries)
    params = {
        **_leases(worker_id, asked),
        "audited": audited,
        "memory_ids": [d.memory_id for d in asked],
        "reasons": [d.reason for d in asked],
    }
    return Query(SQL["ack_many"], _ids, params)


def fail_many(worker_id: str, deliveries: Iterable[Failed], *, audited: bool = True) -> Query[set[int]]:
    asked = _distinct(deliveries)
    params = {
        **_leases(worker_id, asked),
        "audited": audited,
        "errors": [_trimmed(d.error) for d in asked],
        "next_attempts": [d.next_attempt_at for d in asked],
        "delays": [d.delay for d in asked],
        "ambiguous": [d.ambiguous for d in asked],
        "reasons": [d.reason for d in asked],
    }
    return Query(SQL["fail_many"], _ids, params)


def dead_many(worker_id: str, deliveries: Iterable[Dead], *, audited: bool = True) -> Query[set[int]]:
    asked = _distinct(deliveries)
    params = {
        **_leases(worker_id, asked),
        "audited": audited,
        "errors": [_trimmed(d.error) for d in asked],
        "reasons": [d.reason for d in asked],
    }
    return Query(SQL["dead_many"], _ids, params)


def record_conflicts(leases: Iterable[tuple[int, int]]) -> Query[set[int]]:
    """The ids that really were lost; the others had been settled under this very lease."""
    held = sorted(dict(leases).items())
    params = {
        "outbox_ids": [outbox_id for outbox_id, _ in held],
        "lease_tokens": [token for _, token in held],
    }
    return Query(SQL["record_conflicts"], _ids, params)


def dedup(target_space: str, payload_sha: str) -> Query[Row | None]:
    return Query(SQL["check_dedup"], maybe_row, {"target_space": target_space, "payload_sha": payload_sha})


def get(outbox_id: int) -> Query[Row | None]:
    return Query(SQL["get"], maybe_row, {"outbox_id": outbox_id})


def stats() -> Query[Row]:
    return Query(SQL["stats"], one_row)


# The specification's functions: synchronous, one row each.


def enqueue_memory(
    payload_md: str,
    target_space: str,
    item_id: int | None = None,
    last_error: str | None = None,
    config: Config | None = None,
) -> int:
    """Put a memory in the outbox; content that is there already keeps its id."""
    return run(enqueue(payload_md, target_space, item_id, last_error), config)


def check_dedup(target_space: str, payload_sha: str, config: Config | None = None) -> dict[str, Any] | None:
    """The sent row with this content, if there is one."""
    return run(dedup(target_space, payload_sha), config)


def claim_outbox(
    worker_id: str, limit: int = 10, lease_seconds: int = 60, config: Config | None = None
) -> list[dict[str, Any]]:
    """Lease up to `limit` due rows, oldest first; safe with any number of workers."""
    return run(claim(worker_id, limit, lease_seconds), config)


def ack_sent(
    outbox_id: int,
    worker_id: str,
    memory_id: str | None = None,
    config: Config | None = None,
    *,
    lease_token: int | None = None,
) -> bool:
    """pending -> sent. False: the lease is over, lost, or the row is settled."""
    return bool(run(ack_many(worker_id, [Sent(outbox_id, lease_token, memory_id)], audited=False), config))


def fail_retry(
    outbox_id: int,
    worker_id: str,
    error: str,
    next_attempt_at: datetime | str,
    config: Config | None = None,
    *,
    lease_token: int | None = None,
) -> bool:
    """Count a failed try and wait until `next_attempt_at`, which the caller computes."""
    failed = Failed(outbox_id, lease_token, error, next_attempt_at=next_attempt_at)
    return bool(run(fail_many(worker_id, [failed], audited=False), config))


def mark_dead_by_worker(
    outbox_id: int,
    worker_id: str,
    error: str,
    config: Config | None = None,
    *,
    lease_token: int | None = None,
) -> bool:
    """pending -> dead."""
    return bool(run(dead_many(worker_id, [Dead(outbox_id, lease_token, error)], audited=False), config))


def renew_lease(
    outbox_id: int, worker_id: str, config: Config | None = None, *, lease_token: int | None = None
) -> bool:
    """Start the lease anew; a holder may be late as long as nobody has taken the row."""
    return run(renew(outbox_id, worker_id, lease_token), config)


_MAX_ERROR = 2000


def _trimmed(error: str) -> str:
    return error.replace("\x00", "\ufffd")[:_MAX_ERROR]


def _check_content(payload_md: str, target_space: str) -> None:
    wrong = {}
    if not payload_md.strip():
        wrong["payload_md"] = "must not be empty"
    elif "\x00" in payload_md:
        wrong["payload_md"] = "must not contain NUL characters"
    if not target_space.strip():
        wrong["target_space"] = "must not be empty"
    if wrong:
        raise OutboxInvalid("the memory cannot be queued", fields=wrong)


def _oldest_first(found: list[Row]) -> list[Row]:
    return sorted(found, key=lambda row: (row["next_attempt_at"], row["outbox_id"]))


def _ids(found: list[Row]) -> set[int]:
    return {row["outbox_id"] for row in found}


def _distinct(deliveries: Iterable[D]) -> list[D]:
    """One settle per row, in id order: two bulk settles then lock in the same order."""
    return sorted({d.outbox_id: d for d in deliveries}.values(), key=lambda d: d.outbox_id)


def _leases(worker_id: str, asked: Sequence[Settlement]) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "outbox_ids": [d.outbox_id for d in asked],
        "lease_tokens": [d.lease_token for d in asked],
    }
