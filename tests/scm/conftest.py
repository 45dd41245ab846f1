"""Repositories to follow, and a sync of them into a real database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engram.logbook.artifacts import LocalArtifacts
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from engram.scm import store
from engram.scm.patches import Kept, Materializer
from engram.scm.source import Source
from engram.scm.sources import source_of
from engram.scm.store import Counts, Repo
from engram.scm.sync import Mode, Syncing
from engram.scm.tries import Tries
from support.gitrepo import GitRepo

FACTS = {
    "git": "SELECT commit_sha AS id, parents, author_name, author_email, authored_at, committer_name,"
    " committer_email, committed_at, message, files, additions, deletions, paths_json, bulk_reason"
    " FROM scm.git_commits WHERE repo_id = %s AND NOT superseded ORDER BY 1",
    "svn": "SELECT rev_num AS id, author_name, committed_at, message, files, paths_json, bulk_reason"
    " FROM scm.svn_revisions WHERE repo_id = %s ORDER BY 1",
    "mr": "SELECT mr_iid AS id, state, title, description, author_name, merge_commit_sha, updated_at"
    " FROM scm.mrs WHERE repo_id = %s ORDER BY 1",
}


@dataclass
class Follower:
    """Follows repositories as `engram scm` does; a new one reads everything anew."""

    db: AsyncExecutor
    dsn: str
    folder: Path
    token: str | None = None

    async def add(self, kind: str, url: str, project: str = "default") -> Repo:
        added = await self.db.run(store.add_repo(project, kind, url))
        return Repo(added["repo_id"], project, kind, url)

    @asynccontextmanager
    async def source(self, repo: Repo) -> AsyncIterator[Source]:
        source = source_of(
            repo,
            mirrors=self.folder / "scm",
            silent_seconds=20,
            gitlab_token=self.token,
            tries=Tries(pause_ms=(1, 1)),
        )
        try:
            yield source
        finally:
            await source.close()

    async def sync(self, repo: Repo, mode: Mode = "strict", lease_seconds: int = 60) -> Counts:
        async with self.source(repo) as source:
            return await Syncing(self.db, lease_seconds, mode).run_once(repo, source)

    async def materialize(self, repo: Repo, max_bytes: int = 1 << 20) -> Kept:
        async with self.source(repo) as source:
            return await Materializer(self.db, self.artifacts, max_bytes).run_once(repo, source)

    @property
    def artifacts(self) -> LocalArtifacts:
        return LocalArtifacts(self.folder / "artifacts")

    def facts(self, repo: Repo, of: str = "git") -> list[dict[str, Any]]:
        return self.asked(FACTS[of], repo.repo_id)

    async def afresh(self, repo: Repo, of: str = "git") -> list[dict[str, Any]]:
        """What a clean, full sync of the same repository finds."""
        twin = await self.add(repo.kind, repo.url, project=f"{repo.project_key}-afresh-{self._next()}")
        await self.sync(twin)
        return self.facts(twin, of)

    def mark(self, key: str) -> Any:
        found = self.asked("SELECT value_json FROM logbook.kv WHERE namespace = 'scm.sync' AND key = %s", key)
        return found[0]["value_json"] if found else None

    def asked(self, sql: str, *params: Any) -> list[dict[str, Any]]:
        with connect(self.dsn) as connection:
            cursor = connection.execute(sql.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def _next(self) -> int:
        return int(self.asked("SELECT count(*) AS n FROM scm.repos")[0]["n"])


@pytest.fixture
def follower(db: AsyncExecutor, dsn: str, tmp_path: Path) -> Follower:
    return Follower(db, dsn, tmp_path / "followed")


@pytest.fixture
def origin(tmp_path: Path) -> GitRepo:
    return GitRepo(tmp_path / "origin.git")
