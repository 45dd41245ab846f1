"""Gives every request its correlation id, in the logs and in the reply's header.

Also the last line of defence: an error nobody handled becomes the one error
shape here, inside the guards, so that no reply ever lacks it.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.api.errors import reply_to, unexpected
from engram.kernel import correlation

HEADER = "x-correlation-id"


class Correlated:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        correlation_id = correlation.accept_or_new(Headers(scope=scope).get(HEADER))
        token = correlation.current.set(correlation_id)
        reply = _Reply(send, correlation_id)
        try:
            await self._app(scope, receive, reply.send)
        except Exception as error:
            if reply.started:
                raise
            await reply_to(unexpected(error))(scope, receive, reply.send)
        finally:
            correlation.current.reset(token)


class _Reply:
    def __init__(self, send: Send, correlation_id: str) -> None:
        self._send = send
        self._correlation_id = correlation_id
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            MutableHeaders(scope=message)[HEADER] = self._correlation_id
        await self._send(message)
