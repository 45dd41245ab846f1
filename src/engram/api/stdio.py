"""`engram mcp`: the protocol is spoken here, the work is done by the gateway.

A call goes to the gateway in the bare form and comes back as the gateway would
have answered it, so a tool is the same whichever way it is reached. Nothing is
kept here: this process may be killed at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import mcp_types as types
from mcp.server.lowlevel.server import Server

from engram.api import mcp_server
from engram.api.tools import TOOLS
from engram.kernel.errors import ConfigError, GatewayUnavailable
from engram.kernel.settings import Settings
from engram.web.guards import is_loopback

CALL_SECONDS = 60.0
CONNECT_SECONDS = 5.0
# Less than the five seconds after which the gateway closes an idle connection.
IDLE_SECONDS = 2.0

NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout)

Find = Callable[[], Awaitable[None]]


class Bridge:
    """Hands calls to the gateway. `find` returns once a gateway answers, or raises why none does."""

    def __init__(self, http: httpx2.AsyncClient, find: Find) -> None:
        self._http = http
        self._find = find
        self._found = False
        self._search: asyncio.Task[None] | None = None

    def server(self) -> Server[Any]:
        return mcp_server.server(self._call_tool)

    async def find(self) -> None:
        """Look for the gateway; all who ask meanwhile share one search and its outcome."""
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._searched())
            self._search.add_done_callback(_seen)
        await asyncio.shield(self._search)

    async def _searched(self) -> None:
        self._found = False
        await self._find()
        self._found = True

    async def _call_tool(self, _: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Nothing is sent before somebody was recognised as engram at that address."""
        if not self._found:
            await self.find()
        try:
            return await self._sent(params)
        except NOT_SENT:
            # Nobody got it, so it may be sent again.
            await self.find()
        try:
            return await self._sent(params)
        except NOT_SENT as error:
            raise GatewayUnavailable(
                f"the gateway at {self._http.base_url} is gone again; the call was not sent",
                hint="repeat the call; `engram doctor` tells what is wrong",
            ) from error

    async def _sent(self, params: types.CallToolRequestParams) -> types.CallToolResult:
        call = {"tool": params.name, "arguments": params.arguments}
        try:
            reply = await self._http.post("/mcp", json=call)
        except NOT_SENT:
            raise
        except httpx2.HTTPError as error:
            raise GatewayUnavailable(
                f"the gateway at {self._http.base_url} gave no answer to this call ({type(error).__name__}); "
                "it may or may not have taken effect",
                hint=_how_to_repeat(params),
            ) from error
        return self._shaped(reply)

    def _shaped(self, reply: httpx2.Response) -> types.CallToolResult:
        try:
            body = reply.json()
        except ValueError:
            body = None
        if isinstance(body, dict) and reply.is_success:
            return mcp_server.succeeded(body)
        if isinstance(body, dict) and "error_code" in body:
            return mcp_server.failed(body)
        self._found = False
        raise GatewayUnavailable(
            f"what answered at {self._http.base_url} with status {reply.status_code} is not engram",
            hint="check GATEWAY_HOST and GATEWAY_PORT",
        )


def _how_to_repeat(params: types.CallToolRequestParams) -> str:
    tool = TOOLS.get(params.name)
    if tool is None or tool.repeatable or (params.arguments or {}).get("idempotency_key"):
        return "repeat the call as it was: it takes effect once"
    return "look whether it did before you repeat it; with an idempotency_key a repeat takes effect once"


@asynccontextmanager
async def bridged(settings: Settings, find: Find) -> AsyncIterator[Bridge]:
    async with httpx2.AsyncClient(
        base_url=settings.gateway_url,
        headers=_headers(settings),
        timeout=httpx2.Timeout(CALL_SECONDS, connect=CONNECT_SECONDS),
        limits=httpx2.Limits(keepalive_expiry=IDLE_SECONDS),
        trust_env=not is_loopback(settings.gateway_host),
    ) as http:
        yield Bridge(http, find)


def _headers(settings: Settings) -> dict[str, str]:
    token = settings.token
    if token is None:
        return {}
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("ENGRAM_TOKEN: has characters that no token has")
    return {"Authorization": f"Bearer {token}"}


def _seen(search: asyncio.Task[None]) -> None:
    """Whoever asked may be gone; an error that nobody awaits is no news to the event loop."""
    if not search.cancelled():
        search.exception()
