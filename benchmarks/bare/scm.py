"""The bare way: git's own commands on the same repository, their output thrown away."""

from __future__ import annotations

import subprocess
from pathlib import Path


def read_everything(repository: Path) -> None:
    _git("log", "--all", "--numstat", folder=repository)


def mirror(repository: Path, folder: Path) -> None:
    _git("clone", "--quiet", "--bare", str(repository), str(folder), folder=repository)


def find_nothing(repository: Path, folder: Path) -> None:
    _git("fetch", "--quiet", "--prune", str(repository), "+refs/heads/*:refs/heads/*", folder=folder)
    _git("for-each-ref", folder=folder)


def _git(*words: str, folder: Path) -> None:
    subprocess.run(["git", *words], cwd=folder, stdout=subprocess.DEVNULL, check=True)
