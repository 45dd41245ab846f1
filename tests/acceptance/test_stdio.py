"""`engram mcp` with the official client over stdio: as over HTTP, whatever becomes of the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shlex
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp_types import CallToolResult
from starlette.types import ASGIApp, Receive, Scope, Send

from engram.api.tools import TOOLS
from engram.assembly.gateway import build_app
from engram.cli import background
from engram.embedded.locks import FileLock
from engram.kernel.errors import GatewayUnavailable
from engram.kernel.settings import Settings
from engram.supervisor import as_environment
from engram.web.sockets import free_port
from support.backend import Backend
from support.faults import Fault, FaultyServer, Order
from support.parts import used
from support.plain_server import PlainServer
from support.processes import PATIENCE, answers, ended, environment, eventually, run_engram, started
from support.serving import serving
from support.stdio import PROGRAM, by_hand, client

pytestmark = pytest.mark.crash

ERAS = ["legacy", "2026-07-28"]
# What clients allow before they kill.
ENDS_WITHIN = 2.0


@pytest.fixture
def served(settings: Settings) -> Settings:
    used("MCP client", f"real: official SDK {version('mcp')}")
    return replace(settings, gateway_port=free_port(), store_deadline_seconds=5, openmemory_timeout_seconds=5)


@pytest.fixture
def env(served: Settings) -> dict[str, str]:
    """Of an `engram mcp` that may not start anything."""
    return environment(served, ENGRAM_NO_START="1")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "mcp.log"
    path.touch()
    return path


@contextmanager
def gateway(served: Settings, tmp_path: Path, **more: str) -> Iterator[Any]:
    with started("serve", env=environment(served, **more), log=tmp_path / "gateway.log") as process:
        eventually(lambda: answers(f"{served.gateway_url}/health"), "the gateway")
        yield process


def envelope(result: CallToolResult) -> dict[str, Any]:
    assert result.is_error
    assert result.structured_content is None
    told = json.loads(result.content[0].text)
    assert set(told) == {"success", "error_code", "message", "correlation_id", "context"}
    return told


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_an_official_client_finds_over_stdio_what_it_finds_over_http(
    served: Settings, env: dict[str, str], backend: Backend, tmp_path: Path, log: Path, era: str
) -> None:
    with gateway(served, tmp_path):
        async with client(env, log, era) as stdio, Client(f"{served.gateway_url}/mcp", mode=era) as http:
            tools = (await stdio.list_tools()).tools
            assert tools == (await http.list_tools()).tools
            assert [tool.name for tool in tools] == list(TOOLS)
            fact = f'Über {era}: 記憶は消えない 🧠, \u2028 said "she".\n'
            stored = await stdio.call_tool("memory_store", {"payload_md": fact})
            assert stored.structured_content["action"] == "allow"
            assert json.loads(stored.content[0].text) == stored.structured_content
            long = ("所 word " * 25_000)[:150_000]
            stored = await stdio.call_tool("memory_store", {"payload_md": long})
            assert stored.structured_content["action"] == "allow"
            assert backend.contents() == [fact, long]
            for tool, arguments in (
                ("memory_query", {"query": "記憶 word"}),
                ("memory_query", {"query": "x", "spaces": ["private:bob"]}),
                ("memory_store", {"payload_md": " "}),
                ("memory_store", {}),
                ("no_such_tool", {}),
            ):
                ours, theirs = [await c.call_tool(tool, arguments) for c in (stdio, http)]
                assert plain(ours) == plain(theirs), (tool, arguments)
        assert log.read_text() == ""


def plain(result: CallToolResult) -> tuple[bool, Any]:
    """A result without what differs from call to call."""
    told = json.loads(result.content[0].text)
    assert told.pop("correlation_id").startswith("corr-")
    assert result.is_error == (result.structured_content is None)
    return result.is_error, told


@pytest.mark.anyio
async def test_a_gateway_that_died_is_told_and_one_that_is_back_is_used(
    served: Settings, env: dict[str, str], backend: Backend, tmp_path: Path, log: Path
) -> None:
    with gateway(served, tmp_path, ENGRAM_FAILPOINT="memory_store.after_intent:2") as first:
        async with client(env, log) as mcp:
            stored = await mcp.call_tool("memory_store", {"payload_md": "Before."})
            assert stored.structured_content["action"] == "allow"
            during = envelope(await mcp.call_tool("memory_store", {"payload_md": "During."}))
            assert first.wait(10) == -signal.SIGKILL, "the failpoint was never reached"
            assert during["error_code"] == "GATEWAY_UNAVAILABLE"
            assert "may or may not" in during["message"]
            assert "repeat the call as it was" in during["message"]
            after = envelope(await mcp.call_tool("memory_store", {"payload_md": "After."}))
            assert after["error_code"] == "GATEWAY_UNAVAILABLE"
            assert "`engram up`" in after["message"]
            with gateway(served, tmp_path):
                again = await mcp.call_tool("memory_store", {"payload_md": "Again."})
                assert again.structured_content["action"] == "allow"
    assert backend.contents() == ["Before.", "Again."]
    assert "Traceback" not in log.read_text()


@pytest.mark.anyio
async def test_many_calls_at_once_are_all_answered(
    served: Settings, env: dict[str, str], backend: Backend, tmp_path: Path, log: Path, scale: float
) -> None:
    facts = [f"Fact {n} of many." for n in range(int(40 * scale))]
    async with client(env, log) as mcp:
        missed = await asyncio.gather(*(mcp.call_tool("memory_store", {"payload_md": f}) for f in facts))
        assert {envelope(result)["error_code"] for result in missed} == {"GATEWAY_UNAVAILABLE"}
        with gateway(served, tmp_path):
            stored = await asyncio.gather(*(mcp.call_tool("memory_store", {"payload_md": f}) for f in facts))
    assert {result.structured_content["action"] for result in stored} == {"allow"}
    assert sorted(backend.contents()) == sorted(facts)


class Recorder:
    """Passes everything on, and remembers who asked for what with which token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[tuple[str, str | None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            token = dict(scope["headers"]).get(b"authorization")
            self.seen.append((f"{scope['method']} {scope['path']}", token.decode() if token else None))
        await self._app(scope, receive, send)


@pytest.mark.anyio
async def test_the_token_goes_with_every_call(served: Settings, env: dict[str, str], log: Path) -> None:
    recorder = Recorder(build_app(served))
    with serving(recorder, served.gateway_port):
        async with client({**env, "ENGRAM_TOKEN": "engram_of-alice"}, log) as mcp:
            for _ in range(2):
                await mcp.call_tool("memory_query", {"query": "x"})
    assert recorder.seen == [("GET /health", None), *[("POST /mcp", "Bearer engram_of-alice")] * 2]
    assert "engram_of-alice" not in log.read_text()


@pytest.mark.anyio
async def test_the_caller_is_the_tokens_owner(
    served: Settings, env: dict[str, str], tmp_path: Path, log: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"engram_of-ada").hexdigest()
    tokens.write_text(f'[[token]]\nsha256 = "{digest}"\nowner = "ada"\nscopes = ["read", "write"]\n')
    tokens.chmod(0o600)
    with gateway(served, tmp_path, ENGRAM_TOKENS_FILE=str(tokens)):
        async with client(env, log) as mcp:
            refused = envelope(await mcp.call_tool("memory_store", {"payload_md": "A fact."}))
        async with client({**env, "ENGRAM_TOKEN": "engram_of-ada"}, log) as mcp:
            stored = await mcp.call_tool("memory_store", {"payload_md": "A fact."})
    assert refused["error_code"] == "UNAUTHENTICATED"
    assert stored.structured_content["space_written"] == "private:ada"


@pytest.mark.anyio
async def test_a_stranger_on_the_gateways_port_gets_nothing(
    served: Settings, env: dict[str, str], tmp_path: Path, log: Path
) -> None:
    stranger = FaultyServer(PlainServer())
    env = {**env, "ENGRAM_TOKEN": "engram_of-alice", "ENGRAM_DATA_DIR": str(tmp_path / "data")}
    del env["ENGRAM_NO_START"]
    with serving(stranger, served.gateway_port):
        async with client(env, log) as mcp:
            told = envelope(await mcp.call_tool("memory_store", {"payload_md": "A secret."}))
    assert "is not engram" in told["message"]
    assert "GATEWAY_PORT" in told["message"]
    assert set(stranger.calls) == {"GET /health"}
    assert "is not engram" in log.read_text()
    assert not (tmp_path / "data").exists(), "nothing was started"


def test_nothing_but_the_protocol_is_on_standard_output(
    served: Settings, env: dict[str, str], tmp_path: Path, log: Path
) -> None:
    """Also while it starts, fails, logs and is sent rubbish."""
    noisy = {**env, "ENGRAM_LOG_LEVEL": "debug", "PYTHONVERBOSE": "", "PYTHONDEVMODE": "1"}
    with by_hand(noisy, log) as mcp:
        hello = mcp.shake_hands()
        assert hello["result"]["protocolVersion"] == "2025-11-25"
        mcp.call(1, "memory_query", query="nobody is there")
        assert mcp.hear()["result"]["isError"] is True
        for rubbish in (b"rubbish", b"{}", b"[]", b'"\xff\xfe"', b"", b'{"jsonrpc": "2.0", "id": 1}'):
            mcp.say(rubbish)
        with gateway(served, tmp_path):
            mcp.call(2, "memory_query", query="somebody is")
            told = mcp.hear()["result"]
            assert told["isError"] is False, told
        mcp.say({"jsonrpc": "2.0", "id": 3, "method": "tools/list"})
        heard = mcp.hear()
        assert heard["id"] == 3
        assert [tool["name"] for tool in heard["result"]["tools"]] == list(TOOLS)
        rest, _ = mcp.process.communicate(timeout=PATIENCE)
    assert rest == b""
    assert mcp.process.returncode == 0
    assert "no gateway answers" in log.read_text()


def test_the_end_of_its_input_ends_it_at_once(env: dict[str, str], log: Path) -> None:
    with by_hand(env, log) as mcp:
        mcp.shake_hands()
        mcp.process.stdin.close()
        assert ended(mcp.process, ENDS_WITHIN) == 0
    assert "Traceback" not in log.read_text()


def test_the_end_of_its_input_ends_it_with_a_call_on_its_way(
    served: Settings, env: dict[str, str], backend: Backend, tmp_path: Path, log: Path
) -> None:
    """And the write is the gateway's to finish."""
    backend.faults.fail(Fault.WAIT)
    with gateway(served, tmp_path), by_hand(env, log) as mcp:
        mcp.shake_hands()
        mcp.call(1, "memory_store", payload_md="On its way.")
        eventually(lambda: "POST /memory/add" in backend.faults.calls, "the call at the memory server")
        mcp.process.stdin.close()
        assert ended(mcp.process, ENDS_WITHIN) == 0
        backend.faults.let_go.set()
        eventually(lambda: backend.contents() == ["On its way."], "the write")
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once(env: dict[str, str], log: Path, number: signal.Signals) -> None:
    with by_hand(env, log) as mcp:
        mcp.shake_hands()
        mcp.process.send_signal(number)
        assert ended(mcp.process, ENDS_WITHIN) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("and_input_ends", [False, True])
def test_a_broken_pipe_ends_it_without_a_trace(env: dict[str, str], log: Path, and_input_ends: bool) -> None:
    with by_hand(env, log) as mcp:
        mcp.shake_hands()
        mcp.process.stdout.close()
        mcp.call(1, "memory_query", query="x")
        if and_input_ends:
            mcp.process.stdin.close()
        assert ended(mcp.process, ENDS_WITHIN) == 0
    assert "Traceback" not in log.read_text()
    assert "Error" not in log.read_text()


def test_a_client_that_does_not_listen_does_not_keep_it(
    served: Settings, env: dict[str, str], tmp_path: Path, log: Path
) -> None:
    """More replies than a pipe holds, nobody reads them, and the input ends."""
    with by_hand(env, log) as mcp:
        mcp.shake_hands()
        for number in range(1, 40):
            mcp.say({"jsonrpc": "2.0", "id": number, "method": "tools/list"})
        mcp.process.stdin.close()
        assert ended(mcp.process, ENDS_WITHIN) == 0


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"GATEWAY_PORT": "0"}, "GATEWAY_PORT=0"),
        ({"ENGRAM_TOKEN": "not a tokén"}, "ENGRAM_TOKEN"),
        ({"ENGRAM_CONFIG": "/nowhere/engram.toml"}, "ENGRAM_CONFIG"),
        ({"ENGRAM_NO_START": "perhaps"}, "ENGRAM_NO_START"),
    ],
)
def test_bad_settings_end_it_with_one_clear_message(tmp_path: Path, env: dict[str, str], told: str) -> None:
    usual = {"ENGRAM_DATA_DIR": str(tmp_path), "GATEWAY_PORT": str(free_port()), "ENGRAM_NO_START": "1"}
    done = run_engram("mcp", env=environment(**{**usual, **env}))
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_closed_streams_are_told(env: dict[str, str], log: Path) -> None:
    with by_hand(env, log, ["sh", "-c", f"exec {shlex.join(PROGRAM)} <&-"]) as mcp:
        assert mcp.process.wait(10) == 1
    assert "standard stream is closed" in log.read_text()


@pytest.mark.anyio
async def test_a_stack_that_will_not_start_says_why(env: dict[str, str], tmp_path: Path, log: Path) -> None:
    env = {**env, "ENGRAM_DATA_DIR": str(tmp_path / "data"), "REDIS_URL": "redis://127.0.0.1:9"}
    env["POSTGRES_DSN"] = "postgresql://nobody:secretpw@127.0.0.1:9/nowhere"
    del env["ENGRAM_NO_START"]
    async with client(env, log) as mcp:
        told = envelope(await mcp.call_tool("memory_query", {"query": "x"}))
    assert told["error_code"] == "EMBEDDED_FAILED"
    assert "`engram up` ended: " in told["message"]
    assert "127.0.0.1" in told["message"]
    assert str(tmp_path / "data" / "logs" / "up.log") in told["message"]
    assert "secretpw" not in told["message"] + log.read_text()


@pytest.fixture
def taken(
    served: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[background.Background]:
    """One that finds nobody at the address, and somebody else up on the folder."""
    ours = replace(served, data_dir=tmp_path)
    for name, value in as_environment(ours).items():
        monkeypatch.setenv(name, value)
    lock = FileLock(tmp_path / "up.lock")
    assert lock.make_exclusive()
    looking = background.Background(ours, may_start=True, tell=lambda _: None)
    yield looking
    assert looking.started is not None
    assert looking.started.wait(30) == 1, "the lock kept a second stack from starting"
    lock.drop()


def test_a_stack_on_another_port_is_told(
    taken: background.Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "READY_SECONDS", 1.0)
    with pytest.raises(GatewayUnavailable, match="another GATEWAY_PORT"):
        taken.ensure()


def test_somebody_elses_stack_is_waited_for_until_it_is_whole(
    taken: background.Background, served: Settings, backend: Backend
) -> None:
    backend.faults.fail(Order(Fault.STATUS, 503), Order(Fault.STATUS, 503), path="/memory/all")
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(taken.ensure)
        eventually(lambda: taken.started and taken.started.poll(), "our own stack to be refused")
        assert not found.done()
        with serving(build_app(served), served.gateway_port):
            found.result(30)
    assert backend.faults.calls.count("GET /memory/all") == 3


def test_only_a_gateway_of_this_machine_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = Settings(data_dir=tmp_path / "data", gateway_host="0.0.0.0", gateway_port=free_port())  # noqa: S104
    for name, value in {**as_environment(everywhere), "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GatewayUnavailable, match="start one with `engram up`"):
        background.Background(everywhere, may_start=True, tell=print).ensure()
    assert not (tmp_path / "data").exists()


def test_what_mcp_config_prints_really_runs(env: dict[str, str], log: Path) -> None:
    for words in printed_commands(env):
        with by_hand(env, log, words) as mcp:
            assert mcp.shake_hands()["result"]["serverInfo"]["name"] == "engram"
            mcp.process.stdin.close()
            assert ended(mcp.process, ENDS_WITHIN) == 0


def printed_commands(env: dict[str, str]) -> Iterator[list[str]]:
    for name, key in (("cursor", "mcpServers"), ("vscode", "servers")):
        done = run_engram("mcp-config", name, "--stdio", env=env)
        server = json.loads(done.stdout)[key]["engram"]
        yield [server["command"], *server["args"]]
    words = shlex.split(run_engram("mcp-config", "claude-code", "--stdio", env=env).stdout)
    yield words[words.index("--") + 1 :]


def alone(tmp_path: Path) -> dict[str, str]:
    """The environment of an `engram mcp` with a folder and a port of its own, and nobody there."""
    return environment(
        ENGRAM_DATA_DIR=str(tmp_path / "a folder" / "data"),
        GATEWAY_PORT=str(free_port()),
        OUTBOX_POLL_SECONDS="0.2",
        ENGRAM_STORE_DEADLINE_SECONDS="5",
    )


def living(log: Path) -> list[int]:
    """The stacks that were started, by what was told, and are not gone."""
    pids = [int(pid) for pid in re.findall(r"starting `engram up` \(process (\d+)\)", log.read_text())]
    return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def stopping(log: Path, url: str) -> Iterator[None]:
    """Whatever was started is stopped as its reader was told to, and leaves nobody behind."""
    try:
        yield
    finally:
        for pid in living(log):
            os.kill(pid, signal.SIGTERM)
        eventually(lambda: not living(log), "the stack to stop")
        eventually(lambda: not answers(f"{url}/health"), "the gateway to be gone")


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
@pytest.mark.anyio
async def test_two_at_once_start_one_stack_and_leave_it_running(tmp_path: Path, log: Path) -> None:
    env, project = alone(tmp_path), tmp_path / "project"
    url = f"http://127.0.0.1:{env['GATEWAY_PORT']}"
    project.mkdir()
    for name in ("engram", "json", "httpx2"):
        (project / f"{name}.py").write_text("raise SystemExit('a module of the project was run')")

    async def remember(fact: str) -> CallToolResult:
        async with client(env, log, folder=project) as mcp:
            return await mcp.call_tool("memory_store", {"payload_md": fact})

    with stopping(log, url):
        stored = await asyncio.gather(remember("From one."), remember("From the other."))
        assert not any(result.is_error for result in stored), stored
        (pid,) = living(log)
        assert f"stop it with `kill {pid}`" in log.read_text()
        assert os.getsid(pid) == pid, "a client that ends its server's group does not end the stack"
        assert answers(f"{url}/readyz"), "it stays up when its clients are gone"
        folder = Path(env["ENGRAM_DATA_DIR"])
        assert stat.S_IMODE((folder / "logs" / "up.log").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        async with client({**env, "ENGRAM_NO_START": "1"}, log) as later:
            found = await later.call_tool("memory_query", {"query": "from one other"})
        assert found.structured_content["total"] == 2


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
@pytest.mark.anyio
async def test_a_killed_stack_is_started_again_in_the_middle(tmp_path: Path, log: Path) -> None:
    env = alone(tmp_path)
    url = f"http://127.0.0.1:{env['GATEWAY_PORT']}"
    with stopping(log, url):
        async with client(env, log) as mcp:
            assert not (await mcp.call_tool("memory_store", {"payload_md": "Before."})).is_error
            (first,) = living(log)
            os.kill(first, signal.SIGKILL)
            eventually(lambda: not answers(f"{url}/health"), "the roles to end with their supervisor")
            found = await mcp.call_tool("memory_query", {"query": "before"})
            assert not found.is_error, found
            assert [r["content"] for r in found.structured_content["results"]] == ["Before."]
            (second,) = living(log)
            assert second != first
