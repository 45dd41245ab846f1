"""/mcp with the official client in both eras, and the bare form beside it."""

from __future__ import annotations

import json

import httpx2
import pytest
from mcp import Client

from engram.api.tools import TOOLS
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio

ERAS = ["legacy", "2026-07-28"]


@pytest.mark.parametrize("era", ERAS)
async def test_an_official_client_stores_and_queries(gateway: str, era: str) -> None:
    async with Client(f"{gateway}/mcp", mode=era) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == set(TOOLS)
        stored = await client.call_tool("memory_store", {"payload_md": f"The {era} client was here."})
        assert not stored.is_error
        assert stored.structured_content["action"] == "allow"
        found = await client.call_tool("memory_query", {"query": "client was here"})
        assert [r["content"] for r in found.structured_content["results"]] == [f"The {era} client was here."]


@pytest.mark.parametrize("era", ERAS)
async def test_tools_are_described_for_agents(gateway: str, era: str) -> None:
    async with Client(f"{gateway}/mcp", mode=era) as client:
        for tool in (await client.list_tools()).tools:
            assert tool.description
            assert len(tool.description) > 80
            assert tool.output_schema["properties"]["correlation_id"]
            assert tool.annotations.destructive_hint is TOOLS[tool.name].destructive
            assert tool.annotations.read_only_hint is TOOLS[tool.name].read_only
            assert tool.annotations.idempotent_hint is TOOLS[tool.name].repeatable
            assert all("description" in p for p in tool.input_schema["properties"].values())


def test_what_tools_do_is_what_they_say() -> None:
    """Spelled out: an agent may call the first kind unasked, and must ask before the second."""
    asking = {"memory_query", "reliability_report", "evidence_read", "logbook_query", "knowledge_search"}
    assert {name for name, tool in TOOLS.items() if tool.read_only} == asking
    assert {name for name, tool in TOOLS.items() if tool.scope == "read"} == asking
    assert {name for name, tool in TOOLS.items() if tool.destructive} == {
        "memory_forget",
        "governance_update",
    }
    assert {name for name, tool in TOOLS.items() if tool.scope == "admin"} == {"governance_update"}
    made_anew = {"logbook_create_item", "logbook_add_event", "sandbox_create", "sandbox_exec"}
    assert {name for name, tool in TOOLS.items() if not tool.repeatable} == made_anew


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("tool", "arguments", "code"),
    [
        ("memory_store", {"payload_md": " "}, "INVALID_ARGUMENT"),
        ("memory_store", {"payload_md": "x", "surprise": 1}, "INVALID_ARGUMENT"),
        ("memory_query", {"query": "x", "spaces": ["private:bob"]}, "FORBIDDEN"),
        ("no_such_tool", {}, "NOT_FOUND"),
    ],
)
async def test_a_failed_call_says_what_to_do(
    gateway: str, era: str, tool: str, arguments: dict, code: str
) -> None:
    async with Client(f"{gateway}/mcp", mode=era) as client:
        result = await client.call_tool(tool, arguments)
    assert result.is_error
    told = json.loads(result.content[0].text)
    assert (told["success"], told["error_code"]) == (False, code)
    assert told["correlation_id"]


async def test_a_deferred_write_is_no_error_to_an_agent(gateway: str, backend) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    async with Client(f"{gateway}/mcp") as client:
        result = await client.call_tool("memory_store", {"payload_md": "A fact."})
    assert not result.is_error
    assert result.structured_content["action"] == "deferred"
    assert isinstance(result.structured_content["outbox_id"], int)


def test_the_bare_form_answers_with_the_result_itself(http: httpx2.Client) -> None:
    call = {"tool": "memory_store", "arguments": {"payload_md": "A fact.", "target_space": "team:test"}}
    reply = http.post("/mcp", json=call)
    assert reply.status_code == 200
    assert (reply.json()["action"], reply.json()["space_written"]) == ("redirect", "private:local")
    assert reply.headers["x-correlation-id"] == reply.json()["correlation_id"]


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        ({"tool": "no_such_tool"}, 404, "NOT_FOUND"),
        ({"tool": "memory_store"}, 400, "INVALID_ARGUMENT"),
        ({"tool": "memory_store", "arguments": []}, 400, "INVALID_ARGUMENT"),
        ({"tool": "memory_store", "arguments": {"payload_md": 7}}, 400, "INVALID_ARGUMENT"),
        ({"tool": 7, "arguments": {}}, 400, "INVALID_ARGUMENT"),
        ({"tool": "memory_query", "arguments": {"query": "x"}, "more": 1}, 400, "INVALID_ARGUMENT"),
    ],
)
def test_a_bare_call_that_cannot_be_served_gets_the_one_error_shape(
    http: httpx2.Client, call: dict, status: int, code: str
) -> None:
    reply = http.post("/mcp", json=call, headers={"x-correlation-id": "corr-of-the-caller"})
    assert (reply.status_code, reply.json()["error_code"]) == (status, code)
    assert set(reply.json()) == {"success", "error_code", "message", "correlation_id", "context"}
    assert reply.json()["correlation_id"] == "corr-of-the-caller"


def test_a_body_that_is_no_call_is_the_protocols_to_refuse(http: httpx2.Client) -> None:
    for body in (b"", b"not json", b"[]", b'{"jsonrpc": "2.0"}', b'"tool"', b"[" * 5000):
        reply = http.post("/mcp", content=body, headers={"content-type": "application/json"})
        assert 400 <= reply.status_code < 500, body
