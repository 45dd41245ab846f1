"""Subversion, read from real repositories."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram.kernel.errors import SourceError
from engram.scm import svn
from engram.scm.store import svn_key
from engram.scm.svn import LogParser
from engram.scm.sync import Syncing
from support.subversion import SvnRepo

pytestmark = pytest.mark.anyio


@pytest.fixture
def origin(tmp_path: Path) -> SvnRepo:
    return SvnRepo(tmp_path / "svn repository")


async def test_revisions_of_every_shape(follower, origin: SvnRepo) -> None:
    origin.put("a.txt", "1\n", "first\n\nwith <tags> & more, été")
    origin.put("b.bin", bytes(range(256)))
    origin.copy("a.txt", "c.txt", "a copy")
    origin.forget_author(2)
    repo = await follower.add("svn", origin.url)
    counts = await follower.sync(repo)

    rows = follower.facts(repo, "svn")
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert (counts.read, counts.written) == (3, 3)
    assert rows[0]["message"] == "first\n\nwith <tags> & more, été"
    assert rows[0]["paths_json"] == [{"action": "A", "path": "/a.txt"}]
    assert (rows[1]["author_name"], rows[1]["committed_at"]) == (None, None)
    assert rows[2]["paths_json"] == [{"action": "A", "path": "/c.txt", "from": "/a.txt"}]
    assert follower.mark(svn_key(repo.repo_id)) == {"last_rev": 3}

    assert (await follower.sync(repo)).read == 0
    origin.put("a.txt", "2\n", "later")
    assert (await follower.sync(repo)).read == 1
    assert follower.mark(svn_key(repo.repo_id)) == {"last_rev": 4}
    assert follower.facts(repo, "svn") == await follower.afresh(repo, "svn")


async def test_the_watermark_moves_with_each_page(
    follower, origin: SvnRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svn, "PAGE", 2)
    for n in range(5):
        origin.put("a.txt", f"{n}\n")
    repo = await follower.add("svn", origin.url)

    def stop(counts) -> None:
        raise SourceError("enough", retryable=False)

    with pytest.raises(SourceError, match="enough"):
        async with follower.source(repo) as source:
            await Syncing(follower.db, 60, on_page=stop).run_once(repo, source)
    assert follower.mark(svn_key(repo.repo_id)) == {"last_rev": 2}
    assert (await follower.sync(repo)).read == 3
    assert follower.facts(repo, "svn") == await follower.afresh(repo, "svn")


async def test_a_folder_of_a_repository_is_followed_by_itself(follower, origin: SvnRepo) -> None:
    origin.put("elsewhere", "1\n")
    origin.svnmucc("mkdir", "part", message="the part")
    origin.put("part/a@b", "1\n", "in it")
    origin.put("elsewhere", "2\n")
    repo = await follower.add("svn", f"{origin.url}/part")
    await follower.sync(repo)
    assert [row["id"] for row in follower.facts(repo, "svn")] == [2, 3]
    assert follower.mark(svn_key(repo.repo_id)) == {"last_rev": 4}


async def test_diffs_become_patches(follower, origin: SvnRepo) -> None:
    origin.put("a.txt", "1\n")
    origin.put("big.txt", "a line that is long enough\n" * 2_000)
    repo = await follower.add("svn", origin.url)
    await follower.sync(repo)
    kept = await follower.materialize(repo, max_bytes=10_000)
    assert (kept.diffs, kept.diffstats, kept.missing) == (1, 1, 0)
    rows = follower.asked("SELECT source_id, uri, artifact_key, form FROM scm.patch_blobs ORDER BY source_id")
    assert rows[0]["uri"].startswith(f"memory://patch_blobs/svn/{repo.repo_id}:r1/")
    assert rows[0]["artifact_key"].startswith(f"scm/default/{repo.repo_id}/svn/r1/")
    with follower.artifacts.open(rows[0]["artifact_key"]) as reader:
        assert b"+1\n" in reader.read()
    with follower.artifacts.open(rows[1]["artifact_key"]) as reader:
        assert b"too large to be kept" in reader.read()


@pytest.mark.parametrize(
    "head",
    [
        b'<!DOCTYPE log [<!ENTITY a "b">]>',
        b'<!DOCTYPE log SYSTEM "file:///etc/passwd">',
        b'<!DOCTYPE log [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
    ],
)
def test_document_types_and_entities_are_refused(head: bytes) -> None:
    with pytest.raises(SourceError, match="document type or an entity"):
        LogParser().feed(b'<?xml version="1.0"?>' + head + b"<log/>")


def test_xml_in_small_pieces_and_xml_that_breaks_off() -> None:
    text = '<log><logentry revision="7"><msg>été</msg></logentry></log>'.encode()
    parser = LogParser()
    found = [entry for n in range(len(text)) for entry in parser.feed(text[n : n + 1])]
    parser.close()
    assert [(entry["rev_num"], entry["message"]) for entry in found] == [(7, "été")]
    broken = LogParser()
    broken.feed(text[:30])
    with pytest.raises(SourceError, match="cannot be read"):
        broken.close()
