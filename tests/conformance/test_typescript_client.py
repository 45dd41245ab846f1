"""The official TypeScript clients, version 1 and 2, against a gateway with tokens: HTTP and stdio."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from engram.api.tools import TOOLS
from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from support import node
from support.admission import admitted
from support.backend import Backend
from support.parts import used
from support.processes import environment
from support.serving import serving
from support.stdio import PROGRAM

pytestmark = pytest.mark.usefixtures("node_packages")

SCRIPT = Path(__file__).with_name("typescript_client.mjs")
SECONDS = 60

# Which SDK, how it settles on a revision, and the one it must settle on.
CLIENTS = [
    pytest.param({"sdk": 1}, "2025-11-25", id="sdk-1"),
    pytest.param({"sdk": 2, "mode": "legacy"}, "2025-11-25", id="sdk-2-legacy"),
    pytest.param({"sdk": 2, "mode": "auto"}, "2026-07-28", id="sdk-2-auto"),
    pytest.param({"sdk": 2, "mode": {"pin": "2026-07-28"}}, "2026-07-28", id="sdk-2-pinned"),
]
FACT = "Leases are renewed at half their length. 租约。"
CALLS = [
    {"name": "memory_store", "arguments": {"payload_md": FACT}},
    {"name": "memory_query", "arguments": {"query": "renewed leases"}},
    {"name": "memory_store", "arguments": {"payload_md": " "}},
    {"name": "memory_query", "arguments": {"query": "x", "spaces": ["private:bob"]}},
    {"name": "no_such_tool", "arguments": {}},
]


@dataclass(frozen=True)
class Gateway:
    url: str
    settings: Settings
    token: str


@pytest.fixture
def gateway(settings: Settings, tmp_path: Path) -> Iterator[Gateway]:
    file = tmp_path / "tokens.toml"
    token = admitted(file, "ada", ["read", "write"])
    guarded = replace(settings, tokens_file=file)
    with serving(build_app(guarded)) as url:
        yield Gateway(url, replace(guarded, gateway_port=urlsplit(url).port), token)


def driven(client: dict[str, Any], **where: Any) -> dict[str, Any]:
    pinned = json.loads((node.PINNED / "package.json").read_text("utf-8"))["dependencies"]
    packages = {1: "@modelcontextprotocol/sdk", 2: "@modelcontextprotocol/client"}
    used(f"TypeScript MCP {client['sdk']}", f"real: official SDK {pinned[packages[client['sdk']]]}")
    plan = {**client, **where, "modules": str(node.installed()), "calls": CALLS}
    done = subprocess.run(
        [str(node.NODE), str(SCRIPT)],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def check(seen: dict[str, Any], backend: Backend) -> None:
    assert [tool["name"] for tool in seen["tools"]] == list(TOOLS)
    stored, found, *failed = seen["results"]
    assert (stored["structuredContent"]["action"], backend.contents()) == ("allow", [FACT])
    assert stored["structuredContent"]["space_written"] == "private:ada"
    assert [hit["content"] for hit in found["structuredContent"]["results"]] == [FACT]
    assert all(result["isError"] for result in failed)
    told = [json.loads(result["content"][0]["text"]) for result in failed]
    assert [each["error_code"] for each in told] == ["INVALID_ARGUMENT", "FORBIDDEN", "NOT_FOUND"]
    assert all(each["correlation_id"] for each in told)


@pytest.mark.parametrize(("client", "revision"), CLIENTS)
def test_over_http_with_a_token(client: dict, revision: str, gateway: Gateway, backend: Backend) -> None:
    seen = driven(client, url=f"{gateway.url}/mcp", token=gateway.token)
    assert seen["protocol"] == revision
    check(seen, backend)


@pytest.mark.parametrize(("client", "revision"), CLIENTS)
def test_over_stdio_with_a_token(client: dict, revision: str, gateway: Gateway, backend: Backend) -> None:
    env = environment(gateway.settings, ENGRAM_TOKEN=gateway.token, ENGRAM_NO_START="1")
    program, *args = PROGRAM
    seen = driven(client, command=program, args=args, env=env)
    assert seen["protocol"] == (revision if client["sdk"] == 2 else None), "version 1 does not tell"
    check(seen, backend)


@pytest.mark.parametrize(("client", "revision"), CLIENTS)
@pytest.mark.parametrize("token", ["", "engram_wrong"], ids=["no-token", "wrong-token"])
def test_without_a_good_token_nobody_connects(
    client: dict, revision: str, token: str, gateway: Gateway, backend: Backend
) -> None:
    seen = driven(client, url=f"{gateway.url}/mcp", token=token)
    assert re.search("UNAUTHENTICATED|HTTP 401", seen["refused"])
    assert backend.contents() == []
