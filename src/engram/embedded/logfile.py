"""A server's log: appended to by the server, quoted in errors, kept from growing for ever."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

LIMIT_BYTES = 8 << 20

_QUOTED_BYTES = 4096
_QUOTED_LINES = 15


class LogFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def since(self, mark: int) -> str:
        """The last lines written after the file had `mark` bytes."""
        with suppress(OSError), self.path.open("rb") as handle:
            handle.seek(max(mark, self.size() - _QUOTED_BYTES))
            text = handle.read().decode(errors="replace").strip()
            return "\n".join(text.splitlines()[-_QUOTED_LINES:]) or "it wrote nothing to its log"
        return "it wrote no log"

    def cut(self) -> None:
        """Begin anew when too long, keeping one predecessor.

        The server has the file open and appends to it, so the text is copied
        and the file emptied: a renamed file would go on growing.
        """
        if self.size() > LIMIT_BYTES:
            with suppress(OSError):
                shutil.copyfile(self.path, self.path.with_suffix(".log.1"))
                self.path.with_suffix(".log.1").chmod(0o600)
                os.truncate(self.path, 0)
