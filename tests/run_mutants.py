"""Sabotage the code one line at a time; fail if any sabotage goes unnoticed.

    python tests/run_mutants.py [name ...]

Each entry of `mutants.toml` names a file, an anchor, what to find after it and
what to put there, and the tests that must then fail. The work is done on a
copy; the tree is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "docs", "pyproject.toml")


def load() -> list[dict]:
    return tomllib.loads((ROOT / "tests/mutants.toml").read_text("utf-8"))["mutant"]


def sabotaged(text: str, mutant: dict) -> str:
    """`text` with the mutant's change; refuses one that does not apply exactly."""
    at = text.find(mutant["after"]) if "after" in mutant else 0
    if at < 0 or text.find(mutant["find"], at) < 0:
        raise ValueError(f"{mutant['name']}: does not apply to {mutant['file']}")
    at = text.find(mutant["find"], at)
    return text[:at] + mutant["replace"] + text[at + len(mutant["find"]) :]


def survives(mutant: dict, copy: Path) -> bool:
    """Run the mutant's tests on the sabotaged copy: True if they still pass."""
    path = copy / mutant["file"]
    original = path.read_text("utf-8")
    path.write_text(sabotaged(original, mutant), "utf-8")
    try:
        return _pytest(copy, mutant["tests"]) == 0
    finally:
        path.write_text(original, "utf-8")


def _pytest(copy: Path, tests: list[str]) -> int:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "60",
        *tests,
    ]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest could not run {tests}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return done.returncode


def main() -> int:
    wanted = set(sys.argv[1:])
    mutants = [m for m in load() if not wanted or m["name"] in wanted]
    with tempfile.TemporaryDirectory(prefix="engram-mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        every_test = sorted({test for m in mutants for test in m["tests"]})
        print(f"{len(mutants)} mutants; first their {len(every_test)} tests on the honest code", flush=True)
        if _pytest(copy, every_test) != 0:
            sys.exit("the tests fail without any sabotage; mend that first")
        alive = [m["name"] for m in mutants if _told(m, copy)]
    print(
        f"{len(mutants) - len(alive)} killed, {len(alive)} survived"
        + (f": {', '.join(alive)}" if alive else "")
    )
    return 1 if alive else 0


def _told(mutant: dict, copy: Path) -> bool:
    started = time.monotonic()
    alive = survives(mutant, copy)
    print(
        f"  {'SURVIVED' if alive else 'killed  '} {mutant['name']} ({time.monotonic() - started:.1f} s)",
        flush=True,
    )
    return alive


if __name__ == "__main__":
    sys.exit(main())
