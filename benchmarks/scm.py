"""Following a repository: a first sync against `git log --numstat`, one that finds nothing against git's own.

The repository is made by `git fast-import`. `ENGRAM_BENCH_COMMITS` makes it
smaller, to try the script. A first sync includes its mirror and every row and
watermark in PostgreSQL; the diffs are kept afterwards and are not part of it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.bare import scm as bare
from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from benchmarks.rivals import run as rivals
from engram.assembly.scm import Scm, open_scm
from engram.kernel.settings import Settings

COMMITS = int(os.environ.get("ENGRAM_BENCH_COMMITS", "50000"))
FILES = 2_000
# PyDriller is slow: a part of the commits is enough to know its pace.
RIVAL_COMMITS = 1_000


def make(folder: Path, commits: int) -> None:
    """A repository whose commits change three files each, in forty folders."""
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", str(folder)], check=True)
    importer = subprocess.Popen(["git", "fast-import", "--quiet"], cwd=folder, stdin=subprocess.PIPE)
    assert importer.stdin is not None
    for n in range(commits):
        said = f"Commit {n}\n\nBecause of reason {n}.\n".encode()
        who = b"Ada <ada@example.org> %d +0000" % (1_500_000_000 + n * 60)
        importer.stdin.write(b"commit refs/heads/main\ncommitter %s\ndata %d\n%s" % (who, len(said), said))
        for k in range(3):
            path = b"src/m%d/f%d.py" % ((n * 3 + k) % 40, (n * 7 + k) % FILES)
            text = b"".join(b"line %d of %d\n" % (line, n) for line in range(10))
            importer.stdin.write(b"M 100644 inline %s\ndata %d\n%s\n" % (path, len(text), text))
    importer.stdin.close()
    if importer.wait():
        raise SystemExit("git fast-import failed")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


async def synced(scm: Scm, url: str) -> float:
    """How long one sync takes, the connection being there already."""
    added = await scm.add("default", "git", url)
    (repo,) = await scm.repos([added["repo_id"]])
    started = time.perf_counter()
    await scm.sync(repo)
    return time.perf_counter() - started


def first_sync(settings: Settings, url: str) -> float:
    shutil.rmtree(settings.data_dir / "scm", ignore_errors=True)
    return asyncio.run(_with_scm(settings, url, times=1)).pop()


def nothing_new(settings: Settings, url: str) -> float:
    return asyncio.run(_with_scm(settings, url, times=2)).pop()


async def _with_scm(settings: Settings, url: str, times: int) -> list[float]:
    async with open_scm(settings) as scm:
        return [await synced(scm, url) for _ in range(times)]


def pydriller(repository: Path) -> float | None:
    """Seconds for all commits at its pace; None where it is not installed."""
    python = rivals.FOLDER / "venv/bin/python"
    if not python.exists():
        return None
    script = str(rivals.HERE / "pydriller_walk.py")
    words = [str(python), script, str(repository), str(RIVAL_COMMITS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  PyDriller failed: {done.stderr[-300:]}", file=sys.stderr)
        return None
    return COMMITS / float(done.stdout)


def main() -> None:
    print(f"scm: {COMMITS:,} commits")
    with tempfile.TemporaryDirectory(prefix="engram-bench-scm-") as folder, database_server() as server:
        repository, mirror = Path(folder) / "origin.git", Path(folder) / "mirror.git"
        make(repository, COMMITS)
        bare.mirror(repository, mirror)
        settings = replace(Settings.load({}), data_dir=Path(folder) / "data")

        def sync() -> float:
            with fresh_database(server) as dsn:
                return first_sync(replace(settings, postgres_dsn=dsn), str(repository))

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        values = alternate(
            git_log_numstat=lambda: seconds(lambda: bare.read_everything(repository)), engram=sync
        )
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        with fresh_database(server) as dsn:
            ours = replace(settings, postgres_dsn=dsn)
            first_sync(ours, str(repository))
            idle = alternate(
                git_fetch_and_refs=lambda: seconds(lambda: bare.find_nothing(repository, mirror)),
                engram_idle=lambda: nothing_new(ours, str(repository)),
            )
        rivals.install()
        if (rival := pydriller(repository)) is not None:
            values["pydriller (by its pace)"] = [rival]
    for name, measured in {**values, **idle}.items():
        told(name.replace("_", " "), measured, "s")
    print(f"  memory grew by {grown / 1024:.0f} MiB")
    verdict("first sync against git log --numstat", median(values["engram"]) / median(values["git_log_numstat"]), 3, at_most=True)  # fmt: skip
    ratio = median(idle["engram_idle"]) / median(idle["git_fetch_and_refs"])
    verdict("a sync that finds nothing against git fetch + for-each-ref", ratio, 3, at_most=True)


if __name__ == "__main__":
    main()
