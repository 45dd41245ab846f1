"""The outbox: memories that are still to reach the memory server.

A worker leases rows (`claim_outbox`), delivers them, and settles each as sent,
failed or dead. Only the holder of a live lease can settle: every settling
statement checks the row's `locked_by`, that the lease is not over, and the
`lease_token` that the claim drew. A lost lease is answered with `False`, never
raised.

The `*_many` forms judge each row on its own and write the worker's audits in
the same statement; the single forms are the same statements for one row,
without audits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import index
from typing import Any, TypeVar
from uuid import UUID

from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.content import MAX_ID, labelled_sha, storable, why_unstorable
from engram.kernel.content import payload_sha as sha_of
from engram.kernel.durations import MOST_SECONDS
from engram.kernel.errors import OutboxInvalid
from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.postgres.arrays import numbers, texts
from engram.postgres.query import Query, Row, any_row, maybe_row, one_row, rows, scalar
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import tokenize, tsvector

SQL = load_sql("engram.logbook", "outbox.sql")

# Where whoever parked something says so: a hint to look now, never a promise.
CHANNEL = "engram_outbox"
# PostgreSQL knows times that Python does not: a row that waits for one could be neither claimed nor read.
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


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
    """A delivery that is given up. `cause` is one word for alerts; an error may quote the memory."""

    outbox_id: int
    lease_token: int | None
    error: str
    ambiguous: bool = False
    reason: str = "outbox_flush_dead"
    cause: str = "retries_exhausted"


@dataclass(frozen=True, slots=True)
class Released:
    """A lease handed back without counting a try: what failed said nothing about this row.

    With a `reason` it is audited.
    """

    outbox_id: int
    lease_token: int | None
    error: str | None = None
    delay: float = 0.0
    ambiguous: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease begun anew, and the memory's record in that moment; `state` None: it has none."""

    outbox_id: int
    forgotten: bool
    delivery_key: UUID | None
    state: str | None
    memory_id: str | None
    intent_left_seconds: float


@dataclass(frozen=True, slots=True)
class Requeued:
    """The row that now carries a dead row's content. `fresh` False: one carried it already."""

    outbox_id: int
    fresh: bool


Settlement = Sent | Failed | Dead | Released
D = TypeVar("D", Sent, Failed, Dead, Released)


@primitive
def enqueue_memory(
    payload_md: str,
    target_space: str,
    item_id: int | None = None,
    last_error: str | None = None,
    config: Config | None = None,
) -> Query[int]:
    """Put a memory in the outbox; content that is there already keeps its id."""
    _check_content(payload_md, target_space)
    params = {
        "target_space": target_space,
        "payload_sha": sha_of(payload_md),
        "payload_md": payload_md,
        "item_id": item_id,
        "last_error": None if last_error is None else storable(last_error),
        "words": tsvector(tokenize(payload_md)),
    }
    return Query(SQL["enqueue"], scalar, params)


@primitive
def enqueue_many(memories: Iterable[tuple[str, str]], config: Config | None = None) -> Query[list[int]]:
    """Queue many `(payload_md, target_space)` in one statement; their ids, in the order given."""
    given = list(memories)
    for payload_md, target_space in given:
        _check_content(payload_md, target_space)
    keys = [(space, sha_of(payload)) for payload, space in given]
    distinct = sorted(dict(zip(keys, given, strict=True)).items())
    params = {
        "target_spaces": texts(space for (space, _), _ in distinct),
        "payload_shas": texts(sha for (_, sha), _ in distinct),
        "payloads": texts(payload for _, (payload, _) in distinct),
        "words": texts(tsvector(tokenize(payload)) for _, (payload, _) in distinct),
    }

    def in_order(found: list[Row]) -> list[int]:
        ids = {(row["target_space"], row["payload_sha"]): row["outbox_id"] for row in found}
        return [ids[key] for key in keys]

    return Query(SQL["enqueue_many"], in_order, params)


@primitive
def check_dedup(
    target_space: str, payload_sha: str, config: Config | None = None
) -> Query[dict[str, Any] | None]:
    """The sent row with this content, if there is one."""
    return Query(SQL["check_dedup"], maybe_row, {"target_space": target_space, "payload_sha": payload_sha})


@primitive
def claim_outbox(
    worker_id: str, limit: int = 10, lease_seconds: int = 60, config: Config | None = None
) -> Query[list[dict[str, Any]]]:
    """Lease up to `limit` due rows, oldest first; safe with any number of workers."""
    if limit < 1 or lease_seconds < 1 or not worker_id:
        raise OutboxInvalid(
            "a claim needs a worker id, a limit and a lease length",
            fields={"worker_id": "not empty", "limit": "1 or more", "lease_seconds": "1 or more"},
        )
    params = {"worker_id": worker_id, "limit": limit, "lease_seconds": lease_seconds}
    return Query(SQL["claim"], _oldest_first, params)


@primitive
def ack_sent(
    outbox_id: int,
    worker_id: str,
    memory_id: str | None = None,
    config: Config | None = None,
    *,
    lease_token: int | None = None,
) -> Query[bool]:
    """pending -> sent. False: the lease is over, lost, or the row is settled."""
    return _ack(worker_id, [Sent(outbox_id, lease_token, memory_id)], any_row, audited=False)


@primitive
def fail_retry(
    outbox_id: int,
    worker_id: str,
    error: str,
    next_attempt_at: datetime | str,
    config: Config | None = None,
    *,
    lease_token: int | None = None,
) -> Query[bool]:
    """Count a failed try and wait until `next_attempt_at`, which the caller computes."""
    failed = Failed(outbox_id, lease_token, error, next_attempt_at=next_attempt_at)
    return _fail(worker_id, [failed], any_row, audited=False)


@primitive
def mark_dead_by_worker(
    outbox_id: int,
    worker_id: str,
    error: str,
    config: Config | None = None,
    *,
    lease_token: int | None = None,
) -> Query[bool]:
    """pending -> dead."""
    return _dead(worker_id, [Dead(outbox_id, lease_token, error)], any_row, audited=False)


@primitive
def renew_lease(
    outbox_id: int, worker_id: str, config: Config | None = None, *, lease_token: int | None = None
) -> Query[bool]:
    """Start the lease anew; a holder may be late as long as nobody has taken the row."""
    params = {"outbox_id": outbox_id, "worker_id": worker_id, "lease_token": lease_token}
    return Query(SQL["renew"], any_row, params)


@primitive
def renew_many(
    worker_id: str, leases: Iterable[tuple[int, int | None]], config: Config | None = None
) -> Query[dict[int, Renewal]]:
    """Renew `(outbox_id, lease_token)` pairs; a row that is missing from the answer was lost.

    What it tells of the memory is what `check_dedup` is for, and more: content that any write
    has stored meanwhile, not only one through the outbox, need not be sent again.
    """
    params = {"worker_id": worker_id, **_ids_and_tokens(dict(leases))}
    return Query(SQL["renew_many"], _renewals, params)


@primitive
def release_lease(
    outbox_id: int,
    worker_id: str,
    delay_seconds: float = 0.0,
    config: Config | None = None,
    *,
    lease_token: int | None = None,
) -> Query[bool]:
    """Hand a row back without counting a try, optionally not before `delay_seconds` from now."""
    return _release(worker_id, [Released(outbox_id, lease_token, delay=delay_seconds)], any_row)


@primitive
def ack_many(worker_id: str, deliveries: Iterable[Sent], config: Config | None = None) -> Query[set[int]]:
    """The ids that were settled; the others' leases were lost."""
    return _ack(worker_id, deliveries, _ids, audited=True)


@primitive
def fail_many(worker_id: str, deliveries: Iterable[Failed], config: Config | None = None) -> Query[set[int]]:
    return _fail(worker_id, deliveries, _ids, audited=True)


@primitive
def dead_many(worker_id: str, deliveries: Iterable[Dead], config: Config | None = None) -> Query[set[int]]:
    return _dead(worker_id, deliveries, _ids, audited=True)


@primitive
def release_many(worker_id: str, leases: Iterable[Released], config: Config | None = None) -> Query[set[int]]:
    return _release(worker_id, leases, _ids)


@primitive
def record_conflicts(
    worker_id: str, leases: Iterable[tuple[int, int | None]], config: Config | None = None
) -> Query[set[int]]:
    """The ids that really were lost; the others had been settled under this very lease."""
    params = {"worker_id": worker_id, **_ids_and_tokens(dict(leases))}
    return Query(SQL["record_conflicts"], _ids, params)


@primitive
def requeue(
    outbox_id: int, requested_by: str | None = None, config: Config | None = None
) -> Query[Requeued | None]:
    """Try a dead row's content again, as a new row with its own redirect audit.

    The dead row stays as it is. None: there is no dead row with this id.
    """
    return Query(SQL["requeue"], _requeued, {"outbox_id": outbox_id, "requested_by": requested_by})


@primitive
def get(outbox_id: int, config: Config | None = None) -> Query[dict[str, Any] | None]:
    return Query(SQL["get"], maybe_row, {"outbox_id": outbox_id})


@primitive
def list_rows(
    status: str | None = None,
    target_space: str | None = None,
    older_than_seconds: float | None = None,
    text: str | None = None,
    limit: int = 100,
    after_id: int = 0,
    config: Config | None = None,
) -> Query[list[dict[str, Any]]]:
    """Rows by status, space, age and a text in payload or error, oldest first, a page at a time."""
    params = {
        "status": status,
        "target_space": target_space,
        "older_than_seconds": older_than_seconds,
        "text": text,
        "limit": limit,
        "after_id": after_id,
    }
    return Query(SQL["list"], rows, params)


@primitive
def stats(config: Config | None = None) -> Query[dict[str, Any]]:
    return Query(SQL["stats"], one_row)


@primitive
def backlog(config: Config | None = None) -> Query[dict[str, Any]]:
    """How much waits and for how long; cheap enough to be asked every few seconds."""
    return Query(SQL["backlog"], one_row)


def __getattr__(name: str) -> Any:
    """`outbox.list(...)` reads best; defined here by that name it would hide the built-in."""
    if name == "list":
        return list_rows
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _ack(worker_id: str, deliveries: Iterable[Sent], read: Any, *, audited: bool) -> Query[Any]:
    asked = _distinct(deliveries)
    params = {
        **_leases(worker_id, asked),
        "audited": audited,
        "memory_ids": texts(d.memory_id for d in asked),
        "reasons": texts(d.reason for d in asked),
    }
    return Query(SQL["ack_many"], read, params)


def _fail(worker_id: str, deliveries: Iterable[Failed], read: Any, *, audited: bool) -> Query[Any]:
    asked = _distinct(deliveries)
    params = {
        **_leases(worker_id, asked),
        "audited": audited,
        "errors": [storable(d.error) for d in asked],
        "next_attempts": [_moment(d.next_attempt_at) for d in asked],
        "delays": [_seconds(d.delay) for d in asked],
        "ambiguous": [d.ambiguous for d in asked],
        "reasons": [d.reason for d in asked],
    }
    return Query(SQL["fail_many"], read, params)


def _moment(given: datetime | str | None) -> datetime | None:
    """In UTC, as a time without a zone is taken to be."""
    if given is None:
        return None
    try:
        moment = datetime.fromisoformat(given.strip()) if isinstance(given, str) else given
        if moment.utcoffset() is None:
            moment = moment.replace(tzinfo=UTC)
        if EARLIEST <= moment <= LATEST:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError, TypeError, AttributeError):
        pass
    raise OutboxInvalid(
        f"next_attempt_at: {given!r:.80} is not a moment that can be waited for",
        hint="give an ISO 8601 time with its zone",
        fields={"next_attempt_at": f"must be a time from {EARLIEST.year} to {LATEST.year}"},
    )


def _seconds(given: float) -> float:
    try:
        seconds = float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = float("nan")
    if not abs(seconds) <= MOST_SECONDS:
        raise OutboxInvalid(
            f"delay: {given!r:.80} seconds cannot be waited for",
            hint="give a number of seconds",
            fields={"delay": f"must be at most {MOST_SECONDS}"},
        )
    return seconds


def _dead(worker_id: str, deliveries: Iterable[Dead], read: Any, *, audited: bool) -> Query[Any]:
    asked = _distinct(deliveries)
    params = {
        **_leases(worker_id, asked),
        "audited": audited,
        "errors": [storable(d.error) for d in asked],
        "ambiguous": [d.ambiguous for d in asked],
        "reasons": [d.reason for d in asked],
    }
    return Query(SQL["dead_many"], read, params)


def _release(worker_id: str, leases: Iterable[Released], read: Any) -> Query[Any]:
    asked = _distinct(leases)
    params = {
        **_leases(worker_id, asked),
        "errors": [None if d.error is None else storable(d.error) for d in asked],
        "delays": [_seconds(d.delay) for d in asked],
        "ambiguous": [d.ambiguous for d in asked],
        "reasons": [d.reason for d in asked],
    }
    return Query(SQL["release_many"], read, params)


def _check_content(payload_md: str, target_space: str) -> None:
    wrong = {}
    if not payload_md.strip():
        wrong["payload_md"] = "must not be empty"
    elif problem := why_unstorable(payload_md):
        wrong["payload_md"] = problem
    if not target_space.strip():
        wrong["target_space"] = "must not be empty"
    elif problem := why_unstorable(target_space):
        wrong["target_space"] = problem
    if wrong:
        said = "; ".join(f"{name} {problem}" for name, problem in wrong.items())
        raise OutboxInvalid(
            f"the memory cannot be queued: {said}",
            fields=wrong,
            context=content_context(payload_md, target_space),
        )


def content_context(payload_md: str, target_space: str) -> dict[str, Any]:
    """Which write an error is about. Text that has no UTF-8 form has no hash."""
    try:
        sha = labelled_sha(sha_of(payload_md))
    except UnicodeEncodeError:
        sha = None
    now = SYSTEM_CLOCK.now().isoformat()
    return {"target_space": storable(target_space), "payload_sha": sha, "timestamp": now}


def _oldest_first(found: list[Row]) -> list[Row]:
    return sorted(found, key=lambda row: (row["next_attempt_at"], row["outbox_id"]))


def _ids(found: list[Row]) -> set[int]:
    return {row["outbox_id"] for row in found}


def _renewals(found: list[Row]) -> dict[int, Renewal]:
    return {row["outbox_id"]: Renewal(**row) for row in found}


def _requeued(found: list[Row]) -> Requeued | None:
    return Requeued(**found[0]) if found else None


def _distinct(deliveries: Iterable[D]) -> list[D]:
    """One settle per row, in id order: two bulk settles then lock in the same order."""
    return [d for _, d in sorted({_number("outbox_id", d.outbox_id): d for d in deliveries}.items())]


def _leases(worker_id: str, asked: Sequence[Settlement]) -> dict[str, Any]:
    return {"worker_id": worker_id, **_ids_and_tokens({d.outbox_id: d.lease_token for d in asked})}


def _ids_and_tokens(leases: Mapping[int, int | None]) -> dict[str, Any]:
    held = sorted((_number("outbox_id", i), token) for i, token in leases.items())
    tokens = (None if token is None else _number("lease_token", token) for _, token in held)
    return {"outbox_ids": numbers(i for i, _ in held), "lease_tokens": numbers(tokens)}


def _number(name: str, given: int) -> int:
    try:
        number = index(given)
    except TypeError:
        number = MAX_ID + 1
    if abs(number) > MAX_ID:
        raise OutboxInvalid(
            f"{name}: {given!r:.80} is none",
            hint="give it as the claim did",
            fields={name: "must be a whole number"},
        )
    return number
