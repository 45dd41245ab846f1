"""Recognises the caller of every request, after the guards and before the routes.

Where no tokens are configured the gateway listens on loopback only and everybody
is the local user.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from engram.api.caller import remember
from engram.gateway.callers import LOCAL


class Authenticated:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            remember(scope, LOCAL)
        await self._app(scope, receive, send)
