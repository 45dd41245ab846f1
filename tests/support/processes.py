"""Real `engram` commands as processes, ended by their pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx2

from engram.kernel.settings import Settings, described
from engram.supervisor import as_environment

T = TypeVar("T")
PATIENCE = 60.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "engram", *arguments]


def environment(settings: Settings | None = None, **more: str) -> dict[str, str]:
    """The machine's environment without engram's own variables, plus these."""
    ours = {setting.env for _, setting in described()} | {"ENGRAM_FAILPOINT", "ENGRAM_CONFIG"}
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return {**clean, **(as_environment(settings) if settings else {}), **more}


def run_engram(
    *arguments: str, env: Mapping[str, str], timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=dict(env), capture_output=True, text=True, timeout=timeout, check=False
    )


@contextmanager
def started(*arguments: str, env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, running; killed at the end if it still is."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(*arguments), env=dict(env), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code, or None if it still runs after so many seconds.

    Only time in which this process ran too counts: a machine that stands still delays
    both, and says nothing of how long the other takes.
    """
    step = 0.01
    for _ in range(round(seconds / step)):
        if process.poll() is not None:
            break
        time.sleep(step)
    return process.poll()


def eventually(look: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
    """Poll until `look` answers something true; fail saying what was waited for."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:.0f} s in vain for: {what}")


def answers(url: str) -> bool:
    try:
        return httpx2.get(url, trust_env=False, timeout=10).status_code == 200
    except httpx2.HTTPError:
        return False
