"""`engram verify` as an operator types it: on a running stack, on nothing, on somebody else's parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from engram import supervisor
from engram.embedded import running_postgres, running_redis
from engram.gateway.gate import CAPABILITIES
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.web.sockets import free_port
from support.parts import used
from support.plain_server import PlainServer
from support.processes import answers, command, environment, eventually, run_engram, started
from support.serving import serving

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

ROOT = Path(__file__).parents[2]
STEPS = 11
OPEN_MEMORIES = (
    "SELECT count(*) AS n FROM logbook.memories"
    " WHERE target_space = 'private:engram-verify' AND state <> 'forgotten'"
)


class Up:
    """A running `engram up`."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self.env = environment(ENGRAM_DATA_DIR=str(self.data_dir), GATEWAY_PORT=str(free_port()))
        self.url = f"http://127.0.0.1:{self.env['GATEWAY_PORT']}"

    @property
    def dsn(self) -> str:
        return running_postgres(self.data_dir) or ""

    def roles(self) -> dict[str, int | None]:
        return supervisor.roles_of(self.data_dir)

    def is_whole(self) -> bool:
        return None not in self.roles().values() and verified(self.env, "--json")["reason"] == ""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("a verified stack")
    running = Up(folder)
    with started("up", env=running.env, log=folder / "up.log"):
        eventually(lambda: answers(f"{running.url}/readyz"), "engram up")
        eventually(running.is_whole, "every capability")
        yield running


def verify(env: dict[str, str], *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_engram("verify", *arguments, env=env, timeout=110)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def verified(env: dict[str, str], *arguments: str) -> dict[str, Any]:
    """The JSON report, whatever the verdict."""
    return dict(json.loads(run_engram("verify", *arguments, env=env, timeout=110).stdout))


def scalar(dsn: str, sql: str) -> Any:
    with connect(dsn) as connection:
        row = connection.execute(sql.encode()).fetchone()
    assert row is not None
    return next(iter(row.values()))


def steps_of(report: dict[str, Any]) -> dict[str, bool]:
    return {step["name"]: step["passed"] for step in report["degradation"]["steps"]}


def test_a_running_stack_is_told_as_a_table(up: Up) -> None:
    table = verify(up.env).stdout
    for name in CAPABILITIES:
        assert any(name in line and " ok " in line for line in table.splitlines()), table
    assert "✓ DEGRADED mode: passed" in table


def test_the_whole_test_on_a_running_stack(up: Up) -> None:
    before = up.roles()["memory-server"]
    done = verify(up.env, "--full")
    assert "✓ FULL mode: passed" in done.stdout
    assert "stops its memory server" in done.stdout
    assert done.stdout.count(" ok ") == len(CAPABILITIES) + STEPS, done.stdout
    assert "sent=1" in done.stdout, "its own pass delivered it"
    assert up.roles()["memory-server"] != before, "it was really stopped"
    assert scalar(up.dsn, OPEN_MEMORIES) == 0
    memories = running_postgres(up.data_dir, "engram_memory") or ""
    assert scalar(memories, "SELECT count(*) FROM memories WHERE content LIKE 'engram verify %'") == 0
    assert os.listdir(up.data_dir / "hold") == []
    eventually(up.is_whole, "the stack as it was")


def test_killed_half_way_it_gives_the_memory_server_back(up: Up) -> None:
    process = subprocess.Popen(
        command("verify", "--full"), env=up.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    eventually(lambda: "memory-server" in supervisor.held_roles(up.data_dir), "the hold")
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: up.roles()["memory-server"] is None, "the memory server to stop")
    assert "memory-server" in supervisor.held_roles(up.data_dir), "as long as it lives, it holds"
    children = [pid for pid in map(int, _pids()) if _parent(pid) == process.pid]
    assert children
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: not any(_parent(pid) for pid in children), "its gateway to end with it")
    eventually(up.is_whole, "the stack as it was")
    assert verified(up.env, "--full", "--json")["passed"], "and the next one is none the worse for it"


def _pids() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(status[1]) if status[0] != "Z" else None


def test_a_stopped_memory_server_fails_full_and_not_degraded(up: Up) -> None:
    assert run_engram("hold", "memory-server", env=up.env).returncode == 0
    try:
        told = verify(up.env).stdout
        assert "✓ DEGRADED mode: going on without openmemory" in told
        full = verify(up.env, "--full", code=1).stdout
        assert "✗ FULL mode: required capability openmemory failed" in full
        assert "not run: openmemory failed" in full
        skipping = verified(up.env, "--full", "--skip", "openmemory", "--json")
        assert (skipping["passed"], skipping["degradation"]["not_run"]) == (
            True,
            "not run: openmemory skipped",
        )
    finally:
        assert run_engram("release", "memory-server", env=up.env).returncode == 0
    eventually(up.is_whole, "the stack as it was")


def test_a_worker_that_stopped_beating_fails_full(up: Up) -> None:
    assert run_engram("hold", "outbox-worker", env=up.env).returncode == 0
    try:
        with connect(up.dsn) as connection:
            connection.execute(
                "UPDATE logbook.kv SET value_json = jsonb_build_object('at', now() - interval '1 hour')"
                " WHERE namespace = 'worker.heartbeat'"
            )
        report = verified(up.env, "--json", "--full", "--skip", "openmemory", "--skip", "reconcile")
        assert report["reason"] == "FULL mode: required capability outbox_worker failed"
        assert "s ago" in report["capabilities"]["outbox_worker"]["reason"]
        assert verified(up.env, "--json")["reason"].endswith("without outbox_worker, reconcile")
    finally:
        assert run_engram("release", "outbox-worker", env=up.env).returncode == 0
    eventually(up.is_whole, "the stack as it was")


def test_an_unknown_skip_is_refused_by_name(up: Up) -> None:
    done = verify(up.env, "--full", "--skip", "redis", "--skip", "tea", code=1)
    assert "'tea'" in done.stderr
    assert "outbox_worker" in done.stderr
    assert done.stdout == ""


def test_on_nothing_running(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    env = environment(ENGRAM_DATA_DIR=str(data_dir), GATEWAY_PORT=str(free_port()))
    refused = verify(env, code=1)
    assert "no gateway answers" in refused.stderr
    assert "engram up" in refused.stderr
    assert not data_dir.exists(), "looking starts nothing"
    done = verify(env, "--full", "--json")
    report = json.loads(done.stdout)
    assert "a stack of its own" in done.stderr
    assert "killed with -9" in report["degradation"]["how"]
    assert report["passed"], report
    assert list(steps_of(report).values()) == [True] * STEPS
    assert {found["status"] for found in report["capabilities"].values()} == {"ok"}
    assert (running_postgres(data_dir), running_redis(data_dir)) == (None, None), "it was stopped afterwards"
    assert not supervisor.is_up(data_dir)


class Doubling(PlainServer):
    """Keeps everything twice."""

    async def _add(self, request: Request) -> JSONResponse:
        await super()._add(request)
        return await super()._add(request)


@contextmanager
def external(settings: Settings, tmp_path: Path, plain: PlainServer, *roles: str) -> Iterator[dict[str, str]]:
    """Roles that run alone, on a database and a memory server of somebody else's."""
    used("OpenMemory", "stand-in: a plain server without idempotency keys, besides the embedded one")
    with ExitStack() as held:
        mine = replace(
            settings,
            gateway_port=free_port(),
            data_dir=tmp_path / "data",
            openmemory_base_url=held.enter_context(serving(plain)),
            openmemory_timeout_seconds=5,
            store_deadline_seconds=8,
        )
        env = environment(mine)
        for role in roles:
            log = tmp_path / f"{role}.log"
            held.enter_context(started(*role.split(), env=env, log=log))
        if "serve" in roles:
            eventually(lambda: answers(f"{mine.gateway_url}/readyz"), "the gateway")
        yield env


@pytest.mark.parametrize("roles", [("serve", "worker outbox"), ()], ids=["running", "nothing-running"])
def test_on_a_memory_server_that_may_not_be_stopped(
    settings: Settings, tmp_path: Path, roles: tuple[str, ...], dsn: str
) -> None:
    plain = PlainServer()
    with external(settings, tmp_path, plain, *roles) as env:
        if roles:
            skips = ["--skip", "redis"]
            eventually(lambda: verified(env, "--json", *skips)["reason"] == "", "every capability")
        else:
            skips = []
        report = verified(env, "--full", "--json", *skips)
    assert report["passed"], report
    assert "not ours to stop" in report["degradation"]["how"]
    assert list(steps_of(report).values()) == [True] * STEPS
    assert plain.contents() == [], "nothing is left there"
    assert scalar(dsn, OPEN_MEMORIES) == 0


def test_a_memory_server_that_doubles_is_found_out(settings: Settings, tmp_path: Path, dsn: str) -> None:
    plain = Doubling()
    skips = [word for name in ("redis", "outbox_worker", "reconcile") for word in ("--skip", name)]
    with external(settings, tmp_path, plain, "serve") as env:
        report = verified(env, "--full", "--json", *skips)
        done = report["degradation"]["steps"]
        assert not report["passed"]
        assert report["reason"].startswith("the memory server has it once: it has 2")
        assert (done[-1]["name"], done[-1]["passed"]) == ("the memory server has it once", False)
        assert scalar(dsn, OPEN_MEMORIES) == 0, "it is forgotten all the same"
        verify(env, "--full", *skips, code=1)


def test_a_schema_that_is_behind_is_not_migrated_unasked(
    settings: Settings, tmp_path: Path, dsn: str
) -> None:
    with connect(dsn) as connection:
        connection.execute("DELETE FROM engram_schema_version WHERE version = 1")
        connection.execute("DELETE FROM engram_schema_version")
    with external(settings, tmp_path, PlainServer()) as env:
        refused = verify(env, "--full", code=1)
    assert "engram migrate" in refused.stderr
    assert scalar(dsn, "SELECT count(*) FROM engram_schema_version") == 0


def test_make_has_the_specifications_own_name_for_it() -> None:
    def last_line(*more: str) -> str:
        command = ["make", "--no-print-directory", "-n", "verify-unified", *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip().splitlines()[-1]

    assert last_line("VERIFY_FULL=1").endswith("engram verify --full")
    assert last_line("VERIFY_FULL=0").rstrip().endswith("engram verify")
