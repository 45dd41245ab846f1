"""The failures that document 003 lists: time-outs, refused credentials, rows that cannot be written, diffs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from engram.kernel.errors import ConstraintViolated, SourceError, SourceRefused
from engram.scm.git import GitSource
from engram.scm.source import Marks
from engram.scm.store import Repo, git_key
from engram.scm.svn import SvnSource
from engram.scm.tries import Tries
from engram.web.sockets import free_port
from support.gitrepo import GitRepo
from support.processes import eventually
from support.serving import serving
from support.subversion import SvnRepo

pytestmark = pytest.mark.anyio


@contextmanager
def silent_server() -> Iterator[tuple[int, list[socket.socket]]]:
    """Takes connections and never says a word; who came is in the list."""
    came: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                try:
                    came.append(server.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield server.getsockname()[1], came
        finally:
            over.set()
            thread.join()
            for connection in came:
                connection.close()


async def read(source: GitSource | SvnSource) -> None:
    async for _ in source.pages(Marks(1, {})):
        pass


@pytest.mark.parametrize("kind", ["git", "svn"])
async def test_silence_is_three_tries_then_stop(tmp_path: Path, kind: str) -> None:
    tries = Tries(pause_ms=(1, 1))
    with silent_server() as (port, came):
        repo = Repo(1, "p", kind, f"{kind}://127.0.0.1:{port}/x")
        source = (
            GitSource(repo, tmp_path, silent_seconds=0.3, tries=tries)
            if kind == "git"
            else SvnSource(repo, silent_seconds=0.3, tries=tries)
        )
        with pytest.raises(SourceError, match=r"said nothing for 0\.3 s") as stopped:
            await read(source)
        assert stopped.value.retryable
        eventually(lambda: len(came) >= 3, "three connections", 5)
        assert len(came) == 3


@pytest.mark.parametrize("status", [401, 403])
async def test_git_credentials_that_are_refused_stop_at_once(tmp_path: Path, status: int) -> None:
    asked: list[str] = []

    async def refuse(request) -> Response:
        asked.append(request.url.path)
        return Response(status_code=status, headers={"WWW-Authenticate": "Basic"} if status == 401 else {})

    with serving(Starlette(routes=[Route("/{any:path}", refuse)])) as url:
        tries = Tries(pause_ms=(1, 1))
        source = GitSource(Repo(1, "p", "git", f"{url}/x.git"), tmp_path, silent_seconds=20, tries=tries)
        with pytest.raises(SourceRefused, match="credential helper"):
            await read(source)
    assert tries.failed == 1


async def test_svn_credentials_that_are_refused_stop_at_once(tmp_path: Path) -> None:
    origin = SvnRepo(tmp_path / "svn")
    (origin.folder / "conf" / "svnserve.conf").write_text(
        "[general]\nanon-access = none\nauth-access = read\npassword-db = passwd\n"
    )
    port = free_port()
    words = ["svnserve", "--daemon", "--foreground", "--listen-host", "127.0.0.1"]
    server = subprocess.Popen([*words, "--listen-port", str(port), "--root", str(tmp_path)])
    try:
        eventually(lambda: _listens(port), "svnserve", 20)
        tries = Tries(pause_ms=(1, 1))
        url = f"svn://127.0.0.1:{port}/svn"
        with pytest.raises(SourceRefused, match="svn info"):
            await read(SvnSource(Repo(1, "p", "svn", url), silent_seconds=20, tries=tries))
        assert tries.failed == 1
    finally:
        server.kill()
        server.wait()


REFUSE = "ALTER TABLE scm.git_commits ADD CONSTRAINT not_this CHECK (message <> 'poison' OR commit_sha = '') NOT VALID"


async def test_a_row_that_cannot_be_written_stops_a_strict_sync(follower, origin: GitRepo) -> None:
    origin.commit("good", {"a": "1"})
    origin.commit("poison", {"a": "2"})
    follower.asked(REFUSE)
    repo = await follower.add("git", origin.url)
    with pytest.raises(ConstraintViolated):
        await follower.sync(repo)
    assert follower.facts(repo) == []
    assert follower.mark(git_key(repo.repo_id)) is None
    follower.asked("ALTER TABLE scm.git_commits DROP CONSTRAINT not_this")
    await follower.sync(repo)
    assert len(follower.facts(repo)) == 2


async def test_best_effort_skips_it_notes_it_and_tries_it_again(follower, origin: GitRepo) -> None:
    for n in range(5):
        origin.commit(f"good {n}", {"a": str(n)})
    poison = origin.commit("poison", {"a": "x"})
    origin.commit("good too", {"a": "y"})
    follower.asked(REFUSE)
    repo = await follower.add("git", origin.url)

    counts = await follower.sync(repo, "best_effort")
    assert (counts.read, counts.written, counts.skipped) == (7, 6, 1)
    assert follower.mark(git_key(repo.repo_id)) is not None
    again = await follower.sync(repo, "best_effort")
    assert (again.read, again.written, again.skipped) == (1, 0, 1)
    events = follower.asked("SELECT target_space, payload_json FROM logbook.events")
    assert [(e["target_space"], e["payload_json"]["source_id"]) for e in events] == [("team:default", poison)]
    noted = follower.asked("SELECT source_id, tries FROM scm.skipped")
    assert noted == [{"source_id": poison, "tries": 2}]

    follower.asked("ALTER TABLE scm.git_commits DROP CONSTRAINT not_this")
    shutil.rmtree(follower.folder / "scm" / f"{repo.repo_id}.git")
    mended = await follower.sync(repo)
    assert (mended.written, mended.skipped) == (1, 0)
    assert follower.asked("SELECT * FROM scm.skipped") == []
    assert follower.facts(repo) == await follower.afresh(repo)


async def test_a_diff_that_cannot_be_had_leaves_an_empty_uri_and_comes_later(
    follower, origin: GitRepo
) -> None:
    first = origin.commit("one", {"a": "1\n"})
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)
    mirror = follower.folder / "scm" / f"{repo.repo_id}.git"
    mirror.rename(mirror.with_suffix(".away"))
    kept = await follower.materialize(repo)
    assert (kept.diffs, kept.missing) == (0, 1)
    row = follower.asked("SELECT uri, form, attempts, last_error FROM scm.patch_blobs")[0]
    assert (row["uri"], row["form"], row["attempts"]) == ("", "missing", 1)
    assert "could not read" in row["last_error"]

    mirror.with_suffix(".away").rename(mirror)
    assert (await follower.materialize(repo)).diffs == 1
    row = follower.asked("SELECT source_id, uri, form, attempts FROM scm.patch_blobs")[0]
    assert (row["source_id"], row["form"], row["attempts"]) == (first, "diff", 2)
    assert row["uri"].startswith(f"memory://patch_blobs/git/{repo.repo_id}:{first}/")
    assert (await follower.materialize(repo)).done == 0


async def test_patches_of_every_shape(follower, origin: GitRepo) -> None:
    """Binary, empty, renamed, merged, 50 MB, and a file of bytes that are no text."""
    origin.commit("text", {"a": "1\n"})
    origin.commit("binary", {"b": bytes(range(256)) * 4})
    origin.commit("latin-1", {"c": b"caf\xe9\n"})
    empty = origin.commit("empty")
    huge = origin.commit("huge", {"big": (b"x" * ((1 << 20) - 1) + b"\n") * 50})
    many = origin.commit("bulk", {f"f{n}": "1" for n in range(301)})
    origin.commit(
        "merge", parents=[many, origin.commit("side", {"s": "1"}, ref="refs/heads/s", parents=[empty])]
    )
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)
    kept = await follower.materialize(repo)

    assert (kept.diffs, kept.diffstats, kept.empty, kept.missing) == (4, 2, 1, 0)
    rows = {
        row["source_id"]: row
        for row in follower.asked("SELECT source_id, form, size_bytes, artifact_key FROM scm.patch_blobs")
    }
    assert (rows[huge]["form"], rows[many]["form"]) == ("diffstat", "diffstat")
    assert rows[huge]["size_bytes"] < 1000
    with follower.artifacts.open(rows[huge]["artifact_key"]) as reader:
        assert reader.read().startswith(b" big | +50 -0\n files: 1; lines: +50 -0; the diff")
    bulk = follower.asked("SELECT bulk_reason FROM scm.git_commits WHERE commit_sha = %s", many)
    assert bulk == [{"bulk_reason": "301 files"}]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
