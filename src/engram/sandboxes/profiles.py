"""What a sandbox can read besides its own folder. Everything else on the host it cannot open."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")


@dataclass(frozen=True, slots=True)
class Profile:
    """`path` is where its programs are looked for."""

    readable: tuple[str, ...]
    path: tuple[str, ...]


def profiles(programs: Path, uid: int | None) -> Mapping[str, Profile]:
    """`default`: the system's programs, and `python` for certain. `shell`: the system's programs alone."""
    shell = Profile(_existing(SYSTEM), SYSTEM_PATH)
    prefix = sys.base_prefix if reachable(Path(sys.base_prefix), uid) else None
    more = (str(programs), *([prefix] if prefix else []))
    path = (str(programs), *SYSTEM_PATH, *([f"{prefix}/bin"] if prefix else []))
    return {"default": Profile((*shell.readable, *more), path), "shell": shell}


def link_python(programs: Path, uid: int | None) -> None:
    """`python`, whatever this system calls its own: engram's interpreter, or the system's if it is hidden."""
    programs.mkdir(mode=0o755, exist_ok=True)
    target = _python(uid)
    link = programs / "python"
    if target is None or (link.is_symlink() and os.readlink(link) == target):
        return
    draft = programs / f".python.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)


def reachable(path: Path, uid: int | None) -> bool:
    """Whether somebody else may go there: every folder on the way lets others through."""
    if uid is None:
        return True
    try:
        return all(folder.stat().st_mode & 0o001 for folder in (path.resolve(), *path.resolve().parents))
    except OSError:
        return False


def _python(uid: int | None) -> str | None:
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if reachable(own.parent, uid):
        return str(own)
    found = (Path(folder) / "python3" for folder in SYSTEM_PATH)
    return next((str(path) for path in found if path.exists()), None)


def _existing(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path for path in paths if os.path.exists(path))
