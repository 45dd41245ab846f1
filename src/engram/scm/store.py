"""The rows of `scm.*`: every statement that writes them, and the lease that guards a sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.types.json import Jsonb

from engram.kernel.content import storable
from engram.postgres.query import Query, Row, any_row, maybe_row, one_row, rows, scalar
from engram.postgres.sqlfile import load_sql
from engram.scm.source import MAX_PATHS, SOURCE_TYPE, Marks, Page, identity

SQL = load_sql("engram.scm", "store.sql")


@dataclass(frozen=True, slots=True)
class Repo:
    repo_id: int
    project_key: str
    kind: str
    url: str


@dataclass(frozen=True, slots=True)
class Held:
    """The right to write a repository's facts, until the lease runs out or somebody takes it."""

    repo_id: int
    lease_token: int
    run_id: int


@dataclass(frozen=True, slots=True)
class Written:
    """`let_in` False: the lease is lost, or the watermark is not where it was expected."""

    let_in: bool
    written: int
    superseded: int


@dataclass
class Counts:
    """What a run did."""

    read: int = 0
    written: int = 0
    skipped: int = 0
    superseded: int = 0


def add_repo(project_key: str, kind: str, url: str) -> Query[Row]:
    return Query(SQL["add_repo"], one_row, {"project_key": project_key, "kind": kind, "url": url})


def list_repos(repo_ids: Sequence[int] | None = None) -> Query[list[Repo]]:
    params = {"repo_ids": None if repo_ids is None else list(repo_ids)}
    return Query(SQL["repos"], lambda found: [Repo(**row) for row in found], params)


def acquire(repo_id: int, holder: str, lease_seconds: int, mode: str) -> Query[Held | None]:
    """None: somebody else is at it."""
    params = {"repo_id": repo_id, "holder": holder, "lease_seconds": lease_seconds, "mode": mode}

    def held(found: list[Row]) -> Held | None:
        return Held(repo_id, **found[0]) if found else None

    return Query(SQL["acquire"], held, params)


def marks(held: Held) -> Query[Marks]:
    keys = [key(held.repo_id) for key in (git_key, svn_key, mr_key, progress_key)]

    def found(rows: list[Row]) -> Marks:
        return Marks(held.run_id, {row["key"]: row["value_json"] for row in rows})

    return Query(SQL["marks"], found, {"keys": keys})


def renew(held: Held) -> Query[bool]:
    return Query(SQL["renew"], any_row, {"repo_id": held.repo_id, "lease_token": held.lease_token})


def release(held: Held, counts: Counts, error: str | None) -> Query[bool]:
    params = {
        "repo_id": held.repo_id,
        "lease_token": held.lease_token,
        "run_id": held.run_id,
        "status": "done" if error is None else "failed",
        "error": None if error is None else storable(error),
        "read": counts.read,
        "written": counts.written,
        "skipped": counts.skipped,
        "superseded": counts.superseded,
    }
    return Query(SQL["release"], any_row, params)


def put_page(held: Held, page: Page) -> Query[Written]:
    ours = {identity(page.table, row): row for row in page.rows}
    tables: dict[str, Jsonb] = {"commits": Jsonb([]), "revisions": Jsonb([]), "mrs": Jsonb([])}
    tables[page.table] = Jsonb([*ours.values()])
    move = page.move
    params: Row = {
        "repo_id": held.repo_id,
        "lease_token": held.lease_token,
        "cursor_key": move.key if move else None,
        "expected": _json(move.expected) if move else None,
        "cursor": _json(move.value) if move else None,
        "progress_key": progress_key(held.repo_id),
        "progress": _json(page.progress),
        "pass_is_over": page.pass_is_over,
        "pass": page.pass_number,
        "superseded": sorted(set(page.superseded)),
        "all_others": page.all_others,
        "source_type": SOURCE_TYPE[page.table],
        "source_ids": list(ours),
        **tables,
    }
    return Query(SQL["put_page"], lambda found: Written(**one_row(found)), params)


def skip(repo_id: int, source_type: str, source_id: str, reason: str) -> Query[int]:
    params = {
        "repo_id": repo_id,
        "source_type": source_type,
        "source_id": source_id,
        "reason": storable(reason),
    }
    return Query(SQL["skip"], scalar, params)


def list_skipped(repo_id: int) -> Query[list[Row]]:
    return Query(SQL["skipped"], rows, {"repo_id": repo_id})


def without_patch(repo_id: int, before_seq: int, limit: int) -> Query[list[Row]]:
    params = {"repo_id": repo_id, "before_seq": before_seq, "limit": limit}
    return Query(SQL["without_patch"], rows, params)


@dataclass(frozen=True, slots=True)
class Patch:
    """`uri` is empty where there are no bytes: the change has no diff, or it could not be had yet.

    `paths` are those that the diff names; None: its source listed them with the fact, or it was not read.
    """

    form: str
    uri: str = ""
    artifact_key: str | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    last_error: str | None = None
    paths: list[str] | None = None


def put_patch(repo_id: int, source_type: str, source_id: str, patch: Patch) -> Query[Row | None]:
    params = {
        "repo_id": repo_id,
        "source_type": source_type,
        "source_id": source_id,
        "form": patch.form,
        "uri": patch.uri,
        "artifact_key": patch.artifact_key,
        "sha256": patch.sha256,
        "size_bytes": patch.size_bytes,
        "last_error": None if patch.last_error is None else storable(patch.last_error),
        "files": None if patch.paths is None else len(patch.paths),
        "paths": Jsonb([{"path": path} for path in (patch.paths or [])[:MAX_PATHS]]),
    }
    return Query(SQL["put_patch"], maybe_row, params)


def status() -> Query[list[Row]]:
    return Query(SQL["status"], rows)


def git_key(repo_id: int) -> str:
    return f"git_cursor:{repo_id}"


def svn_key(repo_id: int) -> str:
    return f"svn_cursor:{repo_id}"


def mr_key(repo_id: int) -> str:
    return f"mr_cursor:{repo_id}"


def progress_key(repo_id: int) -> str:
    return f"git_progress:{repo_id}"


def _json(value: Any) -> Jsonb | None:
    return None if value is None else Jsonb(value)
