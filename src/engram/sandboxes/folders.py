"""A sandbox's folder on this host, and files in it by paths that strangers name.

    <root>/<id>/work    what the commands see; theirs to write
    <root>/<id>/alive   there as long as commands may run

The inside is hostile: whoever writes there may put a link anywhere at any
moment. Paths are therefore resolved by the kernel, beneath the folder and with
no link followed at all; what is opened is looked at before it is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import InputError, NotFound, SandboxUnavailable

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# One that is nobody's, to see whether any can be: no row has its name, so it must not look like an id.
_PROBE = re.compile(r"\.probe-[0-9a-f]{16}")
# Longer than any probe takes.
PROBE_SECONDS = 600.0
MAX_PATH_CHARS = 1024
MAX_PATH_PARTS = 64

_OPENAT2 = 437
_BENEATH_WITHOUT_LINKS = 0x08 | 0x04 | 0x02  # RESOLVE_BENEATH, _NO_SYMLINKS, _NO_MAGICLINKS
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


class Folders:
    """`uid` None: what is made belongs to whoever runs this."""

    def __init__(self, root: Path, uid: int | None) -> None:
        self.root = root
        self._uid = uid

    def work(self, sandbox_id: str) -> Path:
        return self._folder(sandbox_id) / "work"

    def alive(self, sandbox_id: str) -> Path:
        return self._folder(sandbox_id) / "alive"

    def prepare(self) -> None:
        """The root of all; its folders can be entered, not listed, by others."""
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        for folder in reversed(missing):
            _make(folder, 0o711)
        found = self.root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise SandboxUnavailable(
                f"{self.root} is not a folder of ours", hint="set ENGRAM_SANDBOX_DIR to another one"
            )

    def make(self, sandbox_id: str) -> None:
        """Whole once `alive` is there; what an earlier try left is gone on with."""
        self.prepare()
        folder, work = self._folder(sandbox_id), self.work(sandbox_id)
        _make(folder, 0o711)
        _make(work, 0o700)
        if self._uid is not None:
            os.chown(work, self._uid, self._uid, follow_symlinks=False)
        self.alive(sandbox_id).touch()

    def has(self, sandbox_id: str) -> bool:
        return self.work(sandbox_id).is_dir() and self.alive(sandbox_id).exists()

    def exists(self, sandbox_id: str) -> bool:
        return self.work(sandbox_id).is_dir()

    def stop(self, sandbox_id: str) -> None:
        self.alive(sandbox_id).unlink(missing_ok=True)

    def remove(self, sandbox_id: str) -> None:
        """Out of the way first, so that nothing runs there; then gone."""
        doomed = self.root / f".gone-{sandbox_id}-{secrets.token_hex(4)}"
        try:
            self._folder(sandbox_id).rename(doomed)
        except FileNotFoundError:
            return
        _erase(doomed)

    def remove_leftovers(self) -> int:
        """What a removal or a probe that was killed left."""
        left = [path for path in self._entries() if path.name.startswith(".gone-") or _is_old_probe(path)]
        for path in left:
            _erase(path)
        return len(left)

    def ids(self) -> list[str]:
        return [path.name for path in self._entries() if ID.fullmatch(path.name)]

    def read(self, sandbox_id: str, path: str) -> BinaryIO:
        """A plain file, opened."""
        with self._opened(sandbox_id) as work:
            fd = _beneath(work, _checked(path), os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InputError(f"{path!r} is not a file", fields={"path": "must name a plain file"})
        return os.fdopen(fd, "rb", buffering=0)

    @contextmanager
    def writing(self, sandbox_id: str, path: str) -> Iterator[int]:
        """A descriptor to write to; the file is there, whole, when the block has ended well."""
        *above, name = _checked(path).split("/")
        draft = f".{secrets.token_hex(8)}.part"
        with self._opened(sandbox_id) as work, self._made(work, above) as folder:
            fd = _drafted(draft, folder, path)
            try:
                self._give(fd)
                yield fd
                _renamed(draft, name, folder, path)
            except BaseException:
                _unlinked(draft, folder)
                raise
            finally:
                os.close(fd)

    def delete(self, sandbox_id: str, path: str) -> None:
        """A file; or a link itself, never what it points to."""
        above, _, name = _checked(path).rpartition("/")
        with self._opened(sandbox_id) as work:
            folder = _beneath(work, above or ".", _FOLDER)
        try:
            os.unlink(name, dir_fd=folder)
        except OSError as error:
            raise told(error, path) from error
        finally:
            os.close(folder)

    @contextmanager
    def _opened(self, sandbox_id: str) -> Iterator[int]:
        try:
            fd = os.open(self.work(sandbox_id), _FOLDER | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise not_here(sandbox_id) from error
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _made(self, work: int, above: list[str]) -> Iterator[int]:
        """The folder in which a file is to be, each of those above it made if it is missing."""
        folder = os.dup(work)
        try:
            for number in range(len(above)):
                beyond = "/".join(above[: number + 1])
                try:
                    os.mkdir(above[number], 0o755, dir_fd=folder)
                    made = True
                except FileExistsError:
                    made = False
                except OSError as error:
                    raise told(error, beyond) from error
                deeper = _beneath(work, beyond, _FOLDER)
                os.close(folder)
                folder = deeper
                if made:
                    self._give(folder)
            yield folder
        finally:
            os.close(folder)

    def _give(self, fd: int) -> None:
        if self._uid is not None:
            os.fchown(fd, self._uid, self._uid)

    def _folder(self, sandbox_id: str) -> Path:
        if not (ID.fullmatch(sandbox_id) or _PROBE.fullmatch(sandbox_id)):
            raise not_here(sandbox_id)
        return self.root / sandbox_id

    def _entries(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def probe_name() -> str:
    return f".probe-{secrets.token_hex(8)}"


def _is_old_probe(path: Path) -> bool:
    if not _PROBE.fullmatch(path.name):
        return False
    with suppress(FileNotFoundError):
        return SYSTEM_CLOCK.now().timestamp() - path.lstat().st_mtime > PROBE_SECONDS
    return False


def not_here(sandbox_id: str) -> NotFound:
    return NotFound(f"sandbox {sandbox_id} is not on this host", hint="ask the gateway that runs where it is")


def _make(folder: Path, mode: int) -> None:
    """With this very mode, whatever the umask; one that is there is left as it is."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    folder.chmod(mode)


def _checked(path: str) -> str:
    parts = path.split("/")
    if (
        not path
        or len(path) > MAX_PATH_CHARS
        or len(parts) > MAX_PATH_PARTS
        or "\x00" in path
        or any(part in ("", ".", "..") or len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts)
    ):
        raise InputError(
            "that is no path in a sandbox",
            fields={"path": "must be relative, without empty parts, '.' or '..'"},
        )
    return path


def _beneath(folder: int, path: str, flags: int) -> int:
    """Open `path` below `folder`: the kernel refuses `..` and every link on the way."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _BENEATH_WITHOUT_LINKS)
    while True:
        fd: int = _libc.syscall(
            _OPENAT2, folder, path.encode(), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
        )
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # somebody moved a folder meanwhile: again
            raise told(OSError(number, os.strerror(number)), path)


def _drafted(draft: str, folder: int, path: str) -> int:
    try:
        return os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    except OSError as error:
        raise told(error, path) from error


def _renamed(draft: str, name: str, folder: int, path: str) -> None:
    try:
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise told(error, path) from error


def _unlinked(draft: str, folder: int) -> None:
    """If it can be; what cannot goes with the sandbox, and counts until then."""
    with suppress(OSError):
        os.unlink(draft, dir_fd=folder)


def told(error: OSError, path: str) -> Exception:
    """For whoever named the path."""
    if error.errno == errno.ENOENT:
        return NotFound(f"there is no file {path!r} in the sandbox")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOSYS):
        return SandboxUnavailable(f"the sandbox's folder cannot be used: {error.strerror}")
    return InputError(
        f"{path!r} cannot be used: {error.strerror}",
        fields={"path": "must name a plain file, with no link on the way to it"},
    )


def _erase(folder: Path) -> None:
    """By the system's own program: a tree may be deeper than Python can follow."""
    if not _ran("/bin/rm", "-rf", "--", str(folder)):
        # It has a folder that its owner made unreadable to itself.
        _ran("/bin/chmod", "-R", "u+rwx", "--", str(folder))
        _ran("/bin/rm", "-rf", "--", str(folder))


def _ran(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
