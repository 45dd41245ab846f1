"""A gateway with tokens: who gets in, as whom, and to do what."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import Request
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from engram.api import tokens, tokens_file
from engram.api.tools import TOOLS
from engram.assembly.callers import require_loopback
from engram.assembly.gateway import build_app
from engram.cli.memory import call_tool
from engram.gateway.callers import READ, SCOPES
from engram.kernel.errors import ConfigError, EngramError
from engram.kernel.logs import HumanFormatter, JsonFormatter
from engram.kernel.settings import Settings
from support.processes import eventually
from support.serving import serving

ERAS = ["legacy", "2026-07-28"]
STORE = {"payload_md": "A fact."}
TOOL_SCOPES = {"memory_store": "write", "memory_query": "read"}


@dataclass
class Gate:
    """A gateway that asks for tokens, and the file it asks."""

    url: str
    file: Path

    def call(self, method: str, path: str, token: str | None = None, **more: Any) -> httpx2.Response:
        headers = {**more.pop("headers", {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        return httpx2.request(method, self.url + path, headers=headers, trust_env=False, **more)

    def post(self, path: str, token: str | None, body: dict, **headers: str) -> httpx2.Response:
        return self.call("POST", path, token, json=body, headers=headers)

    def bare(self, token: str | None, tool: str, **arguments: Any) -> httpx2.Response:
        return self.post("/mcp", token, {"tool": tool, "arguments": arguments})


def admitted(file: Path, owner: str, *scopes: str, **more: Any) -> str:
    """A new token in the file."""
    secret = tokens.new_secret()
    entry = {"sha256": tokens.sha256_of(secret), "owner": owner, "scopes": list(scopes) or ["read", "write"]}
    token = tokens.checked({**entry, **more}, "entry")
    tokens_file.edit(file, lambda text: tokens.with_table(text, token))
    return secret


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


@pytest.fixture
def held(file: Path) -> dict[str, str]:
    """Tokens that are there when the gateway starts."""
    now = datetime.now(UTC)
    return {
        "ada": admitted(file, "ada"),
        "ada too": admitted(file, "ada"),
        "bob": admitted(file, "bob"),
        "read": admitted(file, "carol", "read"),
        "write": admitted(file, "carol", "write"),
        "admin": admitted(file, "carol", "admin"),
        "payments": admitted(file, "dora", spaces=["team:payments"]),
        "root": admitted(file, "root", "read", "write", "admin"),
        "over": admitted(file, "carol", expires_at=now - timedelta(seconds=1)),
        "not yet over": admitted(file, "carol", expires_at=now + timedelta(hours=1)),
    }


@pytest.fixture
def ada(held: dict[str, str]) -> str:
    return held["ada"]


@pytest.fixture
def bob(held: dict[str, str]) -> str:
    return held["bob"]


@pytest.fixture
def gate(settings: Settings, file: Path, held: dict[str, str]) -> Iterator[Gate]:
    with serving(build_app(replace(settings, tokens_file=file))) as url:
        yield Gate(url, file)


@asynccontextmanager
async def agent(gate: Gate, token: str | None, era: str):
    """The official client, with a bearer token."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(headers=headers, trust_env=False) as http,
        Client(streamable_http_client(f"{gate.url}/mcp", http_client=http), mode=era) as client,
    ):
        yield client


# Who gets in


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/memory/store"),
        ("POST", "/mcp"),
        ("GET", "/mcp"),
        ("DELETE", "/mcp"),
        ("GET", "/metrics"),
        ("GET", "/no/such/route"),
    ],
)
def test_nobody_gets_in_without_a_token_that_is_known(gate: Gate, ada: str, method: str, path: str) -> None:
    sent = [
        [],
        [""],
        ["Bearer"],
        [f"Basic {ada}"],
        [ada],
        [f"Bearer {ada} {ada}"],
        [f"Bearer {ada},"],
        [f"Bearer {ada[:-1]}"],
        [f"Bearer {ada}="],
        [f"Bearer {tokens.new_secret()}"],
        [f"Bearer {tokens.sha256_of(ada)}"],
        [f"Bearer {'x' * 5000}"],
        [f"Bearer {ada}", f"Bearer {ada}"],
    ]
    for values in sent:
        headers = [("content-type", "application/json"), *(("authorization", value) for value in values)]
        reply = httpx2.request(method, gate.url + path, headers=headers, content=b"{}", trust_env=False)
        assert reply.status_code == 401, values
        assert reply.headers["www-authenticate"] == "Bearer"
        assert set(reply.json()) == {"success", "error_code", "message", "correlation_id", "context"}
        assert reply.json()["error_code"] == "UNAUTHENTICATED"
        assert ada not in reply.text


@pytest.mark.parametrize("path", ["/health", "/readyz", "/docs", "/openapi.json"])
def test_probes_and_the_description_need_none(gate: Gate, path: str) -> None:
    assert gate.call("GET", path).status_code == 200
    assert gate.call("GET", path, "engram_unknown").status_code == 200


def test_the_description_asks_for_a_token(gate: Gate) -> None:
    described = gate.call("GET", "/openapi.json").json()
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert described["paths"]["/memory/store"]["post"]["security"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_a_known_token_gets_in(gate: Gate, ada: str, scheme: str) -> None:
    reply = gate.call("GET", "/metrics", headers={"Authorization": f"{scheme} {ada}"})
    assert reply.status_code == 200


def test_a_token_that_expired_is_refused(gate: Gate, held: dict[str, str]) -> None:
    assert gate.call("GET", "/metrics", held["not yet over"]).status_code == 200
    refused = gate.call("GET", "/metrics", held["over"])
    assert refused.status_code == 401
    assert "expired" in refused.json()["message"]


def test_a_token_made_while_running_gets_in(gate: Gate, file: Path) -> None:
    token = admitted(file, "dora")
    eventually(lambda: gate.call("GET", "/metrics", token).status_code == 200, "the new token", 10)


def test_a_token_revoked_while_running_is_refused(gate: Gate, file: Path, ada: str, bob: str) -> None:
    assert gate.bare(ada, "memory_store", **STORE).status_code == 200
    (gone,) = (token for token in tokens_file.read(file) if token.sha256 == tokens.sha256_of(ada))
    tokens_file.edit(file, lambda text: tokens.without_table(text, gone, "file"))
    eventually(lambda: gate.bare(ada, "memory_store", **STORE).status_code == 401, "the refusal", 10)
    assert gate.call("GET", "/mcp", ada).status_code == 401
    assert gate.bare(bob, "memory_store", **STORE).status_code == 200


def test_without_its_file_a_running_gateway_lets_nobody_in(gate: Gate, file: Path, ada: str) -> None:
    file.unlink()
    eventually(lambda: gate.call("GET", "/metrics", ada).status_code == 401, "the refusal", 10)
    assert gate.call("GET", "/health").status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_an_official_client_gets_in_with_a_token_alone(gate: Gate, ada: str, era: str) -> None:
    async with agent(gate, ada, era) as client:
        assert (await client.list_tools()).tools
        stored = await client.call_tool("memory_store", {"payload_md": f"The {era} agent was here."})
        assert stored.structured_content["space_written"] == "private:ada"
        found = await client.call_tool("memory_query", {"query": "agent was here"})
        assert [r["content"] for r in found.structured_content["results"]] == [f"The {era} agent was here."]
    for wrong in (None, tokens.new_secret()):
        with pytest.raises(Exception) as refused:
            async with agent(gate, wrong, era) as client:
                await client.list_tools()
        assert "MCPError" in repr(refused.value) or "401" in repr(refused.value)


# As whom


def everywhere(gate: Gate, token: str, tool: str, **arguments: Any) -> list[httpx2.Response]:
    """The same call by REST and in the bare form."""
    path = {"memory_store": "/memory/store", "memory_query": "/memory/query"}[tool]
    return [gate.post(path, token, arguments), gate.bare(token, tool, **arguments)]


def test_the_tokens_owner_is_who_acts(gate: Gate, ada: str) -> None:
    for reply in everywhere(gate, ada, "memory_store", **STORE):
        assert reply.json()["space_written"] == "private:ada"
    for reply in everywhere(gate, ada, "memory_store", **STORE, actor_user_id="ada"):
        assert reply.status_code == 200


def test_naming_somebody_else_is_refused(gate: Gate, held: dict[str, str], backend) -> None:
    for token in (held["ada"], held["root"]):
        for reply in (
            *everywhere(gate, token, "memory_store", **STORE, actor_user_id="bob"),
            *everywhere(gate, token, "memory_query", query="fact", actor_user_id="bob"),
        ):
            assert (reply.status_code, reply.json()["error_code"]) == (403, "FORBIDDEN")
    assert backend.contents() == []


def test_what_is_private_stays_so(gate: Gate, ada: str, bob: str) -> None:
    gate.bare(ada, "memory_store", payload_md="Ada's own secret fact.")
    for reply in everywhere(gate, bob, "memory_query", query="secret fact"):
        assert (reply.status_code, reply.json()["results"]) == (200, [])
    for reply in everywhere(gate, bob, "memory_query", query="secret fact", spaces=["private:ada"]):
        assert reply.status_code == 403
    refused = gate.bare(bob, "memory_store", payload_md="For Ada.", target_space="private:ada")
    assert refused.json()["action"] == "reject"
    (found,) = gate.bare(ada, "memory_query", query="secret fact").json()["results"]
    assert found["content"] == "Ada's own secret fact."


def test_two_owners_may_use_the_same_idempotency_key(gate: Gate, ada: str, bob: str) -> None:
    first = gate.post("/memory/store", ada, {"payload_md": "Ada's."}, **{"Idempotency-Key": "key-1"})
    other = gate.post("/memory/store", bob, {"payload_md": "Bob's."}, **{"Idempotency-Key": "key-1"})
    again = gate.post("/memory/store", ada, {"payload_md": "Ada's."}, **{"Idempotency-Key": "key-1"})
    assert (first.json()["space_written"], other.json()["space_written"]) == ("private:ada", "private:bob")
    assert "Idempotency-Replayed" not in other.headers
    assert (again.json(), again.headers["Idempotency-Replayed"]) == (first.json(), "true")


def test_two_tokens_of_one_owner_share_what_is_theirs(gate: Gate, held: dict[str, str]) -> None:
    gate.bare(held["ada"], "memory_store", payload_md="One fact.")
    assert gate.bare(held["ada too"], "memory_query", query="fact").json()["total"] == 1


# To do what


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("scope", "tool", "arguments"),
    [
        ("read", "memory_store", STORE),
        ("write", "memory_query", {"query": "x"}),
        ("admin", "memory_store", STORE),
    ],
)
async def test_a_scope_that_is_not_there_is_refused(
    gate: Gate, held: dict[str, str], backend, scope: str, tool: str, arguments: dict
) -> None:
    token = held[scope]
    for reply in everywhere(gate, token, tool, **arguments):
        assert (reply.status_code, reply.json()["error_code"]) == (403, "FORBIDDEN")
        assert f"does not have the scope {TOOL_SCOPES[tool]!r}" in reply.json()["message"]
    for era in ERAS:
        async with agent(gate, token, era) as client:
            result = await client.call_tool(tool, arguments)
        assert result.is_error
        assert json.loads(result.content[0].text)["error_code"] == "FORBIDDEN"
    assert backend.contents() == []


def test_every_tool_needs_a_scope_and_none_writes_with_read_alone() -> None:
    assert {tool.scope for tool in TOOLS.values()} <= set(SCOPES)
    assert [tool.name for tool in TOOLS.values() if not tool.read_only and tool.scope == READ] == []


def test_a_scope_that_is_there_is_enough(gate: Gate, held: dict[str, str]) -> None:
    for reply in everywhere(gate, held["read"], "memory_query", query="x"):
        assert reply.status_code == 200


def test_a_token_limited_to_some_spaces_sees_and_touches_no_other(
    gate: Gate, settings: Settings, held: dict[str, str], backend
) -> None:
    dora = held["payments"]
    for space in ("team:other", "org:payments", f"team:{settings.project_key}"):
        for reply in (
            *everywhere(gate, dora, "memory_store", **STORE, target_space=space),
            *everywhere(gate, dora, "memory_query", query="fact", spaces=["private:dora", space]),
        ):
            assert (reply.status_code, reply.json()["error_code"]) == (403, "FORBIDDEN")
    assert backend.contents() == []
    for reply in everywhere(gate, dora, "memory_query", query="fact"):
        assert reply.json()["spaces_searched"] == ["private:dora"], "the default is narrowed, not refused"
    named = gate.bare(dora, "memory_query", query="fact", spaces=["team:payments", "private:dora"])
    assert named.json()["spaces_searched"] == ["team:payments", "private:dora"]
    assert gate.bare(dora, "memory_store", **STORE, target_space="team:payments").json()["ok"]


# What is never seen


def test_a_token_gets_into_no_log_and_no_reply(settings: Settings, file: Path, ada: str) -> None:
    app = build_app(replace(settings, tokens_file=file))

    @app.get("/boom")
    def boom(request: Request) -> None:
        raise RuntimeError(f"told everything: {request.headers.raw} {request.scope}")

    written = io.StringIO()
    handlers = [logging.StreamHandler(written), logging.StreamHandler(written)]
    handlers[0].setFormatter(JsonFormatter())
    handlers[1].setFormatter(HumanFormatter())
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.DEBUG)
    for handler in handlers:
        root.addHandler(handler)
    try:
        with serving(app) as url:
            gate = Gate(url, file)
            crashed = gate.call("GET", "/boom", ada)
            refused = gate.call("GET", "/boom", headers={"Authorization": f"bearer:{ada}"})
            gate.call("GET", f"/x/{ada}", ada)
            gate.bare(ada, "memory_store", **STORE)
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        root.setLevel(level)
    assert (crashed.status_code, refused.status_code) == (500, 401)
    assert "told everything" in written.getvalue()
    assert "authorization" not in written.getvalue()
    for text in (written.getvalue(), crashed.text, refused.text):
        assert ada[7:] not in text


# At the start


@pytest.mark.parametrize("content", [None, "", "# none yet\n", "nonsense", '[[token]]\nowner = "ada"\n'])
def test_a_gateway_does_not_start_without_tokens_it_was_told_of(
    settings: Settings, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_text(content, "utf-8")
        path.chmod(0o600)
    told = replace(settings, tokens_file=path)
    for start in (build_app, require_loopback):
        with pytest.raises(ConfigError, match=str(path)):
            start(told)


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("0.0.0.0", "0.0.0.0:8787"),  # noqa: S104
        ("::", "[::]:8787"),
        ("192.0.2.1", "192.0.2.1"),
        ("Engram.internal", "engram.internal:8787"),
    ],
)
def test_with_tokens_it_may_listen_where_others_reach_it(
    settings: Settings, file: Path, ada: str, address: str, own: str
) -> None:
    reachable = replace(settings, gateway_host=address, tokens_file=file)
    require_loopback(reachable)
    with serving(build_app(reachable)) as url:
        for host, status in ((own, 200), ("127.0.0.1", 200), ("evil.example", 421)):
            assert httpx2.get(f"{url}/health", headers={"host": host}, trust_env=False).status_code == status
        assert httpx2.get(f"{url}/metrics", headers={"host": own}, trust_env=False).status_code == 401
    with pytest.raises(ConfigError, match=r"without tokens.*engram token create"):
        build_app(replace(reachable, tokens_file=None))


# engram's own commands


def test_commands_send_the_token_they_have(
    gate: Gate, ada: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_PORT", gate.url.rpartition(":")[2])
    monkeypatch.delenv("ENGRAM_TOKEN", raising=False)
    with pytest.raises(EngramError, match="ENGRAM_TOKEN"):
        call_tool("memory_store", STORE)
    monkeypatch.setenv("ENGRAM_TOKEN", ada)
    assert call_tool("memory_store", STORE)["space_written"] == "private:ada"
    with pytest.raises(EngramError, match="needs a token"):
        call_tool("memory_store", STORE, base_url=gate.url)
    for nonsense in ("two words", "größer", "a\tb"):
        monkeypatch.setenv("ENGRAM_TOKEN", nonsense)
        with pytest.raises(ConfigError, match="ENGRAM_TOKEN: is not a token"):
            call_tool("memory_store", STORE)
