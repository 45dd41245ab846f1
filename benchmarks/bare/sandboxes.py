"""The bare ways: one commit, sandlock by itself, the same commands without any sandbox."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import sandlock  # type: ignore[import-untyped]

READABLE = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"]


@contextmanager
def committing(dsn: str) -> Iterator[Callable[[], None]]:
    """One row, one commit, each time it is called."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS bare (n bigint PRIMARY KEY, at timestamptz)")
        numbers = itertools.count(time.time_ns())

        def commit() -> None:
            connection.execute("INSERT INTO bare VALUES (%s, now())", [next(numbers)])

        yield commit


def run_true(folder: str) -> None:
    """`true` in a sandbox of the same kind, by the library alone."""
    box = sandlock.Sandbox(
        fs_readable=[path for path in READABLE if os.path.exists(path)],
        fs_writable=[folder, "/dev/null"],
        clean_env=True,
        cwd=folder,
        max_memory=512 << 20,
        max_processes=64,
    )
    if not box.run(["true"]).success:
        raise SystemExit("the bare sandbox did not run `true`")


def together_seconds(argv: list[str], count: int) -> float:
    """So many of the command at once, with nothing around them."""
    started = time.perf_counter()
    for process in [subprocess.Popen(argv, stdout=subprocess.DEVNULL) for _ in range(count)]:
        if process.wait():
            raise SystemExit("the bare command failed")
    return time.perf_counter() - started
