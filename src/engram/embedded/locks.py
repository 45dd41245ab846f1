"""A file lock the kernel drops when its holder dies, however it dies.

`flock` belongs to an open file, not to a process: every `FileLock` opens its
own, so two objects of one process count as two holders. The file is opened
close-on-exec, or a server we start would hold our lock for as long as it runs.
Lock files are never deleted: two processes would then lock two different files.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from engram.embedded.folders import open_private


class FileLock:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._holder = 0

    @property
    def held(self) -> bool:
        return self._fd is not None

    @property
    def inherited(self) -> bool:
        """A forked child has a copy of its parent's lock, and must not act on it."""
        return self.held and self._holder != os.getpid()

    def fileno(self) -> int:
        if self._fd is None:
            raise ValueError(f"{self.path} is not locked")
        return self._fd

    def share(self) -> bool:
        return self._take(fcntl.LOCK_SH)

    def make_exclusive(self) -> bool:
        """From free or shared to exclusive; when somebody else has it, ours is gone too."""
        return self._take(fcntl.LOCK_EX)

    def drop(self) -> None:
        """Let go, for copies that our forked children have as well; a child only closes its copy."""
        if self._fd is not None:
            if not self.inherited:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def _take(self, kind: int) -> bool:
        if self.inherited:
            self.drop()
        if self._fd is None:
            self._fd = open_private(self.path, os.O_RDWR)
            self._holder = os.getpid()
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self.drop()
            return False
        except BaseException:
            self.drop()
            raise
        return True
