"""`/mcp`: the official protocol, both eras, and the specification's bare form on one path.

A POST whose body is `{"tool": ..., "arguments": ...}` is answered with the
tool's result itself; everything else is handed, unread, to the SDK. Stateless
with JSON replies, so any gateway answers any call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from engram.api import mcp_server
from engram.api.caller import caller_of
from engram.api.errors import reply_to
from engram.api.services import Services
from engram.api.tools import call
from engram.gateway.callers import Caller
from engram.kernel.errors import EngramError, InputError


class McpMount:
    """The ASGI endpoint of `/mcp`. `run` must be entered for as long as it serves.

    `serve` makes the SDK's server; the conformance tests give one that serves their fixtures too.
    """

    def __init__(
        self,
        services: Callable[[], Services],
        *,
        max_body_bytes: int,
        serve: mcp_server.Serve = mcp_server.server,
    ) -> None:
        self._services = services
        self._manager = StreamableHTTPSessionManager(
            app=serve(self._call_tool),
            json_response=True,
            stateless=True,
            max_request_body_size=max_body_bytes,
        )

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = _trimmed(scope)
        if scope["method"] != "POST":
            await self._manager.handle_request(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        bare = _bare_call(body)
        if bare is None:
            await self._manager.handle_request(scope, _replayed(body, receive), send)
        else:
            await (await self._answer(bare, caller_of(scope)))(scope, receive, send)

    async def _answer(self, bare: dict[str, Any], caller: Caller | None) -> JSONResponse:
        try:
            if set(bare) - {"tool", "arguments"} or not isinstance(bare["tool"], str):
                raise InputError('the bare form is {"tool": name, "arguments": {...}}')
            answer = await call(self._services(), bare["tool"], bare.get("arguments"), caller)
            return JSONResponse(answer.body, answer.status_code, headers=answer.headers)
        except EngramError as error:
            return reply_to(error)

    async def _call_tool(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        caller = caller_of(context.request.scope)
        answer = await call(self._services(), params.name, params.arguments, caller)
        return mcp_server.succeeded(answer.body)


def _trimmed(scope: Scope) -> Scope:
    """White space around a header's value is no part of it; the parser leaves what follows it."""
    return {**scope, "headers": [(name, value.strip(b" \t")) for name, value in scope["headers"]]}


def _bare_call(body: bytes) -> dict[str, Any] | None:
    """The bare form's object, or None for what is the SDK's to judge."""
    if body.startswith(b'{"jsonrpc"'):
        return None
    try:
        # Bounded in depth, unlike the standard library's.
        parsed = from_json(body)
    except ValueError:
        return None
    if isinstance(parsed, dict) and "tool" in parsed and "jsonrpc" not in parsed:
        return parsed
    return None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body again, once; after it whatever the connection has to say."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
