"""Installs the other queues under `.bench/` (once) and measures each on the same server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import fresh_database
from engram.embedded import EmbeddedPostgres

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".bench"
GRAPHILE = "graphile-worker@0.18.0"


def install() -> list[str]:
    """The queues that can be had here."""
    python = FOLDER / "venv/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "venv")], check=True)
        lock = HERE.parents[1] / "requirements/rivals.txt"
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--require-hashes", "-r", str(lock)], check=True
        )
    available = ["pgqueuer", "procrastinate"]
    if shutil.which("npm"):
        if not (FOLDER / "node/node_modules/graphile-worker").exists():
            npm = [
                "npm",
                "install",
                "--silent",
                "--no-audit",
                "--no-fund",
                "--prefix",
                str(FOLDER / "node"),
                GRAPHILE,
            ]
            subprocess.run(npm, check=True)
        available.append("graphile-worker")
    return available


def rate(name: str, server: EmbeddedPostgres, jobs: int) -> float:
    with fresh_database(server, "rival") as dsn:
        if name == "graphile-worker":
            script = FOLDER / "node/graphile_drain.mjs"
            shutil.copy(HERE / "graphile_drain.mjs", script)
            socket_folder = dsn.split("host='")[1].split("'")[0]
            command = ["node", str(script), socket_folder, "rival", str(jobs)]
        else:
            url = _url(dsn)
            command = [str(FOLDER / "venv/bin/python"), str(HERE / f"{name}_drain.py"), url, str(jobs)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-500:]}{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def _url(dsn: str) -> str:
    """The DSN as a URL, which every driver takes."""
    from urllib.parse import quote

    host = dsn.split("host='")[1].split("'")[0]
    return f"postgresql://engram@/rival?host={quote(host, safe='')}"
