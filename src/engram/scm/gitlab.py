"""GitLab's REST API, read-only; the only module that speaks it.

*Commits.* The watermark is the tip of each branch. What is new on a branch is
asked for as a range of two commits, which no push can change while its pages
are read. A branch that was rewound leaves commits behind; those that no branch
has any more are superseded.

*Merge requests* come by the time they were changed. Each page asks for what was
changed since the last one of the page before, instead of for a page number: one
that is changed meanwhile moves to the end and pushes none past us. The first
page overlaps with the last sync, because GitLab's clock gives the time before it
shows the change. Totals are never asked for; GitLab leaves them out when they
are large.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2

from engram.kernel.content import storable
from engram.kernel.errors import SourceError, SourceRefused
from engram.scm.source import (
    LATEST_SECOND,
    MAX_NAME_CHARS,
    Facts,
    Marks,
    Move,
    Page,
    bulk_reason,
    text,
)
from engram.scm.store import Repo, git_key, mr_key
from engram.scm.tries import Tries, three_tries

T = TypeVar("T")

PER_PAGE = 100
OVERLAP = timedelta(minutes=5)
MAX_ANSWER_BYTES = 64 << 20
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class GitLabSource:
    def __init__(
        self,
        repo: Repo,
        *,
        token: str | None,
        silent_seconds: float,
        tries: Tries,
    ) -> None:
        self._repo = repo
        self._tries = tries
        parts = urlsplit(repo.url)
        path = parts.path.strip("/").removesuffix(".git")
        self._http = httpx2.AsyncClient(
            base_url=f"{parts.scheme}://{parts.netloc}/api/v4/projects/{quote(path, safe='')}/",
            headers={"PRIVATE-TOKEN": token} if token else {},
            timeout=silent_seconds,
            # A proxy from the environment must never see traffic to this machine.
            trust_env=parts.hostname not in _LOOPBACK,
        )

    async def pages(self, marks: Marks) -> AsyncGenerator[Page, None]:
        async for page in self._commit_pages(marks):
            yield page
        async for page in self._mr_pages(marks):
            yield page

    async def close(self) -> None:
        await self._http.aclose()

    async def again(self, source_type: str, source_id: str) -> Facts:
        try:
            if source_type == "mr":
                return _read(_mr, [await self._get(f"merge_requests/{int(source_id)}")])
            return _read(_commit, [await self._get(f"repository/commits/{source_id}", stats="true")])
        except _Gone:
            return []

    async def patch(self, source_type: str, source_id: str) -> AsyncGenerator[bytes, None]:
        where = f"merge_requests/{int(source_id)}/diffs"
        if source_type == "git":
            where = f"repository/commits/{source_id}/diff"
        async for files in self._listed(where):
            for file in files:
                yield _diff(file)

    async def _commit_pages(self, marks: Marks) -> AsyncGenerator[Page, None]:
        key = git_key(self._repo.repo_id)
        mark: dict[str, Any] | None = marks.at(key)
        now = {name: sha async for name, sha in self._branches()}
        for branch in [*now, *(gone for gone in (mark or {}).get("tips", {}) if gone not in now)]:
            tips: dict[str, str] = (mark or {}).get("tips", {})
            old, new = tips.get(branch), now.get(branch)
            if old == new:
                continue
            if new:
                async for rows in self._commits_between(old or _any_of(tips), new):
                    yield Page("commits", rows, pass_number=marks.run_id)
            moved = {"tips": {name: sha for name, sha in {**tips, branch: new}.items() if sha}}
            left = [sha async for sha in self._left_behind(old, new)] if old else []
            yield Page("commits", move=Move(key, mark, moved), pass_number=marks.run_id, superseded=left)
            mark = moved

    async def _branches(self) -> AsyncGenerator[tuple[str, str], None]:
        """The default branch first: what the others have in common with it is then read once."""
        found: list[tuple[bool, str, str]] = []
        async for page in self._listed("repository/branches"):
            found += _read(_branch, page)
        for _, name, sha in sorted(found):
            yield name, sha

    async def _commits_between(self, old: str | None, new: str) -> AsyncGenerator[Facts, None]:
        asked = {"ref_name": f"{old}..{new}" if old else new, "with_stats": "true", "order": "topo"}
        try:
            async for page in self._listed("repository/commits", **asked):
                yield _read(_commit, page)
        except _Gone:
            # GitLab has forgotten the old tip.
            async for page in self._listed("repository/commits", **{**asked, "ref_name": new}):
                yield _read(_commit, page)

    async def _left_behind(self, old: str, new: str | None) -> AsyncGenerator[str, None]:
        try:
            asked = f"{new}..{old}" if new else old
            async for page in self._listed("repository/commits", ref_name=asked):
                for sha in _read(_id, page):
                    if not await self._on_a_branch(sha):
                        yield sha
                    elif not new:
                        return
        except _Gone:
            return

    async def _on_a_branch(self, sha: str) -> bool:
        async for page in self._listed(f"repository/commits/{sha}/refs", type="branch"):
            return bool(page)
        return False

    async def _mr_pages(self, marks: Marks) -> AsyncGenerator[Page, None]:
        key = mr_key(self._repo.repo_id)
        mark: dict[str, Any] | None = marks.at(key)
        since = None if mark is None else datetime.fromisoformat(mark["updated_after"]) - OVERLAP
        page_number = 1
        while True:
            found = await self._changed_since(since, page_number)
            reached = max(_read(_changed, found), default=None)
            if reached is not None:
                old = mark and datetime.fromisoformat(mark["updated_after"])
                moved = {"updated_after": max(reached, old or reached).isoformat()}
                yield Page("mrs", _read(_mr, found), move=Move(key, mark, moved))
                mark = moved
            if len(found) < PER_PAGE:
                return
            # A whole page of one moment: only then is there nothing but its number to go on by.
            page_number = page_number + 1 if reached == since else 1
            since = reached

    async def _changed_since(self, since: datetime | None, page_number: int) -> Facts:
        asked = {
            "state": "all",
            "scope": "all",
            "order_by": "updated_at",
            "sort": "asc",
            "per_page": str(PER_PAGE),
            "page": str(page_number),
        }
        if since is not None:
            asked["updated_after"] = since.isoformat().replace("+00:00", "Z")
        found = await self._get("merge_requests", **asked)
        return _list(found)

    async def _listed(self, where: str, **asked: str) -> AsyncGenerator[Facts, None]:
        """Page after page of a list that does not change, by keyset where GitLab has it."""
        asked = {**asked, "per_page": str(PER_PAGE), "pagination": "keyset"}
        answer = await self._asked(where, asked)
        while True:
            yield _list(_object(answer))
            following = answer.links.get("next", {}).get("url")
            if following is None:
                return
            answer = await self._asked(self._ours(following), None)

    def _ours(self, url: str) -> str:
        """The token goes to the server we were told of, and to no other."""
        base = self._http.base_url
        found = httpx2.URL(url)
        if (found.scheme, found.host, found.port) != (base.scheme, base.host, base.port):
            raise SourceError(f"GitLab's next page is elsewhere: {found.host}", retryable=False)
        return url

    async def _get(self, where: str, **asked: str) -> Any:
        return _object(await self._asked(where, asked))

    async def _asked(self, where: str, asked: Mapping[str, str] | None) -> httpx2.Response:
        return await three_tries(lambda: self._sent(where, asked), self._tries)

    async def _sent(self, where: str, asked: Mapping[str, str] | None) -> httpx2.Response:
        try:
            answer = await self._http.get(where, params=asked)
        except httpx2.HTTPError as error:
            raise SourceError(f"GitLab does not answer: {str(error) or type(error).__name__}") from error
        if answer.status_code != 200:
            raise self._refusal(where, answer)
        return answer

    def _refusal(self, where: str, answer: httpx2.Response) -> SourceError:
        said = f"GitLab answered {answer.status_code} for {where.partition('?')[0]}"
        status = answer.status_code
        if status in (401, 403):
            return SourceRefused(said, hint="set GITLAB_TOKEN to a token with the scope read_api")
        if status == 404:
            return _Gone(said, retryable=False, hint="is it the project's address, and may the token see it?")
        if status == 429 or status >= 500:
            return SourceError(said, retry_after=_retry_after(answer.headers))
        return SourceError(f"{said}: {storable(answer.text[:200])}", retryable=False)


class _Gone(SourceError):
    """404: not there, or not for this token."""


def _any_of(tips: Mapping[str, str]) -> str | None:
    return next(iter(tips.values()), None)


def _read(make: Callable[[Mapping[str, Any]], T], given: Facts) -> list[T]:
    try:
        return [make(each) for each in given]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"GitLab answered something of another shape: {error!r:.100}") from error


def _list(found: Any) -> Facts:
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise SourceError("GitLab answered something else than a list")
    return found


def _object(answer: httpx2.Response) -> Any:
    if len(answer.content) > MAX_ANSWER_BYTES:
        raise SourceError(f"GitLab answered with more than {MAX_ANSWER_BYTES} bytes", retryable=False)
    try:
        return json.loads(answer.content)
    except ValueError as error:
        raise SourceError("GitLab answered something that is no JSON") from error


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None


def _commit(given: Mapping[str, Any]) -> dict[str, Any]:
    stats = given.get("stats") or {}
    additions, deletions = stats.get("additions"), stats.get("deletions")
    return {
        "commit_sha": given["id"],
        "parents": list(given.get("parent_ids") or []),
        "author_name": text(given.get("author_name"), MAX_NAME_CHARS),
        "author_email": text(given.get("author_email"), MAX_NAME_CHARS),
        "authored": _second(given.get("authored_date")),
        "committer_name": text(given.get("committer_name"), MAX_NAME_CHARS),
        "committer_email": text(given.get("committer_email"), MAX_NAME_CHARS),
        "committed": _second(given.get("committed_date")),
        "message": text(given.get("message") or given.get("title")).rstrip("\n"),
        "files": None,
        "additions": additions,
        "deletions": deletions,
        "paths": [],
        "bulk_reason": bulk_reason(None, (additions or 0) + (deletions or 0)),
    }


def _mr(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mr_iid": given["iid"],
        "state": text(given.get("state"), MAX_NAME_CHARS),
        "title": text(given.get("title"), MAX_NAME_CHARS),
        "description": text(given.get("description")),
        "author_name": text((given.get("author") or {}).get("username"), MAX_NAME_CHARS),
        "source_branch": text(given.get("source_branch"), MAX_NAME_CHARS),
        "target_branch": text(given.get("target_branch"), MAX_NAME_CHARS),
        "merge_commit_sha": given.get("merge_commit_sha") or given.get("squash_commit_sha"),
        "web_url": text(given.get("web_url"), MAX_NAME_CHARS),
        "created_at": given.get("created_at"),
        "updated_at": given.get("updated_at"),
        "merged_at": given.get("merged_at"),
    }


def _changed(given: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(given["updated_at"]).astimezone(UTC)


def _branch(given: Mapping[str, Any]) -> tuple[bool, str, str]:
    return not given.get("default"), str(given["name"]), str(given["commit"]["id"])


def _id(given: Mapping[str, Any]) -> str:
    return str(given["id"])


def _second(said: str | None) -> float | None:
    try:
        return min(max(datetime.fromisoformat(said or "").timestamp(), 0.0), LATEST_SECOND)
    except (ValueError, OverflowError):
        return None


def _diff(file: Mapping[str, Any]) -> bytes:
    old, new = text(file.get("old_path")), text(file.get("new_path"))
    head = [f"diff --git a/{old} b/{new}"]
    if file.get("new_file"):
        head.append(f"new file mode {file.get('b_mode', '100644')}")
    elif file.get("deleted_file"):
        head.append(f"deleted file mode {file.get('a_mode', '100644')}")
    elif file.get("renamed_file"):
        head += [f"rename from {old}", f"rename to {new}"]
    body = file.get("diff") or ""
    if body:
        head += [f"--- {'/dev/null' if file.get('new_file') else f'a/{old}'}",
                 f"+++ {'/dev/null' if file.get('deleted_file') else f'b/{new}'}"]  # fmt: skip
    end = "" if not body or body.endswith("\n") else "\n"
    return ("\n".join(head) + f"\n{body}{end}").encode("utf-8", "replace")
