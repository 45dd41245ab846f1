"""SIGKILL at every failpoint of a sync and of its consumer; then the rows are those of a clean full sync."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from engram.kernel.errors import StateConflict
from engram.kernel.failpoints import FAILPOINTS
from engram.kernel.settings import Settings
from engram.logbook import governance
from engram.logbook.config import Config
from engram.scm.store import git_key, progress_key, svn_key
from support.backend import Backend
from support.gitrepo import GitRepo
from support.processes import environment, eventually, run_engram, started
from support.subversion import SvnRepo

pytestmark = [pytest.mark.anyio, pytest.mark.crash]

COMMITS = 1_100
REVISIONS = 550
OF_SYNC = [name for name in FAILPOINTS if name.startswith(("git.", "sync."))]
OF_CONSUMER = [name for name in FAILPOINTS if name.startswith("scm_consumer.")]


@pytest.fixture
def followed(settings: Settings, follower) -> Settings:
    """The same folders as the follower's, for the command."""
    return replace(settings, data_dir=follower.folder, artifacts_dir=follower.folder / "artifacts")


def engram(settings: Settings, *words: str, failpoint: str = "") -> CompletedProcess[str]:
    more = {"ENGRAM_FAILPOINT": failpoint} if failpoint else {}
    done = run_engram("scm", *words, env=environment(settings, **more))
    assert done.returncode == (-signal.SIGKILL if failpoint else 0), done.stderr
    return done


def an_hour_passes(follower) -> None:
    follower.asked("UPDATE scm.repos SET locked_at = locked_at - interval '1 hour'")


async def test_a_sync_killed_anywhere_is_resumed(follower, followed: Settings, origin: GitRepo) -> None:
    origin.many(COMMITS)
    repo = await follower.add("git", origin.url)
    for name in OF_SYNC:
        engram(followed, "sync", "--no-patches", failpoint=name)
        # Dead, and its lease still holds: nobody else begins.
        with pytest.raises(StateConflict, match="another process"):
            await follower.sync(repo)
        an_hour_passes(follower)
        if name == "sync.after_page":
            assert len(follower.facts(repo)) == 500
            assert follower.mark(git_key(repo.repo_id)) is None
            assert follower.mark(progress_key(repo.repo_id))["done"] == 500
    assert (await follower.sync(repo)).read == 0, "the last crash was after the watermark"
    assert len(follower.facts(repo)) == COMMITS
    assert follower.facts(repo) == await follower.afresh(repo)
    ends = [row["status"] for row in follower.asked("SELECT status FROM scm.sync_runs WHERE repo_id = 1")]
    assert ends == ["abandoned", "abandoned", "abandoned", "done"]


async def test_a_sync_of_subversion_killed_between_pages_is_resumed(
    follower, followed: Settings, tmp_path: Path
) -> None:
    origin = SvnRepo(tmp_path / "svn")
    origin.many(REVISIONS)
    repo = await follower.add("svn", origin.url)
    engram(followed, "sync", "--no-patches", failpoint="sync.after_page")
    assert follower.mark(svn_key(repo.repo_id)) == {"last_rev": 500}
    an_hour_passes(follower)
    assert (await follower.sync(repo)).read == 50
    assert follower.facts(repo, "svn") == await follower.afresh(repo, "svn")


async def test_patches_and_cards_survive_kills_and_exist_once(
    follower, followed: Settings, origin: GitRepo, backend: Backend, config: Config
) -> None:
    governance.update_settings("default", True, None, "ada", config)
    for n in range(4):
        origin.commit(f"Reason {n}, because of {n}", {f"src/f{n}": "1\n"})
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)
    engram(followed, "materialize", failpoint="patches.after_bytes")
    await follower.materialize(repo)
    assert len({row["uri"] for row in follower.asked("SELECT uri FROM scm.patch_blobs")} - {""}) == 4

    for name in OF_CONSUMER:
        engram(followed, "consume", failpoint=f"{name}:2")
    follower.asked("UPDATE logbook.memories SET intent_at = intent_at - interval '1 hour'")
    engram(followed, "consume")
    cards = backend.contents()
    assert len(cards) == len(set(cards)) == 4
    assert all("memory://patch_blobs/git/" in card for card in cards)
    candidates = follower.asked("SELECT source_ref FROM analysis.knowledge_candidates")
    assert len(candidates) == len({row["source_ref"] for row in candidates}) == 4
    cursor = follower.asked("SELECT value_json FROM logbook.kv WHERE key = %s", f"scm_consume:{repo.repo_id}")
    last = follower.asked("SELECT max(changed_seq) AS seq FROM scm.git_commits")[0]["seq"]
    assert cursor == [{"value_json": {"changed_seq": last}}]


async def test_a_loop_goes_on_until_it_is_told_to_stop(
    follower, followed: Settings, origin: GitRepo, tmp_path: Path
) -> None:
    origin.commit("one", {"a": "1\n"})
    repo = await follower.add("git", origin.url)
    # One that cannot be read holds up no other.
    await follower.add("git", str(tmp_path / "nowhere"))
    env = environment(replace(followed, scm_poll_seconds=0.05))
    with started("scm", "sync", "--loop", env=env, log=tmp_path / "loop.log") as loop:
        eventually(lambda: len(follower.facts(repo)) == 1, "the first commit")
        origin.commit("two", {"a": "2\n"})
        eventually(lambda: len(follower.facts(repo)) == 2, "the second commit")
        loop.send_signal(signal.SIGTERM)
        assert loop.wait(20) == 0, (tmp_path / "loop.log").read_text()
    held = follower.asked("SELECT repo_id FROM scm.repos WHERE locked_by IS NOT NULL")
    assert held == []
