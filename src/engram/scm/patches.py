"""Patches: what each fact changed, kept as an artifact and named by a `memory://patch_blobs/…` URI.

The bytes are put before the row that names them. A diff that cannot be had
leaves a row with an empty URI and is fetched by a later run. One that is very
large, or belongs to a bulk change, is kept as a list of files and counts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from engram.kernel.errors import ArtifactError, EngramError, SourceError
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.logbook.artifacts import ArtifactStore
from engram.logbook.uri import build_artifact_key, build_evidence_uri
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row
from engram.scm import store
from engram.scm.source import MAX_PATH_CHARS, Source, text
from engram.scm.store import Patch, Repo

log = logging.getLogger(__name__)

PAGE = 200
AT_ONCE = 4
NEWEST = (1 << 63) - 1
# After so many failures in a row the source is away, not these patches.
FAILURES_IN_A_ROW = 20
_FILE = re.compile(rb"^diff --git a/.* b/(.*)$", re.MULTILINE)


@dataclass
class Kept:
    """What a run did. `missing`: their diffs could not be had; a later run tries them again."""

    diffs: int = 0
    diffstats: int = 0
    empty: int = 0
    missing: int = 0

    @property
    def done(self) -> int:
        return self.diffs + self.diffstats + self.empty + self.missing


@dataclass
class Materializer:
    db: AsyncExecutor
    artifacts: ArtifactStore
    max_bytes: int
    on_patch: Callable[[Kept], None] = lambda kept: None

    async def run_once(self, repo: Repo, source: Source, limit: int | None = None) -> Kept:
        """Patches of all facts that lack one, newest first, or of so many."""
        kept, before, failures = Kept(), NEWEST, 0
        while limit is None or kept.done < limit:
            size = PAGE if limit is None else min(PAGE, limit - kept.done)
            page = await self.db.run(store.without_patch(repo.repo_id, before, size))
            if not page:
                break
            before = page[-1]["changed_seq"]
            for start in range(0, len(page), AT_ONCE):
                facts = page[start : start + AT_ONCE]
                forms = await asyncio.gather(*(self._materialize(repo, source, fact) for fact in facts))
                _count(kept, forms)
                failures = failures + len(forms) if set(forms) == {"missing"} else 0
                self.on_patch(kept)
                if failures >= FAILURES_IN_A_ROW:
                    raise SourceError(
                        f"the last {failures} patches of repository {repo.repo_id} could not be had"
                    )
        return kept

    async def _materialize(self, repo: Repo, source: Source, fact: Row) -> str:
        try:
            patch = await self._patch(repo, source, fact)
        except ArtifactError:
            raise
        except EngramError as error:
            log.warning("scm.patch_failed", extra=fields(source_id=fact["source_id"], error=str(error)))
            patch = Patch("missing", last_error=str(error))
        failpoint("patches.after_bytes")
        await self.db.run(store.put_patch(repo.repo_id, fact["source_type"], fact["source_id"], patch))
        return patch.form

    async def _patch(self, repo: Repo, source: Source, fact: Row) -> Patch:
        if fact["bulk_reason"]:
            return await self._kept(repo, fact, "diffstat", [_diffstat(fact)])
        pieces = await self._read(source.patch(fact["source_type"], fact["source_id"]))
        if pieces is None:
            return await self._kept(repo, fact, "diffstat", [_diffstat(fact)])
        if not any(piece.strip() for piece in pieces):
            return Patch("none")
        patch = await self._kept(repo, fact, "diff", pieces)
        return patch if fact["files"] is not None else replace(patch, paths=_named(pieces))

    async def _read(self, patch: AsyncGenerator[bytes, None]) -> list[bytes] | None:
        """All of it; None if that is too much, and then no more than that is held."""
        pieces, size = [], 0
        async with aclosing(patch) as reading:
            async for piece in reading:
                size += len(piece)
                if size > self.max_bytes:
                    return None
                pieces.append(piece)
        return pieces

    async def _kept(self, repo: Repo, fact: Row, form: str, pieces: Sequence[bytes]) -> Patch:
        source_type, source_id = fact["source_type"], fact["source_id"]

        def key(sha256: str) -> str:
            return build_artifact_key(repo.project_key, repo.repo_id, source_type, source_id, sha256, form)

        artifact = await asyncio.to_thread(self.artifacts.put, pieces, key)
        uri = build_evidence_uri(source_type, f"{repo.repo_id}:{source_id}", artifact.sha256)
        return Patch(form, uri, artifact.key, artifact.sha256, artifact.size)


def _count(kept: Kept, forms: Sequence[str]) -> None:
    kept.diffs += forms.count("diff")
    kept.diffstats += forms.count("diffstat")
    kept.empty += forms.count("none")
    kept.missing += forms.count("missing")


def _named(pieces: Sequence[bytes]) -> list[str]:
    """The files that a diff is about."""
    found = _FILE.findall(b"".join(pieces))
    return [text(name, MAX_PATH_CHARS) for name in dict.fromkeys(found)]


def _diffstat(fact: Row) -> bytes:
    lines = [_line(path) for path in fact["paths_json"]]
    more = (fact["files"] or 0) - len(lines)
    if more > 0:
        lines.append(f" and {more} more")
    counts = "" if fact["files"] is None else f" files: {fact['files']};"
    if fact["additions"] is not None:
        counts += f" lines: +{fact['additions']} -{fact['deletions']};"
    lines.append(f"{counts} the diff itself is too large to be kept")
    return ("\n".join(lines) + "\n").encode()


def _line(path: Row) -> str:
    name = f"{path['from']} => {path['path']}" if path.get("from") else path["path"]
    if path.get("binary"):
        return f" {name} | binary"
    if "added" in path:
        return f" {name} | +{path['added']} -{path['deleted']}"
    return f" {path.get('action', '')} {name}"
