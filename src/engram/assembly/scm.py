"""Following source control, and making memories of what it found."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engram.assembly.addresses import silent
from engram.assembly.parts import artifacts, open_client, open_executor
from engram.gateway.memory_store import MemoryStore
from engram.gateway.scm_consumer import Consumed, ScmConsumer
from engram.kernel.errors import NotFound
from engram.kernel.logs import hide
from engram.kernel.settings import Settings
from engram.logbook import facts
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row
from engram.scm import store as scm_store
from engram.scm.patches import Kept, Materializer
from engram.scm.source import Source
from engram.scm.sources import source_of
from engram.scm.store import Counts, Repo
from engram.scm.sync import Mode, Syncing


@dataclass(frozen=True, slots=True)
class Scm:
    """What the commands about source control do; each call has a source of its own."""

    settings: Settings
    db: AsyncExecutor

    async def add(self, project_key: str, kind: str, url: str) -> Row:
        return await self.db.run(scm_store.add_repo(project_key, kind, url))

    async def repos(self, repo_ids: Sequence[int] | None = None) -> list[Repo]:
        found = await self.db.run(scm_store.list_repos(repo_ids))
        if lost := set(repo_ids or ()) - {repo.repo_id for repo in found}:
            raise NotFound(f"there is no repository {min(lost)}", hint="`engram scm status` lists them")
        return found

    async def sync(
        self, repo: Repo, *, best_effort: bool = False, told: Callable[[str], None] = silent
    ) -> Counts:
        def page(counts: Counts) -> None:
            told(f"{counts.read} read")

        mode: Mode = "best_effort" if best_effort else "strict"
        async with self._source(repo) as source:
            syncing = Syncing(self.db, self.settings.scm_lease_seconds, mode, page)
            return await syncing.run_once(repo, source)

    async def materialize(
        self, repo: Repo, *, told: Callable[[str], None] = silent, limit: int | None = None
    ) -> Kept:
        def patch(kept: Kept) -> None:
            told(f"{kept.done} patches")

        store = artifacts(self.settings)
        async with self._source(repo) as source:
            work = Materializer(self.db, store, self.settings.scm_max_patch_bytes, patch)
            return await work.run_once(repo, source, limit)

    async def status(self) -> list[Row]:
        waiting = await self.db.run(facts.waiting.query())
        return [
            {**row, "waiting": waiting.get(row["repo_id"], 0)}
            for row in await self.db.run(scm_store.status())
        ]

    async def consumer_rules(self, project_key: str, rules: dict[str, Any]) -> None:
        async with self.consumer() as consumer:
            await consumer.set_rules(project_key, rules)

    @asynccontextmanager
    async def consumer(self, told: Callable[[str], None] = silent) -> AsyncIterator[ScmConsumer]:
        def fact(consumed: Consumed) -> None:
            told(f"{consumed.facts} facts")

        async with open_client(self.settings) as client:
            store = MemoryStore(self.db, client, self.settings)
            yield ScmConsumer(self.db, store, fact)
            await store.drain()

    @asynccontextmanager
    async def _source(self, repo: Repo) -> AsyncIterator[Source]:
        hide(self.settings.gitlab_token)
        source = source_of(
            repo,
            mirrors=self.settings.data_dir / "scm",
            silent_seconds=self.settings.scm_timeout_seconds,
            gitlab_token=self.settings.gitlab_token,
        )
        try:
            yield source
        finally:
            await source.close()


@asynccontextmanager
async def open_scm(settings: Settings) -> AsyncIterator[Scm]:
    async with open_executor(settings, "engram-scm") as db:
        yield Scm(settings, db)
