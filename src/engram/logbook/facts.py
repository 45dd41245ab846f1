"""What happened in source control, read-only: `engram.scm` writes these tables, others read them here.

Facts are followed by `changed_seq`: every change of a row draws a new, larger
one, and those of one repository are committed in that order. So whoever keeps
the last one it has seen misses nothing, and sees a merge request again when it
has been merged since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.logbook.uri import MAX_NUMBER, parse_evidence_uri
from engram.postgres.query import Query, maybe_row, rows, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "facts.sql")


@primitive
def changes(
    repo_id: int, after_seq: int = 0, limit: int = 100, config: Config | None = None
) -> Query[list[dict[str, Any]]]:
    """Commits, revisions and merge requests that changed after a point, oldest change first."""
    return Query(SQL["changes"], rows, {"repo_id": repo_id, "after_seq": after_seq, "limit": limit})


@primitive
def repositories(
    repo_ids: Sequence[int] | None = None, config: Config | None = None
) -> Query[list[dict[str, Any]]]:
    return Query(SQL["repos"], rows, {"repo_ids": None if repo_ids is None else list(repo_ids)})


@primitive
def before_revision(repo_id: int, rev_num: int, config: Config | None = None) -> Query[int]:
    """The point from which every Subversion revision after `rev_num` is read."""
    return Query(SQL["before_revision"], scalar, {"repo_id": repo_id, "rev_num": rev_num})


@primitive
def patch(evidence_uri: str, config: Config | None = None) -> Query[dict[str, Any] | None]:
    """Where the bytes of a `memory://patch_blobs/…` URI are, and whose project they belong to."""
    parts = parse_evidence_uri(evidence_uri) or {"source_type": "", "source_id": "", "sha256": ""}
    repo, _, source_id = parts["source_id"].partition(":")
    params = {
        "repo_id": int(repo) if repo.isascii() and repo.isdigit() and int(repo) <= MAX_NUMBER else 0,
        "source_type": parts["source_type"],
        "source_id": source_id,
        "sha256": parts["sha256"],
    }
    return Query(SQL["patch"], maybe_row, params)


@primitive
def waiting(config: Config | None = None) -> Query[dict[int, int]]:
    """How many changes each repository's consumer has not seen yet."""
    return Query(SQL["waiting"], lambda found: {row["repo_id"]: row["waiting"] for row in found})
