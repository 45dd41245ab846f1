"""`engram up` as a person runs it: everything can be killed with -9, and nothing acknowledged is lost."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from mcp import Client

from engram.embedded import running_postgres, running_redis
from engram.postgres.pool import connect
from engram.web.sockets import free_port
from support.faults import FaultyServer
from support.ledger import Ledger
from support.parts import used
from support.plain_server import PlainServer
from support.processes import answers, environment, eventually, run_engram, started
from support.serving import serving

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]


_numbers = itertools.count()


@dataclass
class Up:
    """A running `engram up`."""

    process: subprocess.Popen[bytes]
    data_dir: Path
    port: int
    env: dict[str, str]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def dsn(self) -> str:
        found = running_postgres(self.data_dir)
        assert found is not None
        return found

    def contents(self) -> list[str]:
        found = running_postgres(self.data_dir, "engram_memory")
        assert found is not None
        with connect(found) as connection:
            return [row["content"] for row in connection.execute("SELECT content FROM memories")]

    def pid_of(self, role: str) -> int:
        """The child that runs this role, by its command line."""
        return eventually(lambda: _child(self.process.pid, role), f"a {role} process")


def _child(parent: int, role: str) -> int | None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                owner = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if owner == parent and role.encode() in command:
                return int(entry.name)
    return None


@contextmanager
def up(data_dir: Path, port: int | None = None) -> Iterator[Up]:
    port = port or free_port()
    env = environment(
        ENGRAM_DATA_DIR=str(data_dir),
        GATEWAY_PORT=str(port),
        OPENMEMORY_BREAKER_COOLDOWN_SECONDS="0.3",
        OUTBOX_POLL_SECONDS="0.2",
        ENGRAM_STORE_DEADLINE_SECONDS="8",
    )
    log = data_dir.parent / f"up-{next(_numbers)}.log"
    with started("up", env=env, log=log) as process:
        running = Up(process, data_dir, port, env, log)
        eventually(lambda: "engram is up" in log.read_text() or process.poll(), "engram up")
        assert process.poll() is None, log.read_text()
        yield running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("a stack") / "data") as running:
        version = run_engram("redis-cli", "info", "server", env=running.env).stdout
        used("Redis", f"real: {re.search(r'redis_version:([0-9.]+)', version)[1]}, embedded")
        yield running


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["legacy", "2026-07-28"])
async def test_a_second_terminal_stores_and_queries_through_an_official_client(stack: Up, era: str) -> None:
    async with Client(f"{stack.url}/mcp", mode=era) as client:
        stored = await client.call_tool("memory_store", {"payload_md": f"Seen from a {era} client."})
        assert stored.structured_content["action"] == "allow"
        found = await client.call_tool("memory_query", {"query": "seen from client"})
    assert f"Seen from a {era} client." in {r["content"] for r in found.structured_content["results"]}


def test_the_screen_tells_addresses_mode_and_what_to_paste(stack: Up) -> None:
    screen = eventually(
        lambda: stack.log.read_text() if "Cursor" in stack.log.read_text() else None, "the screen"
    )
    assert f"{stack.url}/mcp" in screen
    assert "DEGRADED" in screen
    assert "claude mcp add --transport http engram" in screen
    assert len(screen.splitlines()) < 40


@pytest.mark.parametrize("role", ["memory-server", "serve", "worker", "postgres", "redis"])
def test_any_part_may_be_killed(stack: Up, role: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.store(stack.url, f"Before [{role}] died.") is not None
    os.kill(_pid(stack, role), signal.SIGKILL)
    for n in range(5):
        ledger.store(stack.url, f"While [{role}] was down, {n}.")
    eventually(lambda: answers(f"{stack.url}/readyz"), "the gateway after the kill")
    reply = eventually(
        lambda: ledger.store(stack.url, f"After [{role}] came back."), "a store after the kill"
    )
    assert reply.get("action") in ("allow", "deferred"), reply
    eventually(lambda: _all_delivered(stack), "everything parked to be delivered")
    mine = [text for text in stack.contents() if f"[{role}]" in text]
    assert [w for w in ledger.verdict(stack.dsn, mine) if "engram does not know" not in w] == []


def _pid(stack: Up, role: str) -> int:
    if role == "postgres":
        return int((stack.data_dir / "postgres" / "postmaster.pid").read_text().splitlines()[0])
    if role == "redis":
        done = run_engram("redis-cli", "info", "server", env=stack.env)
        return int(re.search(r"process_id:(\d+)", done.stdout)[1])
    return stack.pid_of(role)


def _all_delivered(stack: Up) -> bool:
    try:
        with connect(stack.dsn) as connection:
            row = connection.execute(
                "SELECT (SELECT count(*) FROM logbook.outbox_memory WHERE status = 'pending')"
                " + (SELECT count(*) FROM governance.write_audit WHERE status = 'pending') AS open"
            ).fetchone()
    except Exception:  # noqa: BLE001 - PostgreSQL may still be coming back
        return False
    return row is not None and row["open"] == 0


def test_commands_of_a_second_terminal(stack: Up) -> None:
    stored = run_engram("store", "The CLI was here.", "--kind", "FACT", env=stack.env)
    assert (stored.returncode, '"action": "allow"' in stored.stdout) == (0, True), stored
    assert "The CLI was here." in run_engram("query", "CLI", env=stack.env).stdout
    counted = run_engram("psql", "-Atc", "SELECT count(*) > 0 FROM governance.write_audit", env=stack.env)
    assert counted.stdout.strip() == "t"
    assert run_engram("redis-cli", "ping", env=stack.env).stdout.strip() == "PONG"
    assert "up to date" in run_engram("migrate", "--plan", env=stack.env).stdout
    assert f"{stack.url}/mcp" in run_engram("mcp-config", "cursor", env=stack.env).stdout
    refused = run_engram("store", "   ", env=stack.env)
    assert refused.returncode == 1
    assert "payload_md" in refused.stderr


def test_the_specifications_own_commands(stack: Up) -> None:
    env = {**stack.env, "POSTGRES_DSN": stack.dsn}
    for command, told in (
        (["engram.gateway.outbox_worker", "--once"], "claimed="),
        (["engram.gateway.reconcile_outbox", "--once"], "abandoned write(s)"),
        (["engram.gateway.reconcile_outbox", "--report"], "✓ redirects equal outbox rows"),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", *command],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done
        assert told in done.stdout
    unknown = subprocess.run(
        [sys.executable, "-m", "engram.gateway.reconcile_outbox", "--nonsense"],
        env=env,
        capture_output=True,
        check=False,
    )
    assert unknown.returncode == 2


def test_the_doctor_examines_every_part_and_the_invariants(stack: Up, tmp_path: Path) -> None:
    well = run_engram("doctor", env=stack.env)
    assert well.returncode == 0, well.stdout
    parts = ("PostgreSQL", "schema", "Redis", "memory server", "gateway", "sandboxes", "documents")
    for part in (*parts, "outbox worker", "ingest worker", "outbox"):
        assert f"✓ {part}" in well.stdout
    assert well.stdout.count("✓ invariant: ") == 7
    ill = run_engram("doctor", env=environment(ENGRAM_DATA_DIR=str(tmp_path), GATEWAY_PORT=str(free_port())))
    assert ill.returncode == 1
    assert "engram up" in ill.stdout
    assert "Traceback" not in ill.stderr


def test_a_second_up_on_the_same_folder_is_told_so(stack: Up) -> None:
    second = run_engram("up", env={**stack.env, "GATEWAY_PORT": str(free_port())})
    assert second.returncode == 1
    assert "already up" in second.stderr
    assert answers(f"{stack.url}/readyz")


def test_killed_up_leaves_no_role_behind_and_the_next_one_adopts(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with up(data_dir) as first:
        ledger = Ledger(tmp_path / "ledger.jsonl")
        reply = ledger.store(first.url, "Stored before the kill.")
        assert reply is not None
        roles = [first.pid_of(role) for role in ("serve", "memory-server", "worker")]
        postmaster = _pid(first, "postgres")
        first.process.kill()
        eventually(lambda: all(gone(pid) for pid in roles), "the roles to end with their supervisor", 15)
        assert not gone(postmaster), "the database outlives its user, to be adopted"
        port = first.port
    with up(data_dir, port) as second:
        assert _pid(second, "postgres") == postmaster
        assert ledger.store(second.url, "Stored after the kill.") is not None
        assert sorted(second.contents()) == ["Stored after the kill.", "Stored before the kill."]
        second.process.send_signal(signal.SIGHUP)
        assert second.process.wait(30) == 0
    assert gone(postmaster), "the last user stopped it, though only its terminal was closed"
    assert running_postgres(data_dir) is None
    assert running_redis(data_dir) is None


def test_a_taken_port_is_told_plainly(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_engram("up", env=environment(ENGRAM_DATA_DIR=str(tmp_path / "data"), GATEWAY_PORT=port))
    assert done.returncode == 1
    assert port in done.stderr
    assert "GATEWAY_PORT" in done.stderr
    assert running_postgres(tmp_path / "data") is None


def test_the_demo_tells_its_story_and_touches_nothing_of_the_users(tmp_path: Path) -> None:
    """A settings file in reach points at a database that would refuse: the demo must not read it."""
    config = tmp_path / "engram.toml"
    config.write_text("[postgres]\ndsn = 'postgresql://127.0.0.1:9/nowhere'\n")
    with tempfile.TemporaryDirectory(prefix="e-") as scratch:
        env = environment(TMPDIR=scratch, ENGRAM_CONFIG=str(config), REDIS_URL="redis://127.0.0.1:9")
        done = run_engram("demo", env=env, timeout=90)
        assert list(Path(scratch).iterdir()) == [], "it cleans up after itself"
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^✓", done.stdout, re.MULTILINE)) == 9


def test_a_stranger_on_the_memory_servers_port_gets_nothing(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with up(data_dir) as first:
        assert Ledger(tmp_path / "a.jsonl").store(first.url, "Before the stranger.") is not None
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(30)
    stranger = PlainServer()
    faults = FaultyServer(stranger)
    port = int((data_dir / "memory" / "port").read_text())
    with serving(faults, port), up(data_dir) as second:
        reply = Ledger(tmp_path / "b.jsonl").store(second.url, "After the stranger.")
        assert reply is not None
        assert reply["action"] == "allow"
        assert sorted(second.contents()) == ["After the stranger.", "Before the stranger."]
    assert faults.calls == []


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"GATEWAY_PORT": "http"}, ["GATEWAY_PORT", "not a whole number", "e.g. GATEWAY_PORT=8787"]),
        ({"GATEWAY_HOST": "0.0.0.0"}, ["GATEWAY_HOST", "without tokens"]),  # noqa: S104
        ({"POSTGRES_DSN": "postgresql://nobody:secretpw@127.0.0.1:9/x"}, ["engram:", "127.0.0.1"]),
        ({"ENGRAM_FAILPOINT": "no.such.place"}, ["no.such.place", "known:"]),
    ],
)
def test_bad_settings_end_serve_with_one_clear_message(tmp_path: Path, env: dict, told: list[str]) -> None:
    done = run_engram("serve", env=environment(ENGRAM_DATA_DIR=str(tmp_path / "data"), **env))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in told), done.stderr
    assert "secretpw" not in done.stderr


def test_the_walk_of_the_specification_line_by_line(stack: Up) -> None:
    held = run_engram("hold", "memory-server", env=stack.env)
    assert held.returncode == 0, held.stderr
    try:
        call = {"tool": "memory_store", "arguments": {"payload_md": "test", "target_space": "team:test"}}
        reply = httpx2.post(
            f"http://localhost:{stack.port}/mcp", json=call, trust_env=False, timeout=30
        ).json()
        assert (reply["ok"], reply["action"]) == (False, "deferred")
        assert isinstance(reply["outbox_id"], int)
        assert reply["correlation_id"].startswith("corr-")
        assert reply["space_written"] is reply["memory_id"] is None
        sql = "SELECT outbox_id FROM logbook.outbox_memory WHERE status = 'pending'"
        pending = run_engram("psql", "-At", "-c", sql, env=stack.env).stdout.split()
        assert str(reply["outbox_id"]) in pending
    finally:
        released = run_engram("release", "memory-server", env=stack.env)
    assert released.returncode == 0, released.stderr
    eventually(lambda: answers(f"{stack.url}/readyz"), "readiness")
    flushed = subprocess.run(
        [sys.executable, "-m", "engram.gateway.outbox_worker", "--once"],
        env=stack.env,
        capture_output=True,
        text=True,
    )
    assert flushed.returncode == 0, flushed.stderr
    sent = f"SELECT status FROM logbook.outbox_memory WHERE outbox_id = {reply['outbox_id']}"
    eventually(
        lambda: run_engram("psql", "-At", "-c", sent, env=stack.env).stdout.strip() == "sent", "the delivery"
    )


def test_a_gateway_that_is_said_to_be_back_answers(stack: Up) -> None:
    held = run_engram("hold", "gateway", env=stack.env)
    released = run_engram("release", "gateway", env=stack.env)
    assert (held.returncode, released.stdout) == (0, "gateway is back\n"), released.stderr
    assert answers(f"{stack.url}/health")


@pytest.mark.parametrize("command", ["hold", "release"])
def test_a_role_that_is_not_there_is_named(stack: Up, command: str) -> None:
    refused = run_engram(command, "no-such-role", env=stack.env)
    assert refused.returncode == 1
    assert "it has memory-server, gateway, outbox-worker" in refused.stderr


def test_nothing_can_be_held_where_nothing_runs(tmp_path: Path) -> None:
    refused = run_engram("hold", "gateway", env=environment(ENGRAM_DATA_DIR=str(tmp_path / "none")))
    assert refused.returncode == 1
    assert "engram is not up" in refused.stderr
