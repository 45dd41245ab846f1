"""The rows of documents and tasks. Every change of state is one statement with its transition.

A task is started by a lease: a token from a sequence, a start and a length, by
the database's clock. Only the holder of that token can settle it, and only
while the lease is live; a lease that ran out is a failure like any other, so a
document that kills its worker ends. A refusal is an id that does not come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from engram.ingest.seam import Work
from engram.kernel.content import storable
from engram.postgres.query import Query, Row, any_row, maybe_row, one_row, rows, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.ingest", "tasks.sql")


@dataclass(frozen=True, slots=True)
class Upload:
    """What `create` writes. `title` None keeps the one the document has, or takes its file's name."""

    task_id: UUID
    document_id: UUID
    owner: str
    title: str | None
    filename: str
    media_type: str
    sha256: str
    bytes: int
    artifact_key: str


@dataclass(frozen=True, slots=True)
class Started:
    """A leased task, and what its worker must know of it."""

    work: Work
    attempt_count: int
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A try that failed; `final`: no other could succeed."""

    task_id: UUID
    lease_token: int
    error: str
    delay: float
    final: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """What a failure made of its task."""

    task_id: UUID
    status: str
    attempt_count: int
    error: str
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page of a list ended."""

    at: datetime
    id: UUID


def create(upload: Upload, *, emits: bool = False) -> Query[Row]:
    """`emits`: Kafka is told of the task, by an event of the same transaction."""
    params = {**{name: getattr(upload, name) for name in Upload.__slots__}, "emits": emits}
    return Query(SQL["create"], one_row, params)


def create_many(owner: str, media_type: str, given: Sequence[tuple[UUID, UUID, str]]) -> Query[list[UUID]]:
    """Tasks for `(task_id, document_id, sha256)` of documents that have no bytes."""
    task_ids, document_ids, sha256s = (list(part) for part in zip(*given, strict=True))
    params = {
        "owner": owner,
        "media_type": media_type,
        "task_ids": task_ids,
        "document_ids": document_ids,
        "sha256s": sha256s,
    }
    return Query(SQL["create_many"], _ids, params)


def put_on_stream(entries: Sequence[tuple[UUID, str]]) -> Query[list[UUID]]:
    """Record `(task, its entry)`; a task that got one meanwhile keeps it."""
    return Query(SQL["put_on_stream"], _ids, _entries(entries))


def off_the_stream(entries: Sequence[tuple[UUID, str]]) -> Query[list[UUID]]:
    """Forget the entries that are not there any more; the unfinished tasks that had them."""
    return Query(SQL["off_the_stream"], _ids, _entries(entries))


def start(
    worker_id: str, entries: Sequence[tuple[UUID, str]], lease_seconds: float
) -> Query[dict[UUID, Started]]:
    """Lease the tasks of `(task, entry)`; one that may not run now does not come back."""
    params = {**_entries(entries), "worker_id": worker_id, "lease_seconds": lease_seconds}
    return Query(SQL["start"], _started, params)


def start_due(worker_id: str, limit: int, lease_seconds: float) -> Query[dict[UUID, Started]]:
    params = {"worker_id": worker_id, "limit": limit, "lease_seconds": lease_seconds}
    return Query(SQL["start_due"], _started, params)


def renew(leases: Sequence[tuple[UUID, int]]) -> Query[list[UUID]]:
    return Query(SQL["renew"], _ids, _leases(leases))


def progress(task_id: UUID, lease_token: int, processed: int, total: int) -> Query[bool]:
    params = {"task_id": task_id, "lease_token": lease_token, "processed": processed, "total": total}
    return Query(SQL["progress"], any_row, params)


def succeed(done: Sequence[tuple[Work, int]]) -> Query[list[UUID]]:
    """Settle `(work, segments)`."""
    params = {
        **_leases([(work.task_id, work.lease_token) for work, _ in done]),
        "media_types": [work.media_type for work, _ in done],
        "titles": [work.title for work, _ in done],
        "segments": [segments for _, segments in done],
    }
    return Query(SQL["succeed"], _ids, params)


def fail(failures: Sequence[Failure], max_attempts: int, *, lapsed: bool = False) -> Query[list[Failed]]:
    """`lapsed`: it is the lease running out that is the failure, so it must have."""
    params = {
        **_leases([(f.task_id, f.lease_token) for f in failures]),
        "errors": [storable(f.error) for f in failures],
        "delays": [f.delay for f in failures],
        "final": [f.final for f in failures],
        "max_attempts": max_attempts,
        "lapsed": lapsed,
    }
    return Query(SQL["fail"], _failed, params)


def hand_back(leases: Sequence[tuple[UUID, int]]) -> Query[list[UUID]]:
    return Query(SQL["hand_back"], _ids, _leases(leases))


def lapsed(limit: int) -> Query[list[Row]]:
    return Query(SQL["lapsed"], rows, {"limit": limit})


def judge(task_ids: Sequence[UUID]) -> Query[dict[UUID, Row]]:
    return Query(SQL["judge"], _by_id, {"task_ids": list(task_ids)})


def unfinished(after: UUID | None, limit: int, settled_seconds: float) -> Query[list[Row]]:
    params = {"after": after, "limit": limit, "settled_seconds": settled_seconds}
    return Query(SQL["unfinished"], rows, params)


def not_on_the_stream(limit: int, settled_seconds: float) -> Query[list[UUID]]:
    return Query(SQL["not_on_the_stream"], _ids, {"limit": limit, "settled_seconds": settled_seconds})


def retry(owner: str, task_id: UUID, *, emits: bool = False) -> Query[Row | None]:
    return Query(SQL["retry"], maybe_row, {"owner": owner, "task_id": task_id, "emits": emits})


def get(owner: str, task_id: UUID) -> Query[Row | None]:
    return Query(SQL["get"], maybe_row, {"owner": owner, "task_id": task_id})


def transitions(task_id: UUID) -> Query[list[Row]]:
    return Query(SQL["transitions"], rows, {"task_id": task_id})


def list_tasks(
    owner: str, limit: int, *, status: str | None = None, document_id: UUID | None = None,
    before: Place | None = None,
) -> Query[list[Row]]:  # fmt: skip
    params = {"owner": owner, "status": status, "document_id": document_id, "limit": limit, **_before(before)}
    return Query(SQL["list"], rows, params)


def documents(owner: str, limit: int, *, before: Place | None = None) -> Query[list[Row]]:
    return Query(SQL["documents"], rows, {"owner": owner, "limit": limit, **_before(before)})


def document(owner: str, document_id: UUID) -> Query[Row | None]:
    return Query(SQL["document"], maybe_row, {"owner": owner, "document_id": document_id})


def delete_document(owner: str, document_id: UUID) -> Query[Row | None]:
    return Query(SQL["delete_document"], maybe_row, {"owner": owner, "document_id": document_id})


def is_referred_to(artifact_key: str) -> Query[bool]:
    return Query(SQL["is_referred_to"], scalar, {"artifact_key": artifact_key})


def _before(place: Place | None) -> dict[str, Any]:
    return {"before_at": place and place.at, "before_id": place and place.id}


def _leases(leases: Sequence[tuple[UUID, int]]) -> dict[str, list[Any]]:
    return {
        "task_ids": [task_id for task_id, _ in leases],
        "lease_tokens": [token for _, token in leases],
    }


def _entries(entries: Sequence[tuple[UUID, str]]) -> dict[str, list[Any]]:
    return {
        "task_ids": [task_id for task_id, _ in entries],
        "stream_ids": [stream_id for _, stream_id in entries],
    }


def _ids(found: list[Row]) -> list[UUID]:
    return [row["id"] for row in found]


def _by_id(found: list[Row]) -> dict[UUID, Row]:
    return {row["id"]: row for row in found}


def _failed(found: list[Row]) -> list[Failed]:
    return [
        Failed(row["id"], row["status"], row["attempt_count"], row["last_error"], row["stream_id"])
        for row in found
    ]


def _started(found: list[Row]) -> dict[UUID, Started]:
    return {row["id"]: Started(_work(row), row["attempt_count"], row["stream_id"]) for row in found}


def _work(row: Row) -> Work:
    return Work(
        task_id=row["id"],
        document_id=row["document_id"],
        owner=row["owner"],
        title=row["title"],
        media_type=row["media_type"],
        artifact_key=row["artifact_key"],
        lease_token=row["lease_token"],
    )
