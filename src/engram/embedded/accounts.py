"""As whom a server runs.

PostgreSQL refuses to run as root. When root starts it in a folder of root's,
it runs in a user namespace of its own, where root's uid is called 1000; in a
folder that belongs to somebody else, it runs as that somebody. No user is
added and no permission changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.kernel.errors import EmbeddedError

_NAMESPACE = ("--user", "--map-user=1000", "--")
_HINT = (
    "run engram as an ordinary user, or set POSTGRES_DSN to a PostgreSQL of your own, "
    "or let an ordinary user own the data folder (ENGRAM_DATA_DIR)"
)


@dataclass(frozen=True, slots=True)
class Account:
    """`prefix` goes before the command; uid and gid, when given, are switched to."""

    prefix: tuple[str, ...] = ()
    uid: int | None = None
    gid: int | None = None

    def options(self) -> dict[str, Any]:
        if self.uid is None:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


def account_for(data_dir: Path, *, root_is_refused: bool) -> Account:
    owner = data_dir.stat()
    if os.geteuid() != 0:
        return Account()
    if owner.st_uid != 0:
        return Account(uid=owner.st_uid, gid=owner.st_gid)
    return Account(prefix=_user_namespace()) if root_is_refused else Account()


def _user_namespace() -> tuple[str, ...]:
    """`unshare` replaces itself by the command, so the pid stays the server's."""
    unshare = shutil.which("unshare")
    if unshare is None:
        raise EmbeddedError("PostgreSQL does not run as root, and there is no `unshare` program", hint=_HINT)
    prefix = (unshare, *_NAMESPACE)
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    if tried.returncode:
        raise EmbeddedError(
            f"PostgreSQL does not run as root, and user namespaces do not work here: {tried.stderr.strip()}",
            hint=_HINT,
        )
    return prefix
