"""What `engram mcp-config` prints: each client's own form, with and without a token."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from engram.cli.memory import mcp_configurations, stdio_configurations
from support.processes import environment, run_engram

URL = "http://127.0.0.1:8787/mcp"
CLIENTS = ["cursor", "claude-code", "vscode"]


def printed(*arguments: str, **env: str) -> str:
    done = run_engram("mcp-config", *arguments, env=environment(**env))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_over_http_each_client_gets_the_address() -> None:
    known = mcp_configurations(URL)
    assert list(known) == CLIENTS
    assert json.loads(known["cursor"]) == {"mcpServers": {"engram": {"url": URL}}}
    assert known["claude-code"] == f"claude mcp add --transport http engram {URL}"
    assert json.loads(known["vscode"]) == {"servers": {"engram": {"type": "http", "url": URL}}}


def test_over_http_each_client_gets_the_token_in_its_own_syntax() -> None:
    known = mcp_configurations(URL, "engram_of-alice")
    headers = {"Authorization": "Bearer engram_of-alice"}
    assert json.loads(known["cursor"])["mcpServers"]["engram"] == {"url": URL, "headers": headers}
    assert json.loads(known["vscode"])["servers"]["engram"] == {
        "type": "http",
        "url": URL,
        "headers": headers,
    }
    assert shlex.split(known["claude-code"])[-2:] == ["--header", "Authorization: Bearer engram_of-alice"]


def test_over_stdio_each_client_gets_the_command() -> None:
    known = stdio_configurations(["/a b/engram", "mcp"], {"GATEWAY_PORT": "9", "ENGRAM_TOKEN": "it's"})
    server = {
        "command": "/a b/engram",
        "args": ["mcp"],
        "env": {"GATEWAY_PORT": "9", "ENGRAM_TOKEN": "it's"},
    }
    assert list(known) == CLIENTS
    assert json.loads(known["cursor"]) == {"mcpServers": {"engram": server}}
    assert json.loads(known["vscode"]) == {"servers": {"engram": {"type": "stdio", **server}}}
    assert shlex.split(known["claude-code"]) == [
        *("claude", "mcp", "add", "--env", "GATEWAY_PORT=9", "--env", "ENGRAM_TOKEN=it's"),
        *("--transport", "stdio", "engram", "--", "/a b/engram", "mcp"),
    ]


def test_the_command_is_this_program_and_is_told_only_what_is_unusual(tmp_path: Path) -> None:
    usual = json.loads(printed("cursor", "--stdio"))["mcpServers"]["engram"]
    assert usual == {"command": str(Path(sys.executable).with_name("engram")), "args": ["mcp"]}
    moved = printed("cursor", "--stdio", XDG_DATA_HOME=str(tmp_path), GATEWAY_PORT="9999", GATEWAY_HOST="::1")
    assert json.loads(moved)["mcpServers"]["engram"]["env"] == {
        "ENGRAM_DATA_DIR": str(tmp_path / "engram"),
        "GATEWAY_HOST": "::1",
        "GATEWAY_PORT": "9999",
    }


@pytest.mark.parametrize("more", [["--token", "engram_of-alice"], []], ids=["option", "environment"])
@pytest.mark.parametrize("client", CLIENTS)
def test_the_token_is_the_options_or_the_environments(client: str, more: list[str]) -> None:
    env = {"ENGRAM_TOKEN": "engram_of-bob" if more else "engram_of-alice"}
    assert "Bearer engram_of-alice" in printed(client, *more, **env)
    assert "Bearer" not in (over_stdio := printed(client, "--stdio", *more, **env))
    assert "engram_of-alice" in over_stdio
    assert "engram_of-bob" not in over_stdio


def test_an_unknown_client_is_told_the_known_ones() -> None:
    done = run_engram("mcp-config", "emacs", "--stdio", env=environment())
    assert done.returncode == 1
    assert "cursor, claude-code, vscode" in done.stderr
