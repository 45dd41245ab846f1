"""git: a bare mirror, and its commits in one stream.

The watermark is the set of ref tips. New is what the tips reach now and did not
reach then, whatever the dates say, so that back-dated commits, merges and
force-pushes are seen. What only the old tips reach is superseded: it stays, and
is marked. A pass keeps the tips it goes to and how far it has come under a key
of its own; one that was killed goes on there, even if the refs have moved.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram.kernel.errors import SourceError, SourceRefused
from engram.kernel.failpoints import failpoint
from engram.scm.programs import Program, ProgramFailed
from engram.scm.source import (
    MAX_NAME_CHARS,
    MAX_PATH_CHARS,
    MAX_PATHS,
    Batch,
    Facts,
    Marks,
    Move,
    Page,
    bulk_reason,
    second,
    text,
)
from engram.scm.store import Repo, git_key, progress_key
from engram.scm.tries import Tries, three_tries

PAGE = 500
Tips = dict[str, str]

_PROTOCOLS = "file:git:http:https:ssh"
_ENVIRONMENT: dict[str, str | None] = {
    # What git tells its hooks, and would take for us too.
    **dict.fromkeys(
        (
            "GIT_DIR",
            "GIT_WORK_TREE",
            "GIT_INDEX_FILE",
            "GIT_OBJECT_DIRECTORY",
            "GIT_COMMON_DIR",
            "GIT_NAMESPACE",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES",
            "GIT_EXTERNAL_DIFF",
            "GIT_DIFF_OPTS",
            "GIT_REPLACE_REF_BASE",
        )
    ),
    "GIT_TERMINAL_PROMPT": "0",
    "SSH_ASKPASS_REQUIRE": "never",
    "GIT_ALLOW_PROTOCOL": _PROTOCOLS,
    "GIT_OPTIONAL_LOCKS": "0",
}
# What a person's own configuration must not change.
_CONFIGURED = (
    "core.hooksPath=/dev/null",
    "diff.renames=true",
    "diff.renameLimit=1000",
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "log.showSignature=false",
    "log.mailmap=false",
    "gc.autoDetach=false",
    "core.quotePath=false",
)
_REFS = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
_FIELDS = ("%H", "%P", "%an", "%ae", "%at", "%cn", "%ce", "%ct", "%B")
_FORMAT = "--format=%x01" + "".join(f"{name}%x00" for name in _FIELDS)
_LOG = ("log", "-z", "--numstat", "--topo-order", "--encoding=UTF-8", "--no-color", "--no-ext-diff",
        "--no-textconv", "--ignore-submodules=none", "--ignore-missing", _FORMAT)  # fmt: skip
_DIFF = ("diff-tree", "--no-commit-id", "-p", "-r", "--root", "-M", "--cc", "--no-color", "--no-ext-diff",
         "--no-textconv", "--submodule=short", "--src-prefix=a/", "--dst-prefix=b/")  # fmt: skip
# git has one status for everything; with LC_ALL=C these are the words for a refused key.
_REFUSED = (
    "authentication failed",
    "could not read username",
    "could not read password",
    "permission denied",
    "terminal prompts disabled",
    "the requested url returned error: 401",
    "the requested url returned error: 403",
    "host key verification failed",
)
_UNUSABLE = ("does not appear to be a git repository", "not found", "dubious ownership", "does not exist")


@dataclass(frozen=True, slots=True)
class Pass:
    """From the tips of the last sync to these. `full`: the old ones are gone, so everything is read."""

    number: int
    old: Tips
    new: Tips
    done: int = 0
    full: bool = False

    def progress(self) -> dict[str, Any]:
        return {"pass": self.number, "from": self.old, "to": self.new, "done": self.done, "full": self.full}

    @classmethod
    def of(cls, kept: dict[str, Any]) -> Pass:
        return cls(kept["pass"], kept["from"], kept["to"], kept["done"], kept["full"])


class GitSource:
    def __init__(self, repo: Repo, mirrors: Path, *, silent_seconds: float, tries: Tries) -> None:
        self._repo = repo
        self._mirror = mirrors / f"{repo.repo_id}.git"
        self._tries = tries
        options = [word for setting in _CONFIGURED for word in ("-c", setting)]
        slow = ["-c", "http.lowSpeedLimit=1", "-c", f"http.lowSpeedTime={max(1, int(silent_seconds))}"]
        self._anywhere = Program(["git", *options, *slow], _ENVIRONMENT, silent_seconds)
        self._git = replace(self._anywhere, command=["git", f"--git-dir={self._mirror}", *options, *slow])

    async def pages(self, marks: Marks) -> AsyncGenerator[Page, None]:
        await three_tries(self._fetch, self._tries)
        failpoint("git.after_fetch")
        now = await self._tips()
        old: Tips | None = (marks.at(git_key(self._repo.repo_id)) or {}).get("tips")
        begun = await self._resumable(marks.at(progress_key(self._repo.repo_id)), old or {})
        while begun or now != old:
            work = begun or Pass(marks.run_id, old or {}, now, full=not await self._has(old or {}))
            async with aclosing(self._walk(work, expected=old)) as pages:
                async for page in pages:
                    yield page
            begun, old = None, work.new

    async def again(self, source_type: str, source_id: str) -> Facts:
        if not await self._has({"": source_id}) or not await self._is_reached(source_id):
            return []
        async with aclosing(self._logged("--no-walk", source_id, "--")) as found:
            return [commit async for commit in found]

    async def patch(self, source_type: str, source_id: str) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._git.stream(*_DIFF, source_id, "--")) as pieces:
                async for piece in pieces:
                    yield piece
        except ProgramFailed as failed:
            raise _explained(failed, self._repo.url) from failed

    async def close(self) -> None:
        """Nothing is held between two calls."""

    async def _walk(self, work: Pass, expected: Tips | None) -> AsyncGenerator[Page, None]:
        done = work.done
        if work.new:
            async with aclosing(self._new_commits(work)) as found:
                async for rows in _paged(found):
                    done += len(rows)
                    progress = replace(work, done=done).progress()
                    yield Page("commits", rows, progress=progress, pass_number=work.number)
        yield Page(
            "commits",
            move=Move(
                git_key(self._repo.repo_id),
                None if expected is None else {"tips": expected},
                {"tips": work.new},
            ),
            pass_is_over=True,
            pass_number=work.number,
            superseded=[] if work.full else await self._left_behind(work),
            all_others=work.full and bool(work.old),
        )

    def _new_commits(self, work: Pass) -> AsyncGenerator[dict[str, Any], None]:
        asked = _revisions(work.new, {} if work.full else work.old)
        return self._logged(f"--skip={work.done}", "--stdin", stdin=asked)

    async def _logged(self, *which: str, stdin: bytes = b"") -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with aclosing(read_log(self._git.stream(*_LOG, *which, stdin=stdin))) as found:
                async for commit in found:
                    yield commit
        except ProgramFailed as failed:
            raise _explained(failed, self._repo.url) from failed

    async def _left_behind(self, work: Pass) -> list[str]:
        if set(work.old.values()) <= set(work.new.values()):
            return []
        asked = _revisions(work.old, work.new)
        return (await self._said("rev-list", "--stdin", stdin=asked)).decode().split()

    async def _resumable(self, kept: dict[str, Any] | None, old: Tips) -> Pass | None:
        """The pass that was broken off, if it began where the watermark is and git still has its commits."""
        if kept is None or kept["from"] != old or not await self._has(kept["to"]):
            return None
        return Pass.of(kept)

    async def _has(self, tips: Tips) -> bool:
        if not tips:
            return True
        asked = "".join(f"{sha}\n" for sha in set(tips.values())).encode()
        found = await self._said("cat-file", "--batch-check", "--buffer", stdin=asked)
        return b" missing\n" not in found

    async def _is_reached(self, sha: str) -> bool:
        return bool(
            await self._said("for-each-ref", "--count=1", "--contains", sha, "refs/heads", "refs/tags")
        )

    async def _tips(self) -> Tips:
        """Where each branch and tag is; a tag of something else than a commit is nothing to read."""
        form = "%(refname)%00%(objecttype)%00%(objectname)%00%(*objecttype)%00%(*objectname)"
        said = await self._said("for-each-ref", f"--format={form}", "refs/heads", "refs/tags")
        tips: Tips = {}
        for line in said.splitlines():
            name, kind, sha, peeled_kind, peeled = line.split(b"\0")
            if b"commit" in (kind, peeled_kind):
                tips[text(name)] = (sha if kind == b"commit" else peeled).decode()
        return tips

    async def _fetch(self) -> None:
        if not self._mirror.is_dir():
            await self._clone()
            return
        options = ("--prune", "--progress", "--update-shallow", "--no-write-fetch-head")
        await self._said("fetch", *options, "--", self._repo.url, *_REFS)

    async def _clone(self) -> None:
        """Beside its place first: a mirror is whole or not there."""
        draft = self._mirror.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._said(
            "clone", "--bare", "--progress", "--", self._repo.url, str(draft), git=self._anywhere
        )
        draft.rename(self._mirror)

    async def _said(self, *arguments: str, stdin: bytes = b"", git: Program | None = None) -> bytes:
        try:
            return await (git or self._git).output(*arguments, stdin=stdin)
        except ProgramFailed as failed:
            raise _explained(failed, self._repo.url) from failed


def _revisions(reached: Tips, not_reached: Tips) -> bytes:
    lines = sorted(set(reached.values())) + [f"^{sha}" for sha in sorted(set(not_reached.values()))]
    return "".join(f"{line}\n" for line in lines).encode()


async def _paged(commits: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[Facts, None]:
    batch = Batch(PAGE)
    async for commit in commits:
        if batch.is_full_with(commit):
            yield batch.rows
            batch = Batch(PAGE)
    if batch.rows:
        yield batch.rows


async def read_log(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[dict[str, Any], None]:
    """What `git log -z --numstat` says, commit by commit.

    Everything ends with NUL, which neither a message nor a path can hold: nine fields after a
    \\x01, an empty one, then `added TAB deleted TAB path` for each file; a renamed file has an
    empty path there and the old and the new one after it. Such a line starts with a number or
    `-`, so what starts with \\x01 where a line may stand is the next commit.
    """
    tokens: list[bytes] = []
    rest = b""
    async with aclosing(pieces):
        async for piece in pieces:
            *whole, rest = (rest + piece).split(b"\0")
            tokens += whole
            # The last commit may lack files that the next piece brings.
            last = _last_commit(tokens)
            for commit in _parsed(tokens[:last]):
                yield commit
            tokens = tokens[last:]
    for commit in _parsed(tokens):
        yield commit


def _last_commit(tokens: list[bytes]) -> int:
    """Where the last commit starts that can be told from a path: by walking over all of them."""
    at = last = 0
    while at < len(tokens):
        last = at
        at = _after_files(tokens, at + len(_FIELDS) + 1)
    return last


def _after_files(tokens: list[bytes], at: int) -> int:
    while at < len(tokens) and not tokens[at].startswith(b"\x01"):
        at += 3 if _is_rename(tokens[at]) else 1
    return at


def _is_rename(line: bytes) -> bool:
    return line.endswith(b"\t") and line.count(b"\t") == 2


def _parsed(tokens: list[bytes]) -> Iterator[dict[str, Any]]:
    at = 0
    while at + len(_FIELDS) <= len(tokens):
        first = at + len(_FIELDS) + 1
        at_end = _after_files(tokens, first)
        yield _commit(tokens[at : at + len(_FIELDS)], tokens[first:at_end])
        at = at_end


def _commit(fields: list[bytes], files: list[bytes]) -> dict[str, Any]:
    sha, parents, author, author_email, authored, committer, committer_email, committed, message = fields
    paths, additions, deletions = _paths(files)
    return {
        "commit_sha": sha[1:].decode(),
        "parents": parents.decode().split(),
        "author_name": text(author, MAX_NAME_CHARS),
        "author_email": text(author_email, MAX_NAME_CHARS),
        "authored": second(authored),
        "committer_name": text(committer, MAX_NAME_CHARS),
        "committer_email": text(committer_email, MAX_NAME_CHARS),
        "committed": second(committed),
        "message": text(message).rstrip("\n"),
        "files": len(paths),
        "additions": additions,
        "deletions": deletions,
        "paths": paths[:MAX_PATHS],
        "bulk_reason": bulk_reason(len(paths), additions + deletions),
    }


def _paths(files: list[bytes]) -> tuple[list[dict[str, Any]], int, int]:
    paths: list[dict[str, Any]] = []
    additions = deletions = at = 0
    while at < len(files):
        added, deleted, path = files[at].removeprefix(b"\n").split(b"\t", 2)
        entry: dict[str, Any] = {"path": text(path, MAX_PATH_CHARS)}
        if not path:
            entry = {"path": text(files[at + 2], MAX_PATH_CHARS), "from": text(files[at + 1], MAX_PATH_CHARS)}
        at += 1 if path else 3
        if added == b"-":
            entry["binary"] = True
        else:
            entry |= {"added": int(added), "deleted": int(deleted)}
            additions += int(added)
            deletions += int(deleted)
        paths.append(entry)
    return paths, additions, deletions


def _explained(failed: ProgramFailed, url: str) -> SourceError:
    said = failed.complaint.lower()
    lines = [line for line in failed.complaint.splitlines() if line.strip()]
    message = f"git could not read {url}: {lines[-1] if lines else f'status {failed.status}'}"
    if any(words in said for words in _REFUSED):
        return SourceRefused(
            message,
            hint="give this user a key that may read it: a git credential helper for https, an ssh agent for ssh",
        )
    if any(words in said for words in _UNUSABLE):
        return SourceError(message, retryable=False, hint="see whether `git ls-remote` can read it")
    return SourceError(message)
