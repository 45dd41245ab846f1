"""GitLab's REST API, as far as a stand-in can tell: pages, refusals, and a server that changes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engram.kernel.errors import SourceError, SourceRefused
from engram.scm import gitlab
from engram.scm.store import git_key, mr_key
from support.gitlab import PROJECT, TOKEN, GitLab
from support.serving import serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> GitLab:
    monkeypatch.setattr(gitlab, "PER_PAGE", 3)
    return GitLab()


@pytest.fixture
def url(server: GitLab, follower) -> Iterator[str]:
    follower.token = TOKEN
    with serving(server.app()) as base:
        yield f"{base}/{PROJECT}"


def filled(server: GitLab, commits: int = 8, mrs: int = 8) -> str:
    tip = ""
    for n in range(commits):
        tip = server.commit(f"commit {n}", *([tip] if tip else []), day=n + 1)
    for n in range(1, mrs + 1):
        server.mr(n, second=n)
    return tip


async def test_commits_and_merge_requests_page_by_page(follower, server: GitLab, url: str) -> None:
    tip = filled(server)
    side = server.commit("on a side, back-dated", server.commits[tip]["parent_ids"][0], branch="side")
    repo = await follower.add("gitlab", url)
    counts = await follower.sync(repo)

    assert counts.read >= 9 + 8  # the last of a page is the first of the next
    rows = {row["id"]: row for row in follower.facts(repo)}
    assert set(rows) == set(server.commits)
    assert (rows[tip]["additions"], rows[tip]["deletions"], rows[tip]["files"]) == (3, 1, None)
    assert rows[tip]["authored_at"].isoformat() == "2026-01-08T08:00:00+00:00"
    assert follower.mark(git_key(repo.repo_id)) == {"tips": {"main": tip, "side": side}}
    assert [row["id"] for row in follower.facts(repo, "mr")] == list(range(1, 9))
    assert "page=2" in " ".join(server.asked)

    server.asked.clear()
    merge = server.commit("merge", tip, side)
    server.mr(2, second=90, state="merged", title="A proposal, taken")
    again = await follower.sync(repo)
    assert merge in {row["id"] for row in follower.facts(repo)}
    assert follower.facts(repo, "mr")[1]["state"] == "merged"
    assert again.superseded == 0
    assert any(f"{tip}..{merge}" in line for line in server.asked)
    assert follower.facts(repo) == await follower.afresh(repo)
    assert follower.facts(repo, "mr") == await follower.afresh(repo, "mr")


async def test_a_rewound_branch_leaves_marked_commits(follower, server: GitLab, url: str) -> None:
    first = server.commit("first")
    second = server.commit("second", first)
    lost = server.commit("lost", second)
    server.branches["other"] = second
    repo = await follower.add("gitlab", url)
    await follower.sync(repo)
    server.commit("instead", first)
    counts = await follower.sync(repo)
    assert counts.superseded == 1
    gone = follower.asked("SELECT commit_sha FROM scm.git_commits WHERE superseded")
    assert [row["commit_sha"] for row in gone] == [lost]
    assert follower.facts(repo) == await follower.afresh(repo)


async def test_a_list_that_changes_while_it_is_read_loses_nothing(follower, server: GitLab, url: str) -> None:
    filled(server, commits=1, mrs=10)
    repo = await follower.add("gitlab", url)

    def touched(count: int) -> None:
        # After each page somebody touches the oldest ones, and they move to the end.
        if count in (4, 5):
            server.mr(count - 3, second=60 + count)

    server.before_request = touched
    await follower.sync(repo)
    server.before_request = lambda count: None
    assert [row["id"] for row in follower.facts(repo, "mr")] == list(range(1, 11))
    assert follower.facts(repo, "mr") == await follower.afresh(repo, "mr")


async def test_what_gitlab_shows_late_is_found_by_the_overlap(follower, server: GitLab, url: str) -> None:
    filled(server, commits=1, mrs=2)
    server.mr(9, second=100)
    repo = await follower.add("gitlab", url)
    await follower.sync(repo)
    server.mr(2, second=50, state="merged")
    await follower.sync(repo)
    assert follower.facts(repo, "mr") == await follower.afresh(repo, "mr")


async def test_many_of_one_moment_are_all_read(follower, server: GitLab, url: str) -> None:
    server.commit("one")
    for n in range(1, 9):
        server.mr(n, second=7)
    repo = await follower.add("gitlab", url)
    await follower.sync(repo)
    assert len(follower.facts(repo, "mr")) == 8


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_token_stops_at_once_and_says_what_to_set(
    follower, server: GitLab, url: str, status: int
) -> None:
    filled(server)
    repo = await follower.add("gitlab", url)
    server.orders += [JSONResponse({}, status)]
    with pytest.raises(SourceRefused, match="GITLAB_TOKEN"):
        await follower.sync(repo)
    assert len(server.asked) == 1
    assert follower.mark(git_key(repo.repo_id)) is None


async def test_a_project_that_is_not_there_stops_at_once(follower, server: GitLab, url: str) -> None:
    repo = await follower.add("gitlab", url + "-gone")
    with pytest.raises(SourceError, match="404") as stopped:
        await follower.sync(repo)
    assert not stopped.value.retryable
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "failure",
    [
        Response(status_code=500),
        Response(status_code=429, headers={"Retry-After": "0"}),
        PlainTextResponse("<html>", 502),
    ],
    ids=["500", "429", "502"],
)
async def test_a_failure_that_passes_is_tried_again(
    follower, server: GitLab, url: str, failure: Response
) -> None:
    filled(server)
    repo = await follower.add("gitlab", url)
    server.orders += [failure, failure, None, None, failure, failure]
    await follower.sync(repo)
    assert follower.facts(repo) == await follower.afresh(repo)
    assert len(follower.facts(repo)) == 8


async def test_three_failures_stop_and_the_next_sync_goes_on(follower, server: GitLab, url: str) -> None:
    filled(server)
    repo = await follower.add("gitlab", url)
    server.orders += [None, None, *[Response(status_code=500)] * 3]
    with pytest.raises(SourceError, match="500"):
        await follower.sync(repo)
    assert len(server.asked) == 5
    assert follower.mark(git_key(repo.repo_id)) is None
    await follower.sync(repo)
    assert follower.mark(mr_key(repo.repo_id)) == {"updated_after": "2026-02-01T00:00:08+00:00"}
    assert follower.facts(repo) == await follower.afresh(repo)


async def test_a_long_wait_is_left_to_the_next_sync(follower, server: GitLab, url: str) -> None:
    repo = await follower.add("gitlab", url)
    server.orders += [Response(status_code=429, headers={"Retry-After": "3600"})]
    with pytest.raises(SourceError, match="429"):
        await follower.sync(repo)
    assert len(server.asked) == 1


@pytest.mark.parametrize("nonsense", [{}, [1], [{}], [{"name": "x", "commit": None}], "text"])
async def test_an_answer_of_another_shape_stops(follower, server: GitLab, url: str, nonsense: object) -> None:
    repo = await follower.add("gitlab", url)
    server.orders += [JSONResponse(nonsense)]
    with pytest.raises(SourceError, match="GitLab answered something"):
        await follower.sync(repo)


async def test_the_token_is_not_sent_elsewhere(follower, server: GitLab, url: str) -> None:
    filled(server)
    repo = await follower.add("gitlab", url)
    server.orders += [JSONResponse([], headers={"Link": '<http://elsewhere.example/api?page=2>; rel="next"'})]
    with pytest.raises(SourceError, match="elsewhere"):
        await follower.sync(repo)


async def test_diffs_become_patches(follower, server: GitLab, url: str) -> None:
    server.commit("one")
    server.mr(1, second=1, state="merged")
    server.mr(2, second=2)
    repo = await follower.add("gitlab", url)
    await follower.sync(repo)
    kept = await follower.materialize(repo)
    assert (kept.diffs, kept.missing) == (2, 0)
    rows = follower.asked("SELECT source_type, source_id, artifact_key FROM scm.patch_blobs ORDER BY 1")
    assert [(row["source_type"], row["source_id"]) for row in rows] == [("git", f"{1:040x}"), ("mr", "1")]
    with follower.artifacts.open(rows[0]["artifact_key"]) as reader:
        text = reader.read().decode()
    assert text.startswith("diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n")
    assert "new file mode 100644" in text
    # GitLab lists no paths; they come with the patch, and a later sync does not lose them.
    seen = follower.asked("SELECT max(changed_seq) AS last FROM scm.git_commits")
    follower.asked("DELETE FROM logbook.kv WHERE namespace = 'scm.sync'")
    assert (await follower.sync(repo)).read == 3
    paths = [{"path": "a.py"}, {"path": "b.py"}]
    for table in ("git_commits", "mrs"):
        (row, *_) = follower.asked(f"SELECT files, paths_json FROM scm.{table} ORDER BY files")
        assert row == {"files": 2, "paths_json": paths}
    assert follower.asked("SELECT max(changed_seq) AS last FROM scm.git_commits") == seen
