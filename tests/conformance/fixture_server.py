"""engram's own MCP server, serving what the conformance suite asks for as well.

Only the fixtures are added: the mount, the guards, the correlation ids and the
tokens in front of it are engram's, and its own tools stay.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata

from conformance.asking_fixtures import PROMPT, ROUNDS, asking_prompt, asking_tool, form, sample
from engram.api import mcp_server

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="

Fixture = Callable[[Any, types.CallToolRequestParams], Awaitable[Any]]


def serve(perform: mcp_server.Perform) -> Server[Any]:
    """For `McpMount`, in the place of `mcp_server.server`."""

    async def fixture_or_tool(context: Any, params: types.CallToolRequestParams) -> Any:
        return await FIXTURES.get(params.name, perform)(context, params)

    server = mcp_server.server(fixture_or_tool)
    own_tools, own_schema = server.get_request_handler("tools/list"), server.get_tool_input_schema

    async def list_tools(context: Any, params: types.PaginatedRequestParams) -> types.ListToolsResult:
        listed = await own_tools.handler(context, params)
        return types.ListToolsResult(tools=[*listed.tools, *map(described, FIXTURES)])

    server.add_request_handler("tools/list", types.PaginatedRequestParams, list_tools)
    server.get_tool_input_schema = lambda name: SCHEMAS.get(name) or own_schema(name)
    server.middleware.append(
        RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience="engram")
    )
    server.middleware.append(needing_a_capability)
    for method, (params, handler) in PROMPTS_AND_RESOURCES.items():
        server.add_request_handler(method, params, handler)
    return server


def described(name: str) -> types.Tool:
    return types.Tool(name=name, description="A fixture.", input_schema=SCHEMAS.get(name, {"type": "object"}))


def text(said: str) -> types.TextContent:
    return types.TextContent(type="text", text=said)


def image() -> types.ImageContent:
    return types.ImageContent(type="image", data=PNG, mime_type="image/png")


def contents(uri: str, said: str, mime_type: str = "text/plain") -> types.TextResourceContents:
    return types.TextResourceContents(uri=uri, mime_type=mime_type, text=said)


def embedded(uri: str, said: str, mime_type: str = "text/plain") -> types.EmbeddedResource:
    return types.EmbeddedResource(type="resource", resource=contents(uri, said, mime_type))


# Tools


def answering(*content: types.ContentBlock) -> Fixture:
    async def answer(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return types.CallToolResult(content=list(content))

    return answer


async def failing(context: Any, params: types.CallToolRequestParams) -> Any:
    raise RuntimeError("This tool intentionally returns an error for testing")


async def progressing(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    for progress in (0, 50, 100):
        await context.session.report_progress(progress, 100)
    return types.CallToolResult(content=[text("done")])


async def logging_(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    for said in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        about = types.LoggingMessageNotificationParams(level="info", data=said)
        note = types.LoggingMessageNotification(params=about)
        await context.session.send_notification(note, related_request_id=context.request_id)
    return types.CallToolResult(content=[text("logged")])


def asking_back(request: types.ServerRequest, answer: type[types.Result]) -> Fixture:
    """Asks the client while its call is running, as revisions before 2026-07-28 do."""

    async def ask(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        about = ServerMessageMetadata(related_request_id=context.request_id)
        got = await context.session.send_request(request, answer, metadata=about)
        return types.CallToolResult(content=[text(got.model_dump_json())])

    return ask


async def needing_a_capability(context: Any, call_next: Any) -> Any:
    if context.method == "tools/call" and (context.params or {}).get("name") == "test_missing_capability":
        needed = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "sampling is needed", needed)
    return await call_next(context)


FIXTURES: dict[str, Fixture] = {
    "test_simple_text": answering(text("This is a simple text response for testing.")),
    "test_image_content": answering(image()),
    "test_audio_content": answering(types.AudioContent(type="audio", data=WAV, mime_type="audio/wav")),
    "test_embedded_resource": answering(
        embedded("test://embedded-resource", "This is an embedded resource content.")
    ),
    "test_multiple_content_types": answering(
        text("Multiple content types test:"),
        image(),
        embedded("test://mixed-content-resource", '{"test":"data","value":123}', "application/json"),
    ),
    "test_error_handling": failing,
    "test_tool_with_progress": progressing,
    "test_tool_with_logging": logging_,
    "test_logging_tool": answering(text("nothing was logged")),
    "test_sampling": asking_back(sample("Hello?"), types.CreateMessageResult),
    "test_elicitation": asking_back(form("Who are you?", "username"), types.ElicitResult),
    "test_missing_capability": answering(text("never reached")),
    "test_header_parameter": answering(text("the header agreed")),
    "json_schema_2020_12_tool": answering(text("listed")),
    **dict.fromkeys(ROUNDS, asking_tool),
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "test_header_parameter": {
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    },
    "json_schema_2020_12_tool": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    },
}


# Prompts

PROMPTS: dict[str, list[str]] = {
    "test_simple_prompt": [],
    "test_prompt_with_arguments": ["arg1", "arg2"],
    "test_prompt_with_embedded_resource": ["resourceUri"],
    "test_prompt_with_image": [],
    PROMPT: [],
}


async def list_prompts(context: Any, params: Any) -> types.ListPromptsResult:
    return types.ListPromptsResult(
        prompts=[
            types.Prompt(
                name=name,
                description="A fixture.",
                arguments=[types.PromptArgument(name=each, required=True) for each in arguments],
            )
            for name, arguments in PROMPTS.items()
        ]
    )


async def get_prompt(context: Any, params: types.GetPromptRequestParams) -> Any:
    given = params.arguments or {}
    if params.name not in PROMPTS or set(PROMPTS[params.name]) - set(given):
        raise MCPError(types.INVALID_PARAMS, "no such prompt, or an argument is missing")
    if params.name == PROMPT:
        return await asking_prompt(context, params)
    said: list[types.ContentBlock] = {
        "test_simple_prompt": lambda: [text("This is a simple prompt for testing.")],
        "test_prompt_with_arguments": lambda: [
            text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")
        ],
        "test_prompt_with_embedded_resource": lambda: [
            embedded(given["resourceUri"], "Embedded resource content for testing."),
            text("Please process the embedded resource above."),
        ],
        "test_prompt_with_image": lambda: [image(), text("Please analyze the image above.")],
    }[params.name]()
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=each) for each in said])


async def complete(context: Any, params: types.CompleteRequestParams) -> types.CompleteResult:
    return types.CompleteResult(completion=types.Completion(values=["test-value"], total=1, has_more=False))


# Resources

TEXT, BINARY, TEMPLATE = "test://static-text", "test://static-binary", "test://template/{id}/data"


async def list_resources(context: Any, params: Any) -> types.ListResourcesResult:
    return types.ListResourcesResult(
        resources=[
            types.Resource(uri=TEXT, name="text", description="A fixture.", mime_type="text/plain"),
            types.Resource(uri=BINARY, name="binary", description="A fixture.", mime_type="image/png"),
        ]
    )


async def list_templates(context: Any, params: Any) -> types.ListResourceTemplatesResult:
    template = types.ResourceTemplate(uri_template=TEMPLATE, name="template", description="A fixture.")
    return types.ListResourceTemplatesResult(resource_templates=[template])


async def read_resource(context: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    uri = str(params.uri)
    start, end = TEMPLATE.split("{id}")
    if uri == TEXT:
        found: Any = contents(uri, "This is the content of the static text resource.")
    elif uri == BINARY:
        found = types.BlobResourceContents(uri=uri, mime_type="image/png", blob=PNG)
    elif uri.startswith(start) and uri.endswith(end):
        number = uri.removeprefix(start).removesuffix(end)
        said = {"id": number, "templateTest": True, "data": f"Data for ID: {number}"}
        found = contents(uri, json.dumps(said), "application/json")
    else:
        raise MCPError(types.INVALID_PARAMS, "Resource not found", {"uri": uri})
    return types.ReadResourceResult(contents=[found])


PROMPTS_AND_RESOURCES: dict[str, tuple[Any, Any]] = {
    "prompts/list": (types.PaginatedRequestParams, list_prompts),
    "prompts/get": (types.GetPromptRequestParams, get_prompt),
    "completion/complete": (types.CompleteRequestParams, complete),
    "resources/list": (types.PaginatedRequestParams, list_resources),
    "resources/templates/list": (types.PaginatedRequestParams, list_templates),
    "resources/read": (types.ReadResourceRequestParams, read_resource),
}
