"""Private folders and files, and a server's folder made all at once or not at all.

What is made here can be read by its owner only. Root making something in
another user's folder makes it that user's, so that the user can still start
the server afterwards. Nothing outside the data folder is touched.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from engram.kernel.errors import EmbeddedError

MARKER = "engram.folder"
_UNFINISHED = ".unfinished-"


def make_private_folder(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        give_to_owner_of(path.parent, path)


def open_private(path: Path, flags: int) -> int:
    """Open for our eyes only, made when missing; never handed on to a program we start."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    give_to_owner_of(path.parent, path)
    return fd


def write_private(path: Path, text: str) -> None:
    """Replace the file's text; a reader or a crash sees the old text or the new one."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(fd)
        give_to_owner_of(path.parent, Path(name))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def give_to_owner_of(folder: Path, path: Path) -> None:
    if os.geteuid() == 0 and (owner := folder.stat()).st_uid != 0:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def make_at_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a sibling folder and rename it into place. Call it with the start lock held."""
    remove_unfinished(folder)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name + _UNFINISHED, dir=folder.parent))
    try:
        give_to_owner_of(folder.parent, unfinished)
        fill(unfinished)
        write_private(unfinished / MARKER, "made by engram; do not edit what is in here by hand\n")
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _sync(folder.parent)


def remove_unfinished(folder: Path) -> None:
    for left in folder.parent.glob(folder.name + _UNFINISHED + "*"):
        shutil.rmtree(left, ignore_errors=True)


def is_missing_or_empty(folder: Path) -> bool:
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


def require_ours(folder: Path) -> None:
    if not (folder / MARKER).is_file():
        raise EmbeddedError(
            f"{folder} exists, is not empty and was not made by engram; it was left as it is",
            hint="move it away, or point ENGRAM_DATA_DIR at another folder",
        )


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
