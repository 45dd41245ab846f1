"""Fixtures that ask the client for something before they answer (2026-07-28 only).

A reply may carry requests; the client calls again with its responses and the
state it was given, to any gateway. engram's own tools never ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mcp_types as types

Requests = dict[str, types.InputRequest]
Params = types.CallToolRequestParams | types.GetPromptRequestParams


def form(message: str, field: str, kind: str = "string") -> types.ElicitRequest:
    schema = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=schema))


def sample(question: str) -> types.CreateMessageRequest:
    said = types.SamplingMessage(role="user", content=types.TextContent(type="text", text=question))
    return types.CreateMessageRequest(
        params=types.CreateMessageRequestParams(messages=[said], max_tokens=100)
    )


NAME: Requests = {"user_name": form("What is your name?", "name")}
GREETING: Requests = {"greeting": sample("Generate a greeting")}
ROOTS: Requests = {"client_roots": types.ListRootsRequest(params=types.RequestParams())}
CONFIRM: Requests = {"confirm": form("Please confirm", "ok", "boolean")}

# A tool's rounds: what it asks in each. With more than one request or round it keeps state.
ROUNDS: Mapping[str, list[Requests]] = {
    "test_input_required_result_elicitation": [NAME],
    "test_input_required_result_sampling": [{"capital_question": sample("What is the capital of France?")}],
    "test_input_required_result_list_roots": [ROOTS],
    "test_input_required_result_request_state": [CONFIRM],
    "test_input_required_result_tampered_state": [CONFIRM],
    "test_input_required_result_multiple_inputs": [NAME | GREETING | ROOTS],
    "test_input_required_result_multi_round": [
        {"step1": form("Step 1: What is your name?", "name")},
        {"step2": form("Step 2: What is your favorite color?", "color")},
    ],
    "test_input_required_result_capabilities": [NAME | GREETING],
    "test_streaming_elicitation": [NAME],
}
STATELESS = {"test_input_required_result_elicitation", "test_streaming_elicitation"}
PROMPT = "test_input_required_result_prompt"
CONTEXT: Requests = {"user_context": form("What context should the prompt use?", "context")}


def unanswered(asked: Requests, params: Params) -> Requests:
    return {key: request for key, request in asked.items() if key not in (params.input_responses or {})}


def allowed(asked: Requests, capabilities: types.ClientCapabilities | None) -> Requests:
    """Only what this client said it can do."""
    can = {"elicitation/create": capabilities and capabilities.elicitation}
    return {key: request for key, request in asked.items() if can.get(request.method, True) is not None}


async def asking_tool(context: Any, params: types.CallToolRequestParams) -> Any:
    rounds = ROUNDS[params.name]
    now = int(params.request_state or 0)
    if not unanswered(rounds[now], params):
        now += 1
    if now == len(rounds):
        return types.CallToolResult(content=[types.TextContent(type="text", text="state-ok, answered")])
    return types.InputRequiredResult(
        input_requests=allowed(unanswered(rounds[now], params), context.session.client_capabilities),
        request_state=None if params.name in STATELESS else str(now),
    )


async def asking_prompt(context: Any, params: types.GetPromptRequestParams) -> Any:
    if missing := unanswered(CONTEXT, params):
        return types.InputRequiredResult(input_requests=missing)
    said = types.TextContent(type="text", text="Thanks for the context.")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=said)])
