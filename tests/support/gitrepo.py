"""Real git repositories for the tests: commits by `git fast-import`, as fast as they can be made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.parts import used

MAIN = "refs/heads/main"


class GitRepo:
    """A bare repository. A commit is given by what it changes: `None` deletes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)
        self.run("init", "--quiet", "--bare", "--initial-branch=main", str(folder))
        used("git", f"real: {self.run('--version').split()[-1]}")

    def commit(
        self,
        message: str | bytes = "a change",
        files: Mapping[str, bytes | str | None] | None = None,
        *,
        ref: str = MAIN,
        parents: Sequence[str] | None = None,
        date: int = 1_700_000_000,
        author: bytes = b"Ada <ada@example.org>",
        more: bytes = b"",
    ) -> str:
        """One more commit on a ref; its id. `parents` None: on top of what the ref has."""
        before = [self.tip(ref)] if self.tip(ref) else []
        told = before if parents is None else list(parents)
        said = message.encode() if isinstance(message, str) else message
        lines = [
            b"commit %s\nauthor %s %d +0000\ncommitter %s %d +0000\n"
            % (b"refs/heads/being-made", author, date, author, date),
            b"data %d\n%s\n" % (len(said), said),
            *(b"%s %s\n" % (b"merge" if n else b"from", sha.encode()) for n, sha in enumerate(told)),
            *(_change(name, content) for name, content in (files or {}).items()),
            more,
        ]
        stream = b"".join([b"reset refs/heads/being-made\n\n", *lines])
        subprocess.run(
            ["git", "fast-import", "--quiet", "--force"], cwd=self.folder, input=stream, check=True
        )
        sha = self.tip("refs/heads/being-made")
        self.run("update-ref", ref, sha)
        self.run("update-ref", "-d", "refs/heads/being-made")
        return sha

    def many(self, count: int) -> None:
        """So many commits on the main branch, in one go."""
        stream = b"".join(
            b"commit %s\ncommitter Ada <ada@example.org> %d +0000\ndata %d\n%s\n%s\n"
            % (MAIN.encode(), 1_600_000_000 + n, len(said), said, _change(f"src/f{n % 50}.py", f"{n}\n"))
            for n, said in ((n, b"Commit %d" % n) for n in range(count))
        )
        subprocess.run(["git", "fast-import", "--quiet"], cwd=self.folder, input=stream, check=True)

    def tip(self, ref: str) -> str:
        return self.run("for-each-ref", "--format=%(objectname)", ref).strip()

    def move(self, ref: str, sha: str | None) -> None:
        """A force-push; None deletes the ref."""
        self.run("update-ref", *(("-d", ref) if sha is None else (ref, sha)))

    def reachable(self) -> set[str]:
        return set(self.run("rev-list", "--branches", "--tags").split())

    def run(self, *words: str) -> str:
        where = {"GIT_DIR": self.url} if words[0] not in ("init", "--version") else {}
        environment = {**os.environ, **where}
        done = subprocess.run(["git", *words], capture_output=True, env=environment, check=True)
        return done.stdout.decode("utf-8", "replace")


def _change(name: str, content: bytes | str | None) -> bytes:
    quoted = b'"%s"' % name.encode("utf-8", "surrogateescape").replace(b"\n", b"\\n")
    if content is None:
        return b"D %s\n" % quoted
    raw = content.encode() if isinstance(content, str) else content
    return b"M 100644 inline %s\ndata %d\n%s\n" % (quoted, len(raw), raw)
