"""The artifact store: whole or not there, verified when read, and no way out of its folder."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from engram.kernel.clock import ManualClock
from engram.kernel.errors import InputError, NotFound
from engram.logbook import artifacts
from engram.logbook.artifacts import (
    CHUNK,
    Artifact,
    ArtifactCorrupt,
    ArtifactError,
    ArtifactStore,
    ArtifactTooLarge,
    LocalArtifacts,
)
from engram.logbook.uri import UriError, build_artifact_key, build_content_key

MB = 1 << 20
CONTENT = b"diff --git a/x b/x\n" * 1000
SHA = hashlib.sha256(CONTENT).hexdigest()
KEY = build_artifact_key("payments", 1, "git", "abc123", SHA, "diff")
AGES = timedelta(days=365)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(directory: Path) -> LocalArtifacts:
    return LocalArtifacts(directory)


def files(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir())


def read(store: LocalArtifacts, key: str) -> bytes:
    with store.open(key) as reader:
        return reader.read()


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(script: str, *arguments: object) -> str:
    with child(script, *arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_the_local_store_is_an_artifact_store(store: LocalArtifacts) -> None:
    checked: ArtifactStore = store
    assert checked is store


@pytest.mark.parametrize("content", [b"", b"x", CONTENT, bytes(3 * CHUNK), bytes(3 * CHUNK + 1)])
def test_what_is_put_is_read(store: LocalArtifacts, directory: Path, content: bytes) -> None:
    sha = hashlib.sha256(content).hexdigest()
    kept = store.put(content)
    assert kept == Artifact(f"blobs/{sha[:2]}/{sha}", sha, len(content))
    assert read(store, kept.key) == content
    assert (store.exists(kept.key), store.size(kept.key)) == (True, len(content))
    assert files(directory) == [kept.key]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda: io.BytesIO(CONTENT), id="a stream"),
        pytest.param(lambda: [CONTENT[:7], b"", CONTENT[7:]], id="a list"),
        pytest.param(lambda: (CONTENT[i : i + 100] for i in range(0, len(CONTENT), 100)), id="a generator"),
        pytest.param(lambda: bytearray(CONTENT), id="a bytearray"),
        pytest.param(lambda: memoryview(CONTENT), id="a view"),
    ],
)
def test_content_comes_in_many_forms(store: LocalArtifacts, content: Callable[[], bytes]) -> None:
    assert store.put(content()).sha256 == SHA


@pytest.mark.parametrize("content", ["text", ["text"], [None], io.StringIO("text"), io.StringIO("")])
def test_only_bytes_are_content(store: LocalArtifacts, directory: Path, content: object) -> None:
    with pytest.raises(TypeError):
        store.put(content)  # type: ignore[arg-type]
    assert files(directory) == []


def test_a_key_is_given_or_made_of_the_hash(store: LocalArtifacts, directory: Path) -> None:
    assert store.put(CONTENT, KEY).key == KEY
    made = store.put(CONTENT, lambda sha: build_artifact_key("payments", 2, "svn", "r7", sha, "diff"))
    assert made.key == KEY.replace("1/git/abc123", "2/svn/r7")
    assert files(directory) == sorted([KEY, made.key])
    assert read(store, made.key) == CONTENT


def test_content_that_is_not_the_keys_is_refused_and_leaves_nothing(
    store: LocalArtifacts, directory: Path
) -> None:
    with pytest.raises(InputError, match="does not have the hash") as refused:
        store.put(CONTENT + b"!", KEY)
    assert refused.value.http_status == 400
    assert files(directory) == []
    assert not store.exists(KEY)


OUTSIDE = [
    "",
    "/etc/passwd",
    "../outside",
    f"blobs/../{SHA}",
    f"blobs/{SHA[:2]}/../../../{SHA}",
    f"blobs/00/{SHA}",
    f"scm/../1/git/a/{SHA}.diff",
    f"scm/p/1/git/%2E%2E/{SHA}.diff",
    f"scm/p/1/git/a%2Fb/{SHA}.diff",
    f"scm/p\x00/1/git/a/{SHA}.diff",
    f"scm\\p\\1\\git\\a\\{SHA}.diff",
    f".drafts/{SHA}",
    f"file:///blobs/{SHA[:2]}/{SHA}",
    f"memory://attachments/1/{SHA}",
]


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_path_is_not_a_key(store: LocalArtifacts, directory: Path, key: str) -> None:
    for act in (store.open, store.exists, store.size, store.delete, lambda k: store.put(CONTENT, k)):
        with pytest.raises(UriError):
            act(key)
    assert not directory.exists(), "refused before anything is written"


def test_a_key_is_refused_before_the_content_is_asked_for(store: LocalArtifacts) -> None:
    def never() -> Iterator[bytes]:
        raise AssertionError("asked")
        yield b""

    with pytest.raises(UriError):
        store.put(never(), "../x")


@pytest.mark.parametrize("key", [KEY, build_content_key(SHA)])
def test_what_is_not_there_is_not_found(store: LocalArtifacts, key: str) -> None:
    for _ in range(2):
        assert not store.exists(key)
        assert not store.delete(key)
        for act in (store.open, store.size):
            with pytest.raises(NotFound) as missing:
                act(key)
            assert missing.value.context == {"key": key}
        store.put(b"something else")


def test_deleted_is_gone_and_may_come_back(store: LocalArtifacts, directory: Path) -> None:
    store.put(CONTENT, KEY)
    with store.open(KEY) as reader:
        assert store.delete(KEY)
        assert reader.read() == CONTENT, "whoever has it open reads on"
    assert (store.exists(KEY), store.delete(KEY), files(directory)) == (False, False, [])
    store.put(CONTENT, KEY)
    assert read(store, KEY) == CONTENT


@pytest.mark.parametrize("there", [False, True], ids=["new", "there-already"])
def test_what_is_being_kept_is_not_deleted(store: LocalArtifacts, there: bool) -> None:
    if there:
        store.put(CONTENT)
    with store.keeping(CONTENT) as artifact:
        assert store.delete(artifact.key) is False
        with store.keeping(CONTENT):
            assert store.delete(artifact.key) is False
        assert store.delete(artifact.key) is False, "one of two is still keeping it"
        assert store.exists(artifact.key)
    assert store.delete(artifact.key) is True
    assert not store.exists(artifact.key)


def test_who_puts_what_is_being_deleted_waits_and_keeps_it(store: LocalArtifacts) -> None:
    key = store.put(CONTENT).key
    with ThreadPoolExecutor(1) as pool:
        with store.removing(key) as remove:
            assert remove is not None
            putting = pool.submit(store.put, CONTENT)
            with pytest.raises(TimeoutError):
                putting.result(0.2)
            remove()
        assert putting.result(20).key == key
    with store.open(key) as reader:
        assert reader.read() == CONTENT


def test_two_do_not_delete_one_artifact_at_once(store: LocalArtifacts) -> None:
    key = store.put(CONTENT).key
    with store.removing(key) as first, store.removing(key) as second:
        assert (first is not None, second) == (True, None)
    assert store.exists(key)
    with store.removing(build_content_key("0" * 64)) as nothing:
        assert nothing is None


def test_an_artifact_that_cannot_be_deleted_forever_is_told(
    store: LocalArtifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.logbook.artifacts._LOCK_TRIES", 3)
    key = store.put(CONTENT).key
    with store.removing(key), pytest.raises(ArtifactError, match="for too long"):
        store.put(CONTENT)


def test_whatever_is_referred_to_is_there_whoever_deletes(
    store: LocalArtifacts, seed: int, scale: float
) -> None:
    """Writers refer inside `keeping`, deleters look inside `removing`: nothing that is referred to is gone."""
    chance = random.Random(seed)
    turns = [chance.random() < 0.5 for _ in range(round(400 * scale))]
    referred: set[int] = set()
    key = store.put(CONTENT).key

    def turn(number: int, writes: bool) -> None:
        if writes:
            with store.keeping(CONTENT):
                referred.add(number)
            assert store.exists(key)
            referred.discard(number)
        else:
            with store.removing(key) as remove:
                if remove is not None and not referred:
                    remove()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(turn, range(len(turns)), turns))


def test_what_cannot_be_locked_is_not_deleted(store: LocalArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store.put(CONTENT).key

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks left")

    with monkeypatch.context() as patched:
        patched.setattr("engram.logbook.artifacts.fcntl.flock", refuse)
        with pytest.raises(ArtifactError, match="no locks left"):
            store.delete(key)
    assert store.exists(key)


def test_a_file_system_without_hard_links_will_do(
    store: LocalArtifacts, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    with store.keeping(CONTENT) as artifact:
        assert store.delete(artifact.key) is False
    assert store.exists(artifact.key)


def test_putting_it_again_writes_nothing(store: LocalArtifacts, directory: Path) -> None:
    store.put(CONTENT, KEY)
    before = (directory / KEY).stat()
    assert store.put(io.BytesIO(CONTENT), KEY) == Artifact(KEY, SHA, len(CONTENT))
    after = (directory / KEY).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert files(directory) == [KEY]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": lambda b: bytes([b[0] ^ 1]) + b[1:],
    "the last byte": lambda b: b[:-1] + bytes([b[-1] ^ 0x80]),
    "cut short": lambda b: b[:-1],
    "emptied": lambda b: b"",
    "longer": lambda b: b + b"!",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("step", [-1, 1000, CHUNK])
def test_damage_is_found_by_reading_to_the_end(
    store: LocalArtifacts, directory: Path, damage: Callable[[bytes], bytes], step: int
) -> None:
    content = os.urandom(CHUNK + 1000)
    kept = store.put(content)
    damaged = damage(content)
    (directory / kept.key).write_bytes(damaged)
    got: list[bytes] = []
    with store.open(kept.key) as reader, pytest.raises(ArtifactCorrupt) as found:
        got.extend(iter(lambda: reader.read(step), b""))
    assert found.value.context == {"key": kept.key}
    assert len(b"".join(got)) < max(len(damaged), 1), "the last bytes are held back"
    with store.open(kept.key) as reader, pytest.raises(ArtifactCorrupt):
        list(reader)


def test_damage_stays_found(store: LocalArtifacts, directory: Path) -> None:
    store.put(CONTENT, KEY)
    (directory / KEY).write_bytes(b"?" * len(CONTENT))
    with store.open(KEY) as reader:
        for _ in range(3):
            with pytest.raises(ArtifactCorrupt):
                reader.read()


def test_an_artifact_cut_short_while_it_is_read_is_damaged(store: LocalArtifacts, directory: Path) -> None:
    store.put(CONTENT, KEY)
    with store.open(KEY) as reader:
        assert reader.read(100) == CONTENT[:100]
        os.truncate(directory / KEY, 100)
        with pytest.raises(ArtifactCorrupt):
            reader.read(100)


def test_a_reader_of_exactly_the_size_has_verified(store: LocalArtifacts, directory: Path) -> None:
    store.put(CONTENT, KEY)
    (directory / KEY).write_bytes(b"?" * len(CONTENT))
    with store.open(KEY) as reader, pytest.raises(ArtifactCorrupt):
        reader.read(reader.size)


def test_a_reader_that_stops_early_or_asks_for_nothing_is_told_nothing(
    store: LocalArtifacts, directory: Path
) -> None:
    store.put(CONTENT, KEY)
    (directory / KEY).write_bytes(b"?" * len(CONTENT))
    with store.open(KEY) as reader:
        assert reader.read(0) == b""
        assert reader.read(10) == b"?" * 10
        assert reader.read(0) == b""
    assert store.exists(KEY)
    assert store.size(KEY) == len(CONTENT)


def test_a_read_in_pieces_is_the_content(store: LocalArtifacts) -> None:
    store.put(CONTENT, KEY)
    with store.open(KEY) as reader:
        pieces = [reader.read(0), reader.read(5), *reader]
        assert reader.read(5) == b""
    assert b"".join(pieces) == CONTENT
    with pytest.raises(ValueError, match="closed"):
        reader.read(1)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_artifact_is_replaced_by_the_next_put(
    store: LocalArtifacts, directory: Path, damage: Callable[[bytes], bytes]
) -> None:
    store.put(CONTENT, KEY)
    (directory / KEY).write_bytes(damage(CONTENT))
    store.put(CONTENT, KEY)
    assert read(store, KEY) == CONTENT
    assert files(directory) == [KEY]


def test_only_the_owner_may_look(store: LocalArtifacts, directory: Path) -> None:
    previous = os.umask(0)
    try:
        store.put(CONTENT, KEY)
    finally:
        os.umask(previous)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in [directory, *directory.rglob("*")] if p.is_dir()}
    assert modes == {0o700}
    assert stat.S_IMODE((directory / KEY).stat().st_mode) == 0o600


def test_many_writers_of_one_content_make_one_file(store: LocalArtifacts, directory: Path) -> None:
    barrier = threading.Barrier(8)

    def pieces() -> Iterator[bytes]:
        yield CONTENT[:100]
        barrier.wait(30)
        yield CONTENT[100:]

    with ThreadPoolExecutor(8) as threads:
        kept = list(threads.map(lambda _: store.put(pieces(), KEY), range(8)))
    assert set(kept) == {Artifact(KEY, SHA, len(CONTENT))}
    assert files(directory) == [KEY]
    assert read(store, KEY) == CONTENT


def test_an_artifact_is_not_there_until_it_is_whole(store: LocalArtifacts, directory: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    def pieces() -> Iterator[bytes]:
        yield CONTENT[:100]
        seen.append((store.exists(KEY), (directory / KEY).exists()))
        yield CONTENT[100:]

    store.put(pieces(), KEY)
    assert seen == [(False, False)]
    assert store.exists(KEY)


def test_the_file_is_synced_before_it_is_published_and_its_folders_after(
    store: LocalArtifacts, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def note_sync(fd: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}"
        events.append(kind)
        fsync(fd)

    def note_link(*names: str, **folders: Any) -> None:
        events.append("link")
        link(*names, **folders)

    directory.mkdir()
    monkeypatch.setattr(artifacts.os, "fsync", note_sync)
    monkeypatch.setattr(artifacts.os, "link", note_link)
    kept = store.put(CONTENT)
    folders = ["folder"] * kept.key.count("/") + ["folder"]
    assert events == [f"file of {len(CONTENT)}", "link", *folders]
    events.clear()
    store.put(CONTENT)
    assert events == folders, "a twin may have been killed before it synced them"
    events.clear()
    store.delete(kept.key)
    assert events == ["folder"]


@pytest.mark.parametrize("call", ["write", "fsync", "link", "open"])
def test_what_the_disk_says_is_told_and_nothing_is_left(
    store: LocalArtifacts, directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.put(b"the folder is there")
    before = files(directory)

    def broken(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(artifacts.os, call, broken)
        with pytest.raises(ArtifactError, match="Input/output error") as failed:
            store.put(CONTENT, KEY)
    assert failed.value.retryable
    assert failed.value.context == {"errno": "EIO"}
    assert isinstance(failed.value.__cause__, OSError)
    assert files(directory) == before
    store.put(CONTENT, KEY)
    assert read(store, KEY) == CONTENT


def test_a_short_write_is_continued(store: LocalArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(artifacts.os, "write", lambda fd, data: write(fd, data[:1000]))
    kept = store.put(CONTENT)
    monkeypatch.undo()
    assert read(store, kept.key) == CONTENT


def test_a_stream_is_asked_for_a_chunk_at_a_time(store: LocalArtifacts) -> None:
    asked: list[int] = []

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size or -1)
            return super().read(size)

    store.put(Stream(bytes(2 * CHUNK)))
    assert asked == [CHUNK] * 3


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [Interrupted(), ConnectionResetError("the peer went away")])
def test_an_error_of_the_content_is_the_callers_and_leaves_nothing(
    store: LocalArtifacts, directory: Path, error: BaseException
) -> None:
    def pieces() -> Iterator[bytes]:
        yield CONTENT
        raise error

    with pytest.raises(type(error)) as raised:
        store.put(pieces())
    assert raised.value is error
    assert files(directory) == []


def test_too_large_is_refused_while_it_streams_and_leaves_nothing(
    store: LocalArtifacts, directory: Path
) -> None:
    asked = 0

    def endless() -> Iterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield bytes(1000)

    with pytest.raises(ArtifactTooLarge, match="10500 bytes") as refused:
        store.put(endless(), max_bytes=10_500)
    assert refused.value.http_status == 413
    assert asked == 11
    assert files(directory) == []


def test_the_limit_itself_is_allowed(store: LocalArtifacts) -> None:
    assert store.put(CONTENT, max_bytes=len(CONTENT)).size == len(CONTENT)
    assert store.put(b"", max_bytes=0).size == 0
    with pytest.raises(ArtifactTooLarge):
        store.put(CONTENT, max_bytes=len(CONTENT) - 1)


def test_a_large_artifact_passes_through_little_memory(store: LocalArtifacts, scale: float) -> None:
    size = int(min(100, max(8, 24 * scale))) * MB
    block = os.urandom(MB)
    expected = hashlib.sha256()
    for _ in range(size // MB):
        expected.update(block)
    tracemalloc.start()
    try:
        kept = store.put(block for _ in range(size // MB))
        with store.open(kept.key) as reader:
            assert sum(len(chunk) for chunk in reader) == size
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (kept.size, kept.sha256) == (size, expected.hexdigest())
    assert peak < 2 * MB


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / Path(KEY).name).write_bytes(CONTENT)
    return outside


def test_a_linked_file_is_neither_read_nor_written_through(
    store: LocalArtifacts, directory: Path, secret: Path
) -> None:
    target = secret / Path(KEY).name
    (directory / KEY).parent.mkdir(parents=True)
    (directory / KEY).symlink_to(target)
    for act in (store.open, store.exists, store.size):
        with pytest.raises(ArtifactError, match="see who put it there"):
            act(KEY)
    inode = target.stat().st_ino
    store.put(CONTENT, KEY)
    assert not (directory / KEY).is_symlink(), "the link is replaced"
    assert (target.stat().st_ino, target.read_bytes()) == (inode, CONTENT)
    (directory / KEY).unlink()
    (directory / KEY).symlink_to(target)
    assert store.delete(KEY)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("depth", range(1, 6))
def test_a_linked_folder_is_not_entered(
    store: LocalArtifacts, directory: Path, secret: Path, depth: int
) -> None:
    parts = KEY.split("/")
    link = directory.joinpath(*parts[:depth])
    link.parent.mkdir(parents=True)
    below = secret.joinpath(*parts[depth:])
    below.parent.mkdir(parents=True, exist_ok=True)
    below.write_bytes(CONTENT)
    link.symlink_to(secret)
    before = files(secret)
    for act in (store.open, store.exists, store.size, store.delete, lambda key: store.put(CONTENT, key)):
        with pytest.raises(ArtifactError):
            act(KEY)
    assert files(secret) == before
    assert below.read_bytes() == CONTENT


def test_a_linked_drafts_folder_is_not_entered(store: LocalArtifacts, directory: Path, secret: Path) -> None:
    directory.mkdir()
    (directory / ".drafts").symlink_to(secret)
    before = files(secret)
    with pytest.raises(ArtifactError):
        store.put(CONTENT)
    with pytest.raises(ArtifactError):
        store.sweep(timedelta(0))
    assert files(secret) == before


def test_the_store_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LocalArtifacts(tmp_path / "link").put(CONTENT, KEY)
    assert read(LocalArtifacts(tmp_path / "real"), KEY) == CONTENT


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_not_a_file_is_no_artifact(
    store: LocalArtifacts, directory: Path, make: Callable[[Path], None]
) -> None:
    (directory / KEY).parent.mkdir(parents=True)
    make(directory / KEY)
    descriptors = len(os.listdir("/proc/self/fd"))
    for act in (store.open, store.exists, store.size):
        with pytest.raises(ArtifactError):
            act(KEY)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_descriptor_is_left_open(store: LocalArtifacts, directory: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    store.put(CONTENT, KEY)
    store.put(CONTENT, KEY)
    read(store, KEY)
    with pytest.raises(ArtifactTooLarge):
        store.put(CONTENT, max_bytes=1)
    with pytest.raises(InputError):
        store.put(b"other", KEY)
    store.sweep(timedelta(0))
    store.delete(KEY)
    assert not store.exists(KEY)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sweep_takes_old_drafts_only(directory: Path) -> None:
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    store = LocalArtifacts(directory, clock=clock)
    assert store.sweep(timedelta(0)) == 0, "nothing there yet"
    kept = store.put(CONTENT)
    for name, age in (("old", 3601), ("young", 3599)):
        (directory / ".drafts" / name).write_bytes(b"half")
        at = clock.now().timestamp() - age
        os.utime(directory / ".drafts" / name, (at, at))
    os.utime(directory / kept.key, (0, 0))
    assert store.sweep(timedelta(hours=1)) == 1
    assert files(directory) == [".drafts/young", kept.key]
    clock.advance(2)
    assert store.sweep(timedelta(hours=1)) == 1
    assert store.sweep(timedelta(hours=1)) == 0
    assert files(directory) == [kept.key]


def test_a_sweep_leaves_a_live_writer_alone(store: LocalArtifacts, directory: Path) -> None:
    swept: list[int] = []

    def slow() -> Iterator[bytes]:
        yield CONTENT[:100]
        for draft in (directory / ".drafts").iterdir():
            os.utime(draft, (0, 0))
        swept.append(store.sweep(AGES))
        yield CONTENT[100:]

    kept = store.put(slow())
    assert swept == [0]
    assert read(store, kept.key) == CONTENT


def test_a_sweep_takes_no_link_and_no_folder(store: LocalArtifacts, directory: Path, secret: Path) -> None:
    store.put(CONTENT)
    (directory / ".drafts" / "link").symlink_to(secret / Path(KEY).name)
    (directory / ".drafts" / "folder").mkdir()
    os.utime(directory / ".drafts" / "folder", (0, 0))
    os.utime(directory / ".drafts" / "link", (0, 0), follow_symlinks=False)
    assert store.sweep(AGES) == 0
    assert files(secret) == [Path(KEY).name]


CRASH = """
import os, signal, sys
from pathlib import Path
from engram.logbook import artifacts

directory, key, place = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def pieces():
    yield b"x" * 500_000
    if place == "streaming":
        print("half", flush=True)
        sys.stdin.read()
    yield b"y" * 500_000

def around(name, before, after):
    real = getattr(os, name)
    def call(*args, **kw):
        before()
        real(*args, **kw)
        after()
    setattr(artifacts.os, name, call)

nothing = lambda: None
if place == "before link":
    around("link", die, nothing)
if place == "after link":
    around("link", nothing, die)
artifacts.LocalArtifacts(Path(directory)).put(pieces(), key)
"""
WHOLE = b"x" * 500_000 + b"y" * 500_000
WHOLE_KEY = build_content_key(hashlib.sha256(WHOLE).hexdigest())


@pytest.mark.crash
@pytest.mark.parametrize("place", ["streaming", "before link", "after link"])
def test_a_writer_killed_at_any_place_leaves_the_artifact_whole_or_absent(
    store: LocalArtifacts, directory: Path, place: str
) -> None:
    with child(CRASH, directory, WHOLE_KEY, place) as process:
        if place == "streaming":
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            assert store.sweep(timedelta(0)) == 0, "it is alive"
            process.kill()
        process.wait(30)
    assert process.returncode == -signal.SIGKILL
    published = place == "after link"
    assert store.exists(WHOLE_KEY) is published
    assert [name for name in files(directory) if not name.startswith(".drafts/")] == [WHOLE_KEY] * published
    assert store.sweep(timedelta(hours=1)) == 0, "too young"
    assert store.sweep(timedelta(0)) == 1, "the draft, or the name that it had"
    assert store.exists(WHOLE_KEY) is published
    assert store.put(WHOLE, WHOLE_KEY).size == len(WHOLE)
    assert read(store, WHOLE_KEY) == WHOLE
    assert files(directory) == [WHOLE_KEY]


FULL = """
import resource, sys
from pathlib import Path
from engram.logbook.artifacts import ArtifactError, LocalArtifacts

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    LocalArtifacts(Path(sys.argv[1])).put(bytes(1 << 16) for _ in range(64))
except ArtifactError as error:
    print(error.context["errno"], error)
"""


def test_a_full_disk_is_told_and_leaves_nothing(store: LocalArtifacts, directory: Path) -> None:
    said = finished(FULL, directory)
    assert said.startswith("EFBIG cannot write an artifact in ")
    assert "free some space" in said
    assert files(directory) == []
    assert store.put(b"there is room again").size


DENIED = """
import os, sys
from pathlib import Path
from engram.logbook.artifacts import ArtifactError, LocalArtifacts

os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for directory in ("there", "missing"):
    try:
        LocalArtifacts(Path(directory)).put(b"content")
    except ArtifactError as error:
        print(error.context["errno"], error)
"""


def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "there", tmp_path):
        path.chmod(0o555)
    try:
        said = finished(DENIED, tmp_path).splitlines()
    finally:
        tmp_path.chmod(0o755)
    assert [line.split(" in ")[0] for line in said] == ["EACCES cannot begin an artifact"] * 2
    assert all("let engram's user read and write the folder" in line for line in said)
    assert files(tmp_path) == []


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(ArtifactError, match="in the way"):
        LocalArtifacts(tmp_path / "store").put(CONTENT)
