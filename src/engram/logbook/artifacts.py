"""The artifact store: content kept under a key that names its SHA-256.

A key is one of `engram.logbook.uri`'s; a path from outside is never used. An
artifact is whole or not there: it is written as a draft, synced, and renamed
into place. What is there never changes, so putting it again writes nothing,
unless the file has been damaged, and then the new copy replaces it.

Reading verifies. A damaged artifact raises `ArtifactCorrupt` instead of giving
out its last bytes; a reader that stops before the end has verified nothing.
`exists` and `size` look at the file, not into it.

It must never follow a symbolic link inside the store (the folder itself may be
one), show a draft as an artifact, or hold more of the content in memory than
one chunk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from engram.kernel.clock import SYSTEM_CLOCK, Clock
from engram.kernel.errors import ArtifactCorrupt, ArtifactError, ArtifactTooLarge, InputError, NotFound
from engram.logbook.uri import build_content_key, sha256_of_key

Content = bytes | BinaryIO | Iterable[bytes]
Key = str | Callable[[str], str]

CHUNK = 1 << 18
_DRAFTS = ".drafts"  # no key starts like this
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PLAIN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_FULL = "free some space, or raise the quota or the file size limit"
_DENIED = "let engram's user read and write the folder"
_FOREIGN = "something in the folder is a link, or in the way; see who put it there"
_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _DENIED),
    **dict.fromkeys((errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST), _FOREIGN),
}


@dataclass(frozen=True, slots=True)
class Artifact:
    key: str
    sha256: str
    size: int


@contextmanager
def _failing(doing: str, *, missing: str | None = None) -> Iterator[None]:
    """Translate what the operating system says; a caller's own errors never pass through here."""
    try:
        yield
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise NotFound(f"there is no artifact {missing}", context={"key": missing}) from error
        raise ArtifactError(
            f"cannot {doing}: {error.strerror or error}",
            hint=_HINTS.get(error.errno or 0),
            context={"errno": errno.errorcode.get(error.errno or 0)},
        ) from error


class ArtifactReader:
    """The content of one artifact, verified by whoever reads to the end."""

    def __init__(self, file: io.FileIO, key: str) -> None:
        self.key = key
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; all that is left when negative; nothing at the end."""
        if size < 0:
            return b"".join(self)
        with _failing(f"read {self.key}"):
            chunk = self._file.read(size) or b""
        self._sha256.update(chunk)
        if size and (not chunk or self._file.tell() >= self.size):
            self._verify()
        return chunk

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read(CHUNK):
            yield chunk

    def __enter__(self) -> ArtifactReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _verify(self) -> None:
        if self._sha256.hexdigest() != sha256_of_key(self.key):
            raise ArtifactCorrupt(
                f"{self.key} is damaged: its content does not have the hash in its key",
                hint="put the content again, or restore the file from a backup",
                context={"key": self.key},
            )


class ArtifactStore(Protocol):
    def put(self, content: Content, key: Key | None = None, *, max_bytes: int | None = None) -> Artifact:
        """Keep the content; it is durable when this returns.

        `key` is a key whose hash the content must have, or a function that
        makes one of the hash; by default it is the plain content key. Content
        that grows beyond `max_bytes` is refused and leaves nothing behind.
        """

    def open(self, key: str) -> ArtifactReader:
        """Close it, or use it in a `with`. `NotFound` when there is none."""

    def exists(self, key: str) -> bool: ...

    def size(self, key: str) -> int: ...

    def delete(self, key: str) -> bool:
        """False when there was none. A reader that has it open reads on; a `put` of
        the same content at the same moment may find it and return before it goes.
        """


class LocalArtifacts:
    """An `ArtifactStore` in a folder of this machine, readable by its owner only."""

    def __init__(self, directory: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._directory = directory
        self._clock = clock

    def put(self, content: Content, key: Key | None = None, *, max_bytes: int | None = None) -> Artifact:
        if isinstance(key, str):
            sha256_of_key(key)
        with ExitStack() as stack:
            with _failing(f"begin an artifact in {self._directory}"):
                draft = stack.enter_context(self._draft())
            for chunk in _chunks(content):
                _require_room(draft.size + len(chunk), max_bytes)
                with _failing(f"write an artifact in {self._directory}"):
                    draft.write(chunk)
            artifact = Artifact(_key_of(draft, key), draft.sha256.hexdigest(), draft.size)
            with _failing(f"keep {artifact.key} in {self._directory}"):
                self._publish(draft, artifact)
        return artifact

    def open(self, key: str) -> ArtifactReader:
        *folders, name = _path(key)
        with _failing(f"open {key} in {self._directory}", missing=key), self._folders(folders) as opened:
            return ArtifactReader(_open_plain(name, opened[-1]), key)

    def exists(self, key: str) -> bool:
        try:
            self.open(key).close()
        except NotFound:
            return False
        return True

    def size(self, key: str) -> int:
        with self.open(key) as reader:
            return reader.size

    def delete(self, key: str) -> bool:
        *folders, name = _path(key)
        try:
            with (
                _failing(f"delete {key} in {self._directory}", missing=key),
                self._folders(folders) as opened,
            ):
                os.unlink(name, dir_fd=opened[-1])
                os.fsync(opened[-1])
        except NotFound:
            return False
        return True

    def sweep(self, older_than: timedelta) -> int:
        """Remove the drafts of crashed writers; returns how many. A live writer's is locked and stays."""
        before = (self._clock.now() - older_than).timestamp()
        try:
            with _failing(f"sweep {self._directory}", missing=_DRAFTS), self._folders([_DRAFTS]) as opened:
                return sum(_swept(opened[-1], name, before) for name in os.listdir(opened[-1]))
        except NotFound:
            return 0

    def _publish(self, draft: _Draft, artifact: Artifact) -> None:
        *folders, name = _path(artifact.key)
        with self._folders(folders, make=True) as opened:
            if not self._holds(artifact.key):
                draft.move_to(opened[-1], name)
            # All of them, every time: a twin that made one may not have come to syncing it.
            for folder in reversed(opened):
                os.fsync(folder)

    def _holds(self, key: str) -> bool:
        try:
            with self.open(key) as reader:
                for _ in reader:
                    pass
        except (NotFound, ArtifactError):
            return False
        return True

    @contextmanager
    def _draft(self) -> Iterator[_Draft]:
        with self._folders([_DRAFTS], make=True) as opened:
            draft = _Draft(opened[-1])
            try:
                fcntl.flock(draft.fd, fcntl.LOCK_EX)
                yield draft
            finally:
                draft.discard()

    @contextmanager
    def _folders(self, names: Sequence[str], *, make: bool = False) -> Iterator[list[int]]:
        """Descriptors of the store's folder and those below it, none reached through a link."""
        with ExitStack() as stack:
            if make and not self._directory.is_dir():
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                _sync_folder(self._directory.parent)
            opened = [_enter(stack, os.open(self._directory, _FOLDER))]
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=opened[-1])
                opened.append(_enter(stack, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=opened[-1])))
            yield opened


class _Draft:
    """A file being written, hashed as it grows, locked while its writer lives."""

    def __init__(self, folder: int) -> None:
        self.folder = folder
        self.name = secrets.token_hex(16)
        self.fd = os.open(self.name, _NEW_FILE, 0o600, dir_fd=folder)
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> None:
        self.sha256.update(chunk)
        self.size += len(chunk)
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(self.fd, rest) :]

    def move_to(self, folder: int, name: str) -> None:
        os.fsync(self.fd)
        os.rename(self.name, name, src_dir_fd=self.folder, dst_dir_fd=folder)

    def discard(self) -> None:
        """Nothing is left of it, unless it was moved. The lock goes last."""
        with suppress(OSError):
            os.unlink(self.name, dir_fd=self.folder)
        os.close(self.fd)


def _chunks(content: Content) -> Iterable[bytes]:
    if isinstance(content, bytes | bytearray | memoryview):
        return (bytes(content),)
    read = getattr(content, "read", None)
    return content if read is None else iter(lambda: read(CHUNK), b"")


def _require_room(size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise ArtifactTooLarge(f"the content is larger than {max_bytes} bytes")


def _key_of(draft: _Draft, key: Key | None) -> str:
    sha256 = draft.sha256.hexdigest()
    made = key(sha256) if callable(key) else key or build_content_key(sha256)
    if sha256_of_key(made) != sha256:
        raise InputError(
            "the content does not have the hash in its key",
            fields={"key": "names other content"},
            context={"key": made, "sha256": sha256},
        )
    return made


def _path(key: str) -> list[str]:
    """The parts of a key are file names: its grammar has no empty part, `.`, `..` or separator."""
    sha256_of_key(key)
    return key.split("/")


def _open_plain(name: str, folder: int) -> io.FileIO:
    fd = os.open(name, _PLAIN_FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EISDIR, "not a plain file")
    return io.FileIO(fd)


def _swept(folder: int, name: str, before: float) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_mtime > before:
            return False
        with _open_plain(name, folder) as draft:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True


def _enter(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _sync_folder(path: Path) -> None:
    with ExitStack() as stack:
        os.fsync(_enter(stack, os.open(path, _FOLDER)))
