"""The bare composite behind the same HTTP and MCP libraries that engram uses; no guards, no checks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
import uvicorn
from fastapi import FastAPI
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.routing import Route

from benchmarks.bare.composite import memory_query, memory_store, pool, port

TOOLS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "memory_store": memory_store,
    "memory_query": memory_query,
}


async def call_tool(_: Any, params: Any) -> types.CallToolResult:
    result = await TOOLS[params.name](**params.arguments)
    text = types.TextContent(type="text", text=json.dumps(result))
    return types.CallToolResult(content=[text], structured_content=result)


server = Server("bare", on_call_tool=call_tool)
manager = StreamableHTTPSessionManager(app=server, json_response=True, stateless=True)


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> Any:
    async with pool, manager.run():
        yield


class Mcp:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await manager.handle_request(scope, receive, send)


app = FastAPI(lifespan=lifespan)
app.router.routes.append(Route("/mcp", endpoint=Mcp()))


@app.post("/memory/store")
async def store(asked: dict[str, Any]) -> dict[str, Any]:
    return await memory_store(**asked)


@app.post("/memory/query")
async def query(asked: dict[str, Any]) -> dict[str, Any]:
    return await memory_query(**asked)


uvicorn.run(app, port=int(port), loop="uvloop", http="httptools", log_level="warning", access_log=False)
