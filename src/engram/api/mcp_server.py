"""engram as an MCP client sees it: its tools, its results and its errors, alike over HTTP and stdio."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
from mcp.server.lowlevel.server import Server

from engram import __version__
from engram.api.errors import envelope_of, unexpected
from engram.api.tools import TOOLS, Tool
from engram.kernel.errors import EngramError

INSTRUCTIONS = (
    "engram is this team's long-term memory. Query it before unfamiliar work; store what was "
    "learned, one fact per memory. A deferred store is safe: it will be delivered."
)

Perform = Callable[[Any, types.CallToolRequestParams], Awaitable[types.CallToolResult]]
Serve = Callable[[Perform], Server[Any]]


def server(perform: Perform) -> Server[Any]:
    """The SDK's server for both eras. `perform` runs a call; what it raises becomes the call's answer."""

    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in TOOLS.values()])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            return await perform(context, params)
        except EngramError as error:
            return failed(envelope_of(error))
        except Exception as error:  # noqa: BLE001 - the protocol wants an answer to every call
            return failed(envelope_of(unexpected(error)))

    return Server(
        "engram",
        version=__version__,
        title="engram",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema=lambda name: TOOLS[name].input_schema if name in TOOLS else None,
    )


def succeeded(result: dict[str, Any]) -> types.CallToolResult:
    return types.CallToolResult(content=[_text(result)], structured_content=result)


def failed(envelope: dict[str, Any]) -> types.CallToolResult:
    return types.CallToolResult(content=[_text(envelope)], is_error=True)


def _described(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        annotations=types.ToolAnnotations(
            title=tool.title,
            read_only_hint=tool.read_only,
            destructive_hint=tool.destructive,
            idempotent_hint=tool.repeatable,
            open_world_hint=False,
        ),
    )


def _text(value: dict[str, Any]) -> types.TextContent:
    return types.TextContent(type="text", text=json.dumps(value, ensure_ascii=False))
