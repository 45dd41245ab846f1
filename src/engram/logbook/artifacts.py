"""The artifact store: content kept under a key that names its SHA-256.

A key is one of `engram.logbook.uri`'s; a path from outside is never used. An
artifact is whole or not there: it is written as a draft, synced, and renamed
into place. What is there never changes, so putting it again writes nothing,
unless the file has been damaged, and then the new copy replaces it.

Reading verifies. A damaged artifact raises `ArtifactCorrupt` instead of giving
out its last bytes; a reader that stops before the end has verified nothing.
`exists` and `size` look at the file, not into it.

What is being put is locked until whatever refers to it is written (`keeping`),
and a deletion looks at what refers to it under a lock of its own (`removing`):
of the two, one meets the other.

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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from functools import partial
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


# Of what is no plain file.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
# Of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_LOCK_TRIES, _LOCK_PAUSE_SECONDS = 1500, 0.02


class _Found(Enum):
    NOTHING = auto()
    WHOLE = auto()
    DAMAGED = auto()


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

    def keeping(
        self, content: Content, key: Key | None = None, *, max_bytes: int | None = None
    ) -> AbstractContextManager[Artifact]:
        """Put the content, and let nobody delete it in the block: what refers to it is written there."""

    def open(self, key: str) -> ArtifactReader:
        """Close it, or use it in a `with`. `NotFound` when there is none."""

    def exists(self, key: str) -> bool: ...

    def size(self, key: str) -> int: ...

    def removing(self, key: str) -> AbstractContextManager[Callable[[], None] | None]:
        """What deletes the content; None when there is none or somebody is `keeping` it.

        Whoever puts the same content meanwhile waits for the block's end, so that
        nobody comes to need it between a look at what refers to it and its end.
        """

    def delete(self, key: str) -> bool:
        """False when nothing was deleted. A reader that has it open reads on."""


class LocalArtifacts:
    """An `ArtifactStore` in a folder of this machine, readable by its owner only."""

    def __init__(self, directory: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._directory = directory
        self._clock = clock

    def put(self, content: Content, key: Key | None = None, *, max_bytes: int | None = None) -> Artifact:
        with self.keeping(content, key, max_bytes=max_bytes) as artifact:
            return artifact

    @contextmanager
    def keeping(
        self, content: Content, key: Key | None = None, *, max_bytes: int | None = None
    ) -> Iterator[Artifact]:
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
                self._publish(draft, artifact, stack)
            yield artifact

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
        with self.removing(key) as remove:
            if remove is None:
                return False
            remove()
        return True

    @contextmanager
    def removing(self, key: str) -> Iterator[Callable[[], None] | None]:
        *folders, name = _path(key)
        with ExitStack() as stack:
            with _failing(f"delete {key} in {self._directory}"):
                folder = self._locked_for_removal(folders, name, stack)

            yield None if folder is None else partial(_remove, folder, name, key)

    def _locked_for_removal(self, folders: Sequence[str], name: str, stack: ExitStack) -> int | None:
        """The folder of what may be deleted; nobody can begin to keep it while the stack is open."""
        try:
            folder = stack.enter_context(self._folders(folders))[-1]
        except FileNotFoundError:
            return None
        try:
            file = stack.enter_context(_open_plain(name, folder))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return None
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return folder  # a link, or something else in the way: nobody keeps that
        return folder if _is_at(file, name, folder) else None

    def sweep(self, older_than: timedelta) -> int:
        """Remove the drafts of crashed writers; returns how many. A live writer's is locked and stays."""
        before = (self._clock.now() - older_than).timestamp()
        try:
            with _failing(f"sweep {self._directory}", missing=_DRAFTS), self._folders([_DRAFTS]) as opened:
                return sum(_swept(opened[-1], name, before) for name in os.listdir(opened[-1]))
        except NotFound:
            return 0

    def _publish(self, draft: _Draft, artifact: Artifact, keeping: ExitStack) -> None:
        """Into place, or found there whole; locked either way for as long as the stack is open."""
        *folders, name = _path(artifact.key)
        with self._folders(folders, make=True) as opened:
            while (found := _look(opened[-1], name, artifact.key, keeping)) is _Found.NOTHING:
                if draft.linked_to(opened[-1], name):
                    break
            if found is _Found.DAMAGED:
                draft.move_to(opened[-1], name)
            # All of them, every time: a twin that made one may not have come to syncing it.
            for folder in reversed(opened):
                os.fsync(folder)

    @contextmanager
    def _draft(self) -> Iterator[_Draft]:
        with self._folders([_DRAFTS], make=True) as opened:
            draft = _Draft(opened[-1])
            try:
                fcntl.flock(draft.fd, fcntl.LOCK_SH)
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

    def linked_to(self, folder: int, name: str) -> bool:
        """Published under the name; False if something has it already. The lock goes with it."""
        os.fsync(self.fd)
        try:
            os.link(self.name, name, src_dir_fd=self.folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.move_to(folder, name)
        else:
            os.unlink(self.name, dir_fd=self.folder)
        return True

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


def _remove(folder: int, name: str, key: str) -> None:
    with _failing(f"delete {key}"):
        os.unlink(name, dir_fd=folder)
        os.fsync(folder)


def _look(folder: int, name: str, key: str, keeping: ExitStack) -> _Found:
    """What is under the name. If it is whole, it is locked against deletion while the stack is open."""
    try:
        file = _open_plain(name, folder)
    except FileNotFoundError:
        return _Found.NOTHING
    except OSError:
        return _Found.DAMAGED
    with ExitStack() as closing:
        closing.callback(file.close)
        _lock_shared(file)
        if not _is_at(file, name, folder):
            return _Found.NOTHING
        try:
            for _ in ArtifactReader(file, key):
                pass
        except ArtifactError:
            return _Found.DAMAGED
        keeping.enter_context(closing.pop_all())
    return _Found.WHOLE


def _lock_shared(file: io.FileIO) -> None:
    """Waits for whoever is deleting it, which takes a moment."""
    for _ in range(_LOCK_TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        time.sleep(_LOCK_PAUSE_SECONDS)
    raise OSError(errno.EBUSY, "somebody has been deleting it for too long")


def _is_at(file: io.FileIO, name: str, folder: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


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
