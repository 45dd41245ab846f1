"""Subversion for the tests: real repositories, made and changed by its own programs.

Where it is missing and this user may install it, it is installed; elsewhere
its tests fail and say so.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SECONDS = 300


def required() -> None:
    """Have `svn` and `svnadmin` on this machine, or raise saying how to get them."""
    from support.parts import used

    install_where_allowed()
    if not _there():
        raise RuntimeError("the tests of Subversion need `svn` and `svnadmin`: install `subversion`")
    version = subprocess.run(["svn", "--version", "--quiet"], capture_output=True, text=True, check=True)
    used("Subversion", f"real: {version.stdout.strip()}")


def install_where_allowed() -> None:
    if not _there() and os.geteuid() == 0 and shutil.which("apt-get"):
        with (Path(tempfile.gettempdir()) / "engram-subversion.lock").open("w") as lock:
            # One at a time: test processes start together.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _there():
                _install()


def _there() -> bool:
    return all(map(shutil.which, ("svn", "svnadmin")))


def _install() -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", "subversion"]):
        subprocess.run(
            ["apt-get", *words], env=environment, capture_output=True, timeout=SECONDS, check=False
        )


class SvnRepo:
    """A repository in a folder, changed without a working copy."""

    def __init__(self, folder: Path) -> None:
        required()
        self.folder = folder
        self.url = folder.as_uri()
        subprocess.run(["svnadmin", "create", str(folder)], check=True)
        # Lets revision properties be taken away.
        hook = folder / "hooks" / "pre-revprop-change"
        hook.write_text("#!/bin/sh\nexit 0\n")
        hook.chmod(0o755)

    def put(self, name: str, content: bytes | str, message: str = "a change") -> None:
        file = self.folder.parent / "content"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        self.svnmucc("put", str(file), name, message=message)

    def many(self, count: int) -> None:
        """So many revisions in one go, each with a file."""
        dump = b"SVN-fs-dump-format-version: 2\n\n" + b"".join(map(_dumped, range(1, count + 1)))
        words = ["svnadmin", "load", "--quiet", "--no-flush-to-disk", str(self.folder)]
        subprocess.run(words, input=dump, check=True, capture_output=True)

    def copy(self, old: str, new: str, message: str) -> None:
        self.svnmucc("cp", "HEAD", old, new, message=message)

    def forget_author(self, revision: int) -> None:
        for name in ("svn:author", "svn:date"):
            self._run("svn", "propdel", "--revprop", "-r", str(revision), name, self.url)

    def svnmucc(self, *words: str, message: str) -> None:
        self._run("svnmucc", "-U", self.url, "-m", message, *words)

    def _run(self, *words: str) -> None:
        subprocess.run([*words], check=True, capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"})


def _dumped(number: int) -> bytes:
    said = b"Revision %d" % number
    properties = b"K 7\nsvn:log\nV %d\n%s\nPROPS-END\n" % (len(said), said)
    size = len(properties)
    return (
        b"Revision-number: %d\nProp-content-length: %d\nContent-length: %d\n\n%s\n"
        b"Node-path: f%d\nNode-kind: file\nNode-action: add\nText-content-length: 2\n"
        b"Content-length: 2\n\n1\n\n\n" % (number, size, size, properties, number)
    )


if __name__ == "__main__":
    install_where_allowed()
