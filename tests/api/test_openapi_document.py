"""What the OpenAPI document says, and what HTTP itself asks of a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi import FastAPI

from engram.api.authentication import PUBLIC
from engram.api.tools import TOOLS, WriteArguments
from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from support.admission import admitted


def operations(app: FastAPI) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in app.openapi()["paths"].items():
        for operation in methods.values():
            yield path, operation


@pytest.fixture
def with_tokens(tmp_path: Path) -> FastAPI:
    file = tmp_path / "tokens.toml"
    admitted(file, "ada", ["read"])
    return build_app(replace(Settings.load({}), tokens_file=file))


def test_it_asks_for_a_token_where_one_is_needed_and_nowhere_else(with_tokens: FastAPI) -> None:
    asking = {path for path, operation in operations(with_tokens) if operation.get("security")}
    free = {path for path, operation in operations(with_tokens) if not operation.get("security")}
    assert free == PUBLIC & {path for path, _ in operations(with_tokens)}
    assert not asking & free
    assert all("401" in op["responses"] for path, op in operations(with_tokens) if path in asking)


def test_it_never_promises_another_error_shape(with_tokens: FastAPI) -> None:
    refusing = {
        path: found["responses"]["422"]
        for path, found in operations(with_tokens)
        if "422" in found["responses"]
    }
    assert refusing.keys() == {"/api/knowledge/documents/upload-async"}, "a document that cannot be read"
    assert "ErrorReply" in str(refusing)
    assert "ErrorReply" in with_tokens.openapi()["components"]["schemas"]
    assert "HTTPValidationError" not in str(with_tokens.openapi())


@pytest.mark.parametrize("key", ["k", "a-b_C9" * 20, "", "k" * 129, "a b", "ключ", "k\n"])
def test_the_schema_of_a_key_is_the_rule_for_keys(http: httpx2.Client, key: str) -> None:
    writing = [tool for tool in TOOLS.values() if issubclass(tool.arguments, WriteArguments)]
    patterns = {tool.input_schema["properties"]["idempotency_key"]["pattern"] for tool in writing}
    assert len(patterns) == 1
    # `$` of JSON Schema is the very end.
    fits = re.search(patterns.pop().replace("$", r"\Z"), key) is not None
    reply = http.post("/memory/store", json={"payload_md": "A fact.", "idempotency_key": key})
    assert reply.status_code == (200 if fits else 400)


def test_a_method_that_a_path_does_not_take_is_told_all_that_it_takes(http: httpx2.Client) -> None:
    for path, allowed in (("/reliability/report", "GET, POST"), ("/memory/store", "POST")):
        reply = http.delete(path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
        assert reply.json()["error_code"] == "REQUEST_REFUSED"


def test_a_body_that_is_no_json_names_the_body(http: httpx2.Client) -> None:
    reply = http.post(
        "/memory/store", content=b'{"payload_md": ', headers={"content-type": "application/json"}
    )
    assert (reply.status_code, set(reply.json()["context"]["fields"])) == (400, {"body"})


def test_white_space_around_a_header_is_no_part_of_it(gateway: str) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": "memory_query", "arguments": {"query": "x"}, "_meta": meta}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": " 2026-07-28 ",
        "Mcp-Method": "tools/call ",
        "Mcp-Name": "  memory_query \t",
    }
    # Clients from elsewhere send this; httpx would not.
    connection = HTTPConnection(urlsplit(gateway).netloc)
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    connection.request("POST", "/mcp", json.dumps(call), headers)
    with closing(connection), connection.getresponse() as reply:
        assert reply.status == 200
        assert json.load(reply)["result"]["structuredContent"]["ok"]
