"""Tells people what nobody should have to look for: in the log, as a metric, to a webhook.

The webhook gets JSON in the background: of each kind one alert a minute at
most, the next one saying how many were held back. Whoever raises an alert
never waits for it and never learns that it could not be sent. An alert has no
payload of a memory and no secret in it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.logs import fields, hide
from engram.kernel.metrics import ALERTS
from engram.kernel.unfinished import Unfinished
from engram.web.guards import is_loopback

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
POST_SECONDS = 5.0
DRAIN_SECONDS = 2.0
MAX_UNSENT = 20


@dataclass(slots=True)
class _Quiet:
    """A kind that was told a moment ago: the last alert since then, and how many there were."""

    timer: asyncio.TimerHandle
    last: dict[str, Any] = field(default_factory=dict)
    held: int = 0


class Alerts:
    """`webhook_url` None: the log and the metric only."""

    def __init__(self, webhook_url: str | None = None, *, quiet_seconds: float = QUIET_SECONDS) -> None:
        hide(webhook_url)
        self._url = webhook_url
        # A proxy from the environment must never see traffic to this machine.
        self._may_proxy = not is_loopback(urlsplit(webhook_url or "").hostname or "")
        self._quiet_seconds = quiet_seconds
        self._quiet: dict[str, _Quiet] = {}
        self._unsent = Unfinished()
        self._waiting = 0

    def raise_alert(self, kind: str, message: str, **facts: Any) -> None:
        """`kind` is one of few words; `facts` are ids, reasons and the next command, never content."""
        ALERTS.labels(kind).inc()
        log.error("alert.%s", kind, extra=fields(said=message, **facts))
        if self._url is None:
            return
        alert = {"kind": kind, "text": message, "facts": facts, "at": SYSTEM_CLOCK.now().isoformat()}
        if quiet := self._quiet.get(kind):
            quiet.last, quiet.held = alert, quiet.held + 1
        else:
            self._tell(alert, held_back=0)

    async def drain(self) -> None:
        """Send what is held back and wait for it, a little; for shutdown."""
        for quiet in list(self._quiet.values()):
            quiet.timer.cancel()
            if quiet.held:
                self._send(quiet.last, held_back=quiet.held - 1)
        self._quiet.clear()
        await self._unsent.drain(DRAIN_SECONDS)

    def _tell(self, alert: dict[str, Any], *, held_back: int) -> None:
        self._send(alert, held_back=held_back)
        timer = asyncio.get_running_loop().call_later(self._quiet_seconds, self._quiet_is_over, alert["kind"])
        self._quiet[alert["kind"]] = _Quiet(timer)

    def _quiet_is_over(self, kind: str) -> None:
        quiet = self._quiet.pop(kind)
        if quiet.held:
            self._tell(quiet.last, held_back=quiet.held - 1)

    def _send(self, alert: dict[str, Any], *, held_back: int) -> None:
        if self._waiting >= MAX_UNSENT:
            log.warning("alert.dropped", extra=fields(kind=alert["kind"]))
            return
        self._waiting += 1
        self._unsent.spawned(self._post({**alert, "host": socket.gethostname(), "held_back": held_back}))

    async def _post(self, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(POST_SECONDS), httpx2.AsyncClient(trust_env=self._may_proxy) as http:
                (await http.post(self._url or "", json=body)).raise_for_status()
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, TimeoutError) as error:
            # Its words may have the address in them, and the address is a secret.
            log.warning("alert.not_sent", extra=fields(kind=body["kind"], error=type(error).__name__))
        finally:
            self._waiting -= 1


@asynccontextmanager
async def open_alerts(webhook_url: str | None) -> AsyncIterator[Alerts]:
    alerts = Alerts(webhook_url)
    try:
        yield alerts
    finally:
        await alerts.drain()
