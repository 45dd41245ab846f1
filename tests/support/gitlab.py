"""A stand-in for GitLab, written from its public REST documentation (commits, branches, merge requests).

It answers as that describes: lists in pages with a `Link` to the next one, no
totals, `ref_name` as a revision or a range, merge requests by the time they
were changed. It keeps what it is told, can be told to fail, and can change
between two requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.parts import used

TOKEN = "glpat-of-the-tests"
PROJECT = "group/project"


@dataclass
class GitLab:
    commits: dict[str, dict[str, Any]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    mrs: dict[int, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    # What the next requests are answered with instead; None lets one through.
    orders: list[Response | None] = field(default_factory=list)
    before_request: Callable[[int], None] = lambda count: None

    def __post_init__(self) -> None:
        used("GitLab", "stand-in: written from its public REST documentation")

    def commit(self, message: str, *parents: str, branch: str = "main", day: int = 1) -> str:
        sha = f"{len(self.commits) + 1:040x}"
        when = f"2026-01-{day:02d}T10:00:00.000+02:00"
        self.commits[sha] = {
            "id": sha,
            "parent_ids": list(parents),
            "message": message,
            "title": message.partition("\n")[0],
            "author_name": "Ada",
            "author_email": "ada@example.org",
            "authored_date": when,
            "committer_name": "Ada",
            "committer_email": "ada@example.org",
            "committed_date": when,
            "stats": {"additions": 3, "deletions": 1, "total": 4},
        }
        self.branches[branch] = sha
        return sha

    def mr(self, iid: int, second: int, state: str = "opened", title: str = "A proposal") -> None:
        at = f"2026-02-01T00:{second // 60:02d}:{second % 60:02d}.000Z"
        self.mrs[iid] = {
            "iid": iid,
            "state": state,
            "title": title,
            "description": "Because of the outage.",
            "author": {"username": "ada"},
            "source_branch": "topic",
            "target_branch": "main",
            "merge_commit_sha": None,
            "web_url": f"https://gitlab.example.org/{PROJECT}/-/merge_requests/{iid}",
            "created_at": "2026-02-01T00:00:00.000Z",
            "updated_at": at,
            "merged_at": at if state == "merged" else None,
        }

    def reached(self, sha: str) -> Iterator[str]:
        waiting, seen = [sha], set()
        while waiting:
            found = waiting.pop(0)
            if found not in seen:
                seen.add(found)
                yield found
                waiting += self.commits[found]["parent_ids"]

    def app(self) -> Starlette:
        base = "/api/v4/projects/{project:path}"
        repository = f"{base}/repository"
        return Starlette(
            routes=[
                Route(f"{repository}/branches", self._answering(self._branches)),
                Route(f"{repository}/commits/{{sha}}/diff", self._answering(self._diff)),
                Route(f"{repository}/commits/{{sha}}/refs", self._answering(self._refs)),
                Route(f"{repository}/commits/{{sha}}", self._answering(self._commit)),
                Route(f"{repository}/commits", self._answering(self._commits)),
                Route(f"{base}/merge_requests/{{iid:int}}/diffs", self._answering(self._diff)),
                Route(f"{base}/merge_requests/{{iid:int}}", self._answering(self._mr)),
                Route(f"{base}/merge_requests", self._answering(self._mrs)),
            ]
        )

    def _answering(self, answer: Callable[[Request], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            self.asked.append(str(request.url.path) + "?" + str(request.url.query))
            self.before_request(len(self.asked))
            ordered = self.orders.pop(0) if self.orders else None
            if ordered is not None:
                return ordered
            if request.headers.get("private-token") != TOKEN:
                return JSONResponse({"message": "401 Unauthorized"}, 401)
            if request.path_params["project"] != PROJECT:
                return JSONResponse({"message": "404 Project Not Found"}, 404)
            return answer(request)

        return endpoint

    def _branches(self, request: Request) -> Response:
        rows = [
            {"name": name, "default": name == "main", "commit": {"id": sha}}
            for name, sha in sorted(self.branches.items())
        ]
        return _page(request, rows)

    def _commits(self, request: Request) -> Response:
        left, _, right = request.query_params.get("ref_name", self.branches["main"]).rpartition("..")
        if right not in self.commits or (left and left not in self.commits):
            return JSONResponse({"message": "404 Commit Not Found"}, 404)
        hidden = set(self.reached(left)) if left else set()
        return _page(request, [self.commits[sha] for sha in self.reached(right) if sha not in hidden])

    def _commit(self, request: Request) -> Response:
        found = self.commits.get(request.path_params["sha"])
        return JSONResponse(found or {"message": "404 Commit Not Found"}, 200 if found else 404)

    def _refs(self, request: Request) -> Response:
        sha = request.path_params["sha"]
        on = [name for name, tip in self.branches.items() if sha in set(self.reached(tip))]
        return _page(request, [{"type": "branch", "name": name} for name in on])

    def _diff(self, request: Request) -> Response:
        files = [
            {"old_path": "a.py", "new_path": "a.py", "diff": "@@ -1 +1 @@\n-1\n+2"},
            {"old_path": "b.py", "new_path": "b.py", "new_file": True, "b_mode": "100644", "diff": ""},
        ]
        return _page(request, files)

    def _mr(self, request: Request) -> Response:
        return JSONResponse(self.mrs[request.path_params["iid"]])

    def _mrs(self, request: Request) -> Response:
        since = request.query_params.get("updated_after", "").replace(".000", "")
        rows = sorted(self.mrs.values(), key=lambda mr: (mr["updated_at"], mr["iid"]))
        return _page(request, [mr for mr in rows if mr["updated_at"].replace(".000", "") >= since])


def _page(request: Request, rows: list[dict[str, Any]]) -> Response:
    """A page and the address of the next; totals are left out, as GitLab does for long lists."""
    size, number = int(request.query_params.get("per_page", 20)), int(request.query_params.get("page", 1))
    headers = {}
    if number * size < len(rows):
        following = request.url.include_query_params(page=number + 1)
        headers["Link"] = f'<{following}>; rel="next"'
    return JSONResponse(rows[(number - 1) * size : number * size], headers=headers)
