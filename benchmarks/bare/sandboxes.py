"""The bare ways: one commit, sandlock by itself, the same commands without any sandbox."""

from __future__ import annotations

import os
import subprocess
import time

import psycopg
import sandlock

READABLE = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"]


def commit_seconds(dsn: str, count: int) -> float:
    """One row, one commit: the mean of so many."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS bare (n bigint PRIMARY KEY, at timestamptz)")
        first = time.time_ns()
        started = time.perf_counter()
        for n in range(count):
            connection.execute("INSERT INTO bare VALUES (%s, now())", [first + n])
        return (time.perf_counter() - started) / count


def true_seconds(folder: str, count: int) -> float:
    """`true` in a sandbox of the same kind, by the library alone."""
    readable = [path for path in READABLE if os.path.exists(path)]
    started = time.perf_counter()
    for _ in range(count):
        box = sandlock.Sandbox(
            fs_readable=readable,
            fs_writable=[folder, "/dev/null"],
            clean_env=True,
            cwd=folder,
            max_memory=512 << 20,
            max_processes=64,
        )
        if not box.run(["true"]).success:
            raise SystemExit("the bare sandbox did not run `true`")
    return (time.perf_counter() - started) / count


def together_seconds(argv: list[str], count: int) -> float:
    """So many of the command at once, with nothing around them."""
    started = time.perf_counter()
    for process in [subprocess.Popen(argv, stdout=subprocess.DEVNULL) for _ in range(count)]:
        if process.wait():
            raise SystemExit("the bare command failed")
    return time.perf_counter() - started
