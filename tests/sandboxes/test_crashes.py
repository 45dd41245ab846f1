"""Many requests at two gateways, and gateways killed half-way: one key, one sandbox."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from engram.assembly.gateway import build_app
from engram.assembly.sandboxes import open_sandboxes, reap_sandboxes
from engram.kernel.failpoints import FAILPOINTS
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from engram.web.sockets import free_port
from sandboxes.driver_contract import a_marker, is_running
from support.processes import answers, environment, eventually, run_engram, started
from support.serving import serving

pytestmark = [pytest.mark.crash, pytest.mark.xdist_group("sandbox-crashes")]

# With a key the sandbox is ready in the moment in which the answer is stored: there is no place between.
OF_MAKING = [
    name
    for name in FAILPOINTS
    if name.startswith(("making.", "idempotency.")) and name != "making.after_ready"
]
KEY = {"Idempotency-Key": "key-1"}
BODY = {"ttl_seconds": 600}


@pytest.fixture
def served(settings: Settings) -> Settings:
    return replace(settings, gateway_port=free_port())


def asked(url: str, headers: dict[str, str] = KEY) -> httpx2.Response | None:
    """None when no reply came."""
    try:
        return httpx2.post(f"{url}/v1/sandboxes", json=BODY, headers=headers, trust_env=False, timeout=60)
    except httpx2.HTTPError:
        return None


@contextmanager
def gateways(settings: Settings, log: Path, number: int) -> Iterator[list[str]]:
    each = [replace(settings, gateway_port=free_port()) for _ in range(number)]
    with ExitStack() as running:
        for one in each:
            running.enter_context(started("serve", env=environment(one), log=log))
        for one in each:
            eventually(lambda one=one: answers(f"{one.gateway_url}/health"), "the gateway")
        yield [one.gateway_url for one in each]


def rows(dsn: str) -> list[dict[str, Any]]:
    with connect(dsn) as connection:
        return connection.execute("SELECT id, status FROM sandboxes.sandboxes ORDER BY number").fetchall()


def folders(settings: Settings) -> list[str]:
    assert settings.sandbox_dir is not None
    found = (path for root in settings.sandbox_dir.iterdir() for path in root.iterdir())
    return sorted(path.name for path in found if path.name != ".programs")


def an_hour_passes(dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.idempotency_keys SET locked_at = locked_at - interval '1 hour'")
        connection.execute("UPDATE sandboxes.sandboxes SET begun_at = begun_at - interval '1 hour'")


def test_a_hundred_at_once_at_two_gateways_make_one(
    settings: Settings, dsn: str, tmp_path: Path, scale: float
) -> None:
    with (
        gateways(settings, tmp_path / "gateway.log", 2) as urls,
        ThreadPoolExecutor(100) as pool,
        httpx2.Client(trust_env=False, timeout=60, limits=httpx2.Limits(max_connections=100)) as http,
    ):
        for turn in range(max(3, round(3 * scale))):
            key = {"Idempotency-Key": f"turn-{turn}"}

            def post(number: int, key: dict[str, str] = key) -> httpx2.Response:
                url = f"{urls[number % 2]}/v1/sandboxes"
                return http.post(url, json=BODY, headers=key)

            replies = list(pool.map(post, range(100)))
            assert {reply.status_code for reply in replies} == {201}
            assert len({reply.text for reply in replies}) == 1
            assert sum("Idempotency-Replayed" not in reply.headers for reply in replies) == 1
            assert len(rows(dsn)) == len(folders(settings)) == turn + 1
        box = replies[0].json()["id"]
        said = [
            httpx2.post(
                f"{url}/v1/sandboxes/{box}/exec", json={"argv": ["echo", "x"]}, trust_env=False
            ).json()
            for url in urls
        ]
        assert [one["stdout"] for one in said] == ["x\n", "x\n"], "any gateway of the host can use it"


def test_killed_anywhere_between_reserving_and_storing_it_is_one(
    served: Settings, dsn: str, tmp_path: Path
) -> None:
    """Each place in turn: killed there, asked again; the id of the first reservation is what is made."""
    log, url = tmp_path / "gateway.log", served.gateway_url
    reserved = None
    for place in OF_MAKING:
        with started("serve", env=environment(served, ENGRAM_FAILPOINT=place), log=log) as gateway:
            eventually(lambda: answers(f"{url}/health"), "the gateway")
            assert asked(url) is None
            assert gateway.wait(20) == -signal.SIGKILL, f"{place} was never reached"
        with connect(dsn) as connection:
            kept = connection.execute("SELECT resource_id FROM logbook.idempotency_keys").fetchone()
        assert kept is not None
        assert reserved in (None, kept["resource_id"]), place
        reserved = kept["resource_id"]
        assert [row["id"] for row in rows(dsn)] in ([], [reserved])
        assert folders(served) in ([], [reserved])
        if place == "idempotency.after_save":
            break
        with connect(dsn) as connection:
            connection.execute(
                "UPDATE logbook.idempotency_keys SET locked_at = locked_at - interval '1 hour'"
            )
            if place != "idempotency.before_save":  # as it was before this try
                connection.execute("UPDATE sandboxes.sandboxes SET status = 'creating', ready_at = NULL")
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{url}/health"), "the gateway again")
        replies = [asked(url) for _ in range(2)]
        bodies = [reply.json() for reply in replies if reply is not None]
        assert [(body["id"], body["status"]) for body in bodies] == [(reserved, "ready")] * 2
        said = httpx2.post(f"{url}/v1/sandboxes/{reserved}/exec", json={"argv": ["true"]}, trust_env=False)
        assert said.json()["exit_code"] == 0
    assert rows(dsn) == [{"id": reserved, "status": "ready"}]
    assert folders(served) == [reserved]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("place", "then"),
    [
        ("making.after_row", "failed"),
        ("making.after_folder", "ready"),
        ("making.after_ready", "ready"),
        ("service.after_delete", "deleted"),
        ("reaper.after_expire", "expired"),
    ],
)
async def test_what_nobody_asks_for_again_is_settled_by_the_reaper(
    served: Settings, db: AsyncExecutor, dsn: str, tmp_path: Path, place: str, then: str
) -> None:
    if not place.startswith("making."):
        async with open_sandboxes(served, db) as boxes:
            await boxes.create("local", str(uuid4()), "default", None, {})
    armed = environment(served, ENGRAM_FAILPOINT=place)
    if place == "reaper.after_expire":
        with connect(dsn) as connection:
            connection.execute("UPDATE sandboxes.sandboxes SET expires_at = now()")
        assert run_engram("sandbox", "reap", env=armed).returncode == -signal.SIGKILL
    else:
        with started("serve", env=armed, log=tmp_path / "gateway.log") as gateway:
            eventually(lambda: answers(f"{served.gateway_url}/health"), "the gateway")
            if place == "service.after_delete":
                with pytest.raises(httpx2.HTTPError):
                    httpx2.delete(f"{served.gateway_url}/v1/sandboxes/{rows(dsn)[0]['id']}", trust_env=False)
            else:
                assert asked(served.gateway_url, {} if place == "making.after_ready" else KEY) is None
            assert gateway.wait(20) == -signal.SIGKILL, "the failpoint was never reached"
    an_hour_passes(dsn)
    assert await reap_sandboxes(served, db) == (0 if place == "making.after_ready" else 1)
    assert [row["status"] for row in rows(dsn)] == [then]
    assert folders(served) == ([rows(dsn)[0]["id"]] if then == "ready" else [])


def test_a_killed_gateway_leaves_no_command_running_and_never_runs_it_again(
    served: Settings, dsn: str, tmp_path: Path
) -> None:
    log, url, marker = tmp_path / "gateway.log", served.gateway_url, a_marker()
    with started("serve", env=environment(served), log=log) as gateway, ThreadPoolExecutor(1) as pool:
        eventually(lambda: answers(f"{url}/health"), "the gateway")
        box = asked(url).json()["id"]
        program = f"echo x >> runs; setsid sleep {marker} & wait"

        def run() -> httpx2.Response | None:
            try:
                return httpx2.post(
                    f"{url}/v1/sandboxes/{box}/exec",
                    json={"argv": ["sh", "-c", program]},
                    headers={"Idempotency-Key": "key-2"},
                    trust_env=False,
                    timeout=60,
                )
            except httpx2.HTTPError:
                return None

        running = pool.submit(run)
        eventually(lambda: is_running(marker), "the command")
        gateway.kill()
        assert running.result() is None
        eventually(lambda: not is_running(marker), "the end of the command")
    an_hour_passes(dsn)
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{url}/health"), "the gateway again")
        again = run()
        assert again is not None
        assert (again.status_code, again.json()["error_code"]) == (409, "idempotency_outcome_unknown")
        file = httpx2.get(f"{url}/v1/sandboxes/{box}/files/runs", trust_env=False)
        assert file.content == b"x\n"
