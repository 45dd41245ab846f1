"""Finds the gateway; where there is none, starts `engram up` in the background and waits for it.

What is started stays: it has a session of its own, and other clients may come
to use it. Two that start at once end with one stack, because only one `up` can
have the folder's lock; the other waits for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from engram.embedded.folders import make_private_folder, open_private
from engram.embedded.locks import FileLock
from engram.embedded.logfile import LogFile
from engram.embedded.waiting import wait_for
from engram.kernel.errors import EmbeddedError, GatewayUnavailable
from engram.kernel.logs import redact
from engram.kernel.settings import Settings
from engram.web.guards import is_loopback

READY_SECONDS = 60.0
PROBE_SECONDS = 5.0
# Few and far between: each look is a call of the memory server.
SETTLE_TRIES, SETTLE_SECONDS = 10, 0.5


class Background:
    """`tell` gets lines for whoever reads the client's log."""

    def __init__(self, settings: Settings, *, may_start: bool, tell: Callable[[str], None]) -> None:
        self._url = settings.gateway_url
        self._is_here = is_loopback(settings.gateway_host)
        self._may_start = may_start and self._is_here
        self._data_dir = settings.data_dir
        self._log = LogFile(settings.data_dir / "logs" / "up.log")
        self._mark = 0
        self._tell = tell
        self.started: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Return when the gateway answers; raise what is wrong and what to do."""
        with httpx2.Client(timeout=PROBE_SECONDS, trust_env=not self._is_here) as http:
            if self._answers(http):
                return
            if not self._may_start:
                raise GatewayUnavailable(
                    f"no gateway answers at {self._url}", hint="start one with `engram up`"
                )
            self._start()
            self._wait(http)
            self._settle(http)
        self._tell(f"the gateway answers at {self._url}; {self._how_to_stop()}")

    def _wait(self, http: httpx2.Client) -> None:
        outcome = wait_for(lambda: self._outcome(http), READY_SECONDS, on_wait=self._waiting)
        if outcome == "failed":
            raise EmbeddedError(
                f"`engram up` ended: {redact(self._log.since(self._mark))}",
                hint=f"its log is {self._log.path}",
            )
        if outcome != "answers":
            raise GatewayUnavailable(
                f"no gateway answers at {self._url} after {READY_SECONDS:.0f} seconds",
                hint=f"repeat the call in a while; look into {self._log.path}; "
                f"is engram up on {self._data_dir} with another GATEWAY_PORT?",
            )

    def _outcome(self, http: httpx2.Client) -> str:
        if self._answers(http):
            return "answers"
        return "failed" if self._failed() else ""

    def _answers(self, http: httpx2.Client) -> bool:
        """Whether engram is there; nobody is a no, somebody else an error."""
        try:
            told = _object(http.get(f"{self._url}/health"))
        except httpx2.HTTPError:
            return False
        if told.get("ok") is True and "version" in told:
            return True
        raise GatewayUnavailable(
            f"what answers at {self._url} is not engram",
            hint="set GATEWAY_PORT to engram's port, or to a free one",
        )

    def _settle(self, http: httpx2.Client) -> None:
        """Let the memory server come up as well, so that the first store need not be parked."""
        for _ in range(SETTLE_TRIES):
            try:
                parts = _object(http.get(f"{self._url}/readyz")).get("capabilities")
            except httpx2.HTTPError:
                return
            if not isinstance(parts, dict) or parts.get("openmemory", "ok") == "ok":
                return
            time.sleep(SETTLE_SECONDS)

    def _start(self) -> None:
        if self._running():
            return
        self._log.cut()
        self._mark = self._log.size()
        try:
            make_private_folder(self._data_dir)
            make_private_folder(self._log.path.parent)
            self.started = _detached(self._log.path)
        except OSError as error:
            raise EmbeddedError(
                f"cannot start `engram up`: {error}", hint="check ENGRAM_DATA_DIR, or start it yourself"
            ) from error
        self._tell(f"no gateway answers at {self._url}; starting `engram up` (process {self.started.pid})")

    def _running(self) -> bool:
        return self.started is not None and self.started.poll() is None

    def _failed(self) -> bool:
        """Ours has ended, and nobody else is up on the folder."""
        return not self._running() and not _is_taken(self._data_dir / "up.lock")

    def _waiting(self, seconds: float) -> None:
        self._tell(f"waiting for engram to be up ({seconds:.0f} s); its log is {self._log.path}")

    def _how_to_stop(self) -> str:
        if self.started is None or not self._running():
            return "somebody else started it"
        return f"it stays up, stop it with `kill {self.started.pid}`; its log is {self._log.path}"


def _detached(log: Path) -> subprocess.Popen[bytes]:
    with open(open_private(log, os.O_WRONLY | os.O_APPEND), "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "engram", "up"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A client starts us in somebody's project: none of its modules may pass for ours.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )


def _object(reply: httpx2.Response) -> dict[str, Any]:
    """The reply's JSON object, or an empty one for anything else."""
    try:
        told = reply.json()
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _is_taken(path: Path) -> bool:
    """Whether somebody is up on the folder whose lock this is."""
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        return not lock.share()
    except OSError:
        return False
    finally:
        lock.drop()
