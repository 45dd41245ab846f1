"""git, read from real repositories: after anything that can happen, the rows are those of a clean full sync."""

from __future__ import annotations

import shutil
from datetime import datetime

import pytest

from engram.kernel.errors import SourceError, StateConflict
from engram.scm import git, store
from engram.scm.source import Move, Page
from engram.scm.store import Counts, git_key, progress_key
from engram.scm.sync import Syncing
from support.gitrepo import GitRepo

pytestmark = pytest.mark.anyio


async def test_commits_of_every_shape(follower, origin: GitRepo) -> None:
    """Dates of 1970 and 2099, broken encodings, binary files, renames, odd names, merges of many."""
    first = origin.commit("first\n\nbecause", {"a.txt": "1\n2\n", "dir/b": "x\n"}, date=1)
    origin.commit("a name\tof tabs", {"tab\there\t": "1\n", "line\nbreak": "1\n", "\udcff\udcfe": "1\n"})
    renamed = origin.commit("rename", {"a.txt": None, "c.txt": "1\n2\n"}, date=4_070_908_800)
    broken = origin.commit(b"caf\xe9 \xff\xfe", {"bin": bytes(range(256))}, author=b"J\xf6rg <j@x>", date=0)
    empty = origin.commit("empty")
    sides = [
        origin.commit(f"side {n}", {f"s{n}": "1\n"}, ref=f"refs/heads/s{n}", parents=[first])
        for n in range(3)
    ]
    octopus = origin.commit("octopus", parents=[empty, *sides])
    link = "0123456789abcdef0123456789abcdef01234567"
    submodule = origin.commit("submodule", more=b"M 160000 %s vendored\n" % link.encode())
    lonely = origin.commit("an orphan", {"z": "1\n"}, ref="refs/heads/orphan", parents=[])

    repo = await follower.add("git", origin.url)
    counts = await follower.sync(repo)

    rows = {row["id"]: row for row in follower.facts(repo)}
    assert set(rows) == origin.reachable()
    assert (counts.read, counts.written) == (len(rows), len(rows))
    assert rows[first]["paths_json"] == [
        {"path": "a.txt", "added": 2, "deleted": 0},
        {"path": "dir/b", "added": 1, "deleted": 0},
    ]
    assert rows[first]["message"] == "first\n\nbecause"
    assert rows[first]["authored_at"] == datetime.fromisoformat("1970-01-01T00:00:01Z")
    assert rows[renamed]["authored_at"].year == 2099
    assert rows[renamed]["paths_json"] == [{"path": "c.txt", "from": "a.txt", "added": 0, "deleted": 0}]
    odd = next(row for row in rows.values() if row["message"] == "a name\tof tabs")
    assert {path["path"] for path in odd["paths_json"]} == {"tab\there\t", "line\nbreak", "\ufffd\ufffd"}
    assert rows[broken]["message"] == "caf\ufffd \ufffd\ufffd"
    assert rows[broken]["author_name"] == "J\ufffdrg"
    assert rows[broken]["paths_json"] == [{"path": "bin", "binary": True}]
    assert (rows[empty]["files"], rows[empty]["additions"]) == (0, 0)
    assert rows[octopus]["parents"] == [empty, *sides]
    assert rows[submodule]["paths_json"] == [{"path": "vendored", "added": 1, "deleted": 0}]
    assert rows[lonely]["parents"] == []
    assert follower.mark(git_key(repo.repo_id))["tips"]["refs/heads/orphan"] == lonely
    assert follower.mark(progress_key(repo.repo_id)) is None


async def test_only_what_is_new_is_read_whatever_its_date(
    follower, origin: GitRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.commit("recent", {"a": "1"}, date=1_800_000_000)
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)
    with monkeypatch.context() as inside_a_hook:
        inside_a_hook.setenv("GIT_DIR", "/nowhere")
        assert (await follower.sync(repo)).read == 0

    side = origin.commit("back-dated", {"b": "1"}, ref="refs/heads/side", parents=[], date=1)
    origin.commit("merge", parents=[origin.tip("refs/heads/main"), side], date=2)
    assert (await follower.sync(repo)).read == 2
    assert follower.facts(repo) == await follower.afresh(repo)


async def test_a_force_push_leaves_marked_commits_that_may_come_back(follower, origin: GitRepo) -> None:
    base = origin.commit("base", {"a": "1"})
    lost = origin.commit("lost", {"a": "2"})
    shared = origin.commit("kept by a branch", {"a": "3"}, ref="refs/heads/keep", parents=[base])
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)

    origin.commit("instead", {"a": "4"}, parents=[base])
    origin.move("refs/heads/keep", None)
    origin.move("refs/tags/v1", shared)
    counts = await follower.sync(repo)

    assert (counts.read, counts.superseded) == (1, 1)
    assert superseded(follower) == [lost]
    assert follower.facts(repo) == await follower.afresh(repo)

    origin.move("refs/heads/again", lost)
    await follower.sync(repo)
    assert superseded(follower) == []
    assert follower.facts(repo) == await follower.afresh(repo)


async def test_a_lost_mirror_is_read_again_and_what_is_gone_is_superseded(follower, origin: GitRepo) -> None:
    base = origin.commit("base", {"a": "1"})
    lost = origin.commit("lost", {"a": "2"})
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)

    origin.commit("instead", {"a": "3"}, parents=[base])
    shutil.rmtree(follower.folder / "scm" / f"{repo.repo_id}.git")
    origin.run("-c", "gc.reflogExpire=now", "gc", "--prune=now", "--quiet")
    await follower.sync(repo)

    assert superseded(follower) == [lost]
    assert follower.facts(repo) == await follower.afresh(repo)


async def test_a_broken_pass_goes_on_where_it_was_though_the_refs_have_moved(
    follower, origin: GitRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git, "PAGE", 2)
    for n in range(7):
        origin.commit(f"commit {n}", {"a": str(n)})
    repo = await follower.add("git", origin.url)
    stop = Stop(after=2)
    with pytest.raises(SourceError, match="enough"):
        async with follower.source(repo) as source:
            await Syncing(follower.db, 60, on_page=stop).run_once(repo, source)
    assert len(follower.facts(repo)) == 4
    assert follower.mark(git_key(repo.repo_id)) is None
    assert follower.mark(progress_key(repo.repo_id))["done"] == 4

    origin.commit("moved on", {"a": "new"})
    counts = await follower.sync(repo)
    assert counts.read == 3 + 1
    assert len(follower.facts(repo)) == 8
    assert follower.facts(repo) == await follower.afresh(repo)


async def test_one_sync_at_a_time_and_a_stale_holder_writes_nothing(follower, origin: GitRepo) -> None:
    origin.commit("one", {"a": "1"})
    repo = await follower.add("git", origin.url)
    held = await follower.db.run(store.acquire(repo.repo_id, "somebody", 60, "strict"))
    with pytest.raises(StateConflict, match="another process"):
        await follower.sync(repo)

    follower.asked("UPDATE scm.repos SET locked_at = locked_at - interval '61 seconds'")
    page = store.put_page(held, Page("commits", pass_is_over=True))
    assert not (await follower.db.run(page)).let_in, "its lease is over"
    successor = await follower.db.run(store.acquire(repo.repo_id, "somebody else", 60, "strict"))
    assert not (await follower.db.run(page)).let_in, "it is not its own any more"
    assert not await follower.db.run(store.renew(held))
    assert not await follower.db.run(store.release(held, Counts(), None))
    assert await follower.db.run(store.release(successor, Counts(), None))
    await follower.sync(repo)
    runs = follower.asked("SELECT status FROM scm.sync_runs ORDER BY run_id")
    assert [run["status"] for run in runs] == ["abandoned", "done", "done"]


async def test_a_watermark_that_somebody_moved_lets_nothing_in(follower, origin: GitRepo) -> None:
    origin.commit("one", {"a": "1"})
    repo = await follower.add("git", origin.url)
    held = await follower.db.run(store.acquire(repo.repo_id, "me", 60, "strict"))
    key = git_key(repo.repo_id)

    def page(expected: object, value: object) -> Page:
        return Page("commits", [_row("a" * 40)], move=Move(key, expected, value))

    assert not (await follower.db.run(store.put_page(held, page({"tips": {}}, {"tips": {"x": "1"}})))).let_in
    assert (await follower.db.run(store.put_page(held, page(None, {"tips": {}})))).let_in
    assert not (await follower.db.run(store.put_page(held, page(None, {"tips": {"x": "1"}})))).let_in
    assert follower.mark(key) == {"tips": {}}


async def test_a_repository_that_is_gone_stops_and_the_watermark_stays(follower, origin: GitRepo) -> None:
    origin.commit("one", {"a": "1"})
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)
    before = follower.mark(git_key(repo.repo_id))
    shutil.rmtree(origin.folder)
    with pytest.raises(SourceError, match="could not read"):
        await follower.sync(repo)
    assert follower.mark(git_key(repo.repo_id)) == before
    last = follower.asked("SELECT status, error FROM scm.sync_runs ORDER BY run_id DESC LIMIT 1")[0]
    assert last["status"] == "failed"
    assert "could not read" in last["error"]


async def test_an_empty_repository_and_one_that_was_emptied(follower, origin: GitRepo) -> None:
    repo = await follower.add("git", origin.url)
    assert (await follower.sync(repo)).read == 0
    origin.commit("one", {"a": "1"})
    assert (await follower.sync(repo)).read == 1
    origin.move("refs/heads/main", None)
    assert (await follower.sync(repo)).superseded == 1
    assert follower.facts(repo) == []


class Stop:
    """Breaks a sync off after so many pages."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, counts: Counts) -> None:
        self.left -= 1
        if not self.left:
            raise SourceError("enough", retryable=False)


def superseded(follower) -> list[str]:
    found = follower.asked(
        "SELECT commit_sha FROM scm.git_commits WHERE superseded AND repo_id = 1 ORDER BY 1"
    )
    return [row["commit_sha"] for row in found]


def _row(sha: str) -> dict[str, object]:
    said = dict.fromkeys(("author_name", "author_email", "committer_name", "committer_email", "message"), "x")
    return {"commit_sha": sha, "parents": [], "paths": [], **said}
