"""Recognises the caller of every request, after the guards and before the body is read.

With tokens every path needs one, whether it exists or not, but for the few in
`PUBLIC`, which say no more than that the gateway is there and what its source
says. Where no tokens are configured the gateway listens on loopback only and
everybody is the local user.

The Authorization header ends here: nothing further in sees it, so nothing
further in can log it.
"""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engram.api.caller import remember
from engram.api.errors import reply_to
from engram.api.tokens_file import TokensFile
from engram.gateway.callers import HOW_TO_SEND, LOCAL, Caller
from engram.kernel.errors import Unauthenticated
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

# For probes, which have no token, and for a browser, which cannot send one with a page.
PUBLIC = frozenset({"/health", "/readyz", "/docs", "/openapi.json"})

_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]{1,512}=*)", re.IGNORECASE | re.ASCII)


class Authenticated:
    """`tokens` None: everybody is the local user."""

    def __init__(self, app: ASGIApp, *, tokens: TokensFile | None = None) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._recognise(scope)
            except Unauthenticated as refused:
                log.info("caller.refused", extra=fields(why=refused.message))
                await reply_to(refused)(scope, receive, send)
                return
            scope["headers"] = [h for h in scope["headers"] if h[0].lower() != b"authorization"]
        await self._app(scope, receive, send)

    def _recognise(self, scope: Scope) -> None:
        """Nobody is remembered on a public path: a tool that is reached by one does nothing."""
        if self._tokens is None:
            remember(scope, LOCAL)
        elif scope["path"] not in PUBLIC:
            remember(scope, _bearer(self._tokens, Headers(scope=scope).getlist("authorization")))


def _bearer(tokens: TokensFile, headers: list[str]) -> Caller:
    sent = _BEARER.fullmatch(headers[0]) if len(headers) == 1 else None
    if sent is None:
        raise Unauthenticated("this call needs a token", hint=HOW_TO_SEND)
    return tokens.recognise(sent[1])
