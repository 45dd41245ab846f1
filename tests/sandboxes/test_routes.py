"""`/v1/sandboxes` as a client sees it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from starlette.types import Message

from engram.api.routes.sandboxes import _EndsWhenNobodyListens
from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.sandboxes import sandlock_driver
from sandboxes.driver_contract import a_marker, is_running
from sandboxes.test_sandlock_driver import descriptors
from support.processes import eventually
from support.serving import serving

NOBODYS = "00000000-0000-4000-8000-000000000000"


def made(http: httpx2.Client, **asked: Any) -> dict[str, Any]:
    reply = http.post("/v1/sandboxes", json=asked)
    assert reply.status_code == 201, reply.text
    body: dict[str, Any] = reply.json()
    return body


def ran(http: httpx2.Client, sandbox_id: str, *argv: str, **more: Any) -> dict[str, Any]:
    reply = http.post(f"/v1/sandboxes/{sandbox_id}/exec", json={"argv": list(argv), **more})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def told(reply: httpx2.Response) -> tuple[int, str]:
    body = reply.json()
    assert {"success", "error_code", "message", "correlation_id", "context"} == set(body)
    return reply.status_code, body["error_code"]


def changed(dsn: str, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement.encode())


def count(dsn: str) -> int:
    with connect(dsn) as connection:
        found = connection.execute("SELECT count(*) AS n FROM sandboxes.sandboxes").fetchone()
    assert found is not None
    return int(found["n"])


def keys(dsn: str) -> int:
    with connect(dsn) as connection:
        found = connection.execute(
            "SELECT count(*) AS n FROM logbook.idempotency_keys WHERE status_code IS NULL"
        ).fetchone()
    assert found is not None
    return int(found["n"])


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    blocks = (block.splitlines() for block in text.strip().split("\n\n"))
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_what_became_of_sandboxes_and_commands_is_counted(http: httpx2.Client) -> None:
    def counted(name: str) -> float:
        return next(
            (
                float(line.split()[-1])
                for line in http.get("/metrics").text.splitlines()
                if line.startswith(name)
            ),
            0.0,
        )

    sandboxes = 'engram_sandboxes_total{result="made"}'
    commands = [
        f'engram_sandbox_exec_seconds_count{{ended_by="{how}"}}' for how in ("itself", "time", "caller")
    ]
    before = [counted(name) for name in (sandboxes, *commands)]
    box = made(http)
    ran(http, box["id"], "false")
    ran(http, box["id"], "sleep", "30", timeout_seconds=0.2)
    url, accept = f"/v1/sandboxes/{box['id']}/exec", {"Accept": "text/event-stream"}
    with http.stream("POST", url, json={"argv": ["sleep", "30"]}, headers=accept) as streamed:
        next(streamed.iter_lines())
    eventually(lambda: counted(commands[2]) == before[3] + 1, "the command that was hung up on")
    assert [counted(name) for name in (sandboxes, *commands)] == [value + 1 for value in before]


def test_a_life(http: httpx2.Client) -> None:
    box = made(http, env={"GREETING": "hello"}, ttl_seconds=600)
    url = f"/v1/sandboxes/{box['id']}"
    assert (box["status"], box["profile"], box["reason"]) == ("ready", "default", None)
    found = http.get(url).json()
    assert {**found, "correlation_id": ""} == {**box, "correlation_id": ""}
    said = ran(http, box["id"], "sh", "-c", "echo $GREETING; cat; echo oops >&2; exit 3", stdin="there")
    assert (said["stdout"], said["stderr"], said["exit_code"]) == ("hello\nthere", "oops\n", 3)
    assert (said["truncated"], said["timed_out"], said["ended_by"]) == (False, False, None)
    slow = ran(http, box["id"], "sleep", "30", timeout_seconds=0.3)
    assert (slow["timed_out"], slow["ended_by"], slow["exit_code"]) == (True, "time", 137)
    extended = http.post(f"{url}/extend_ttl", json={"ttl_seconds": 3600}).json()
    assert extended["expires_at"] > box["expires_at"]
    shorter = http.post(f"{url}/extend_ttl", json={"ttl_seconds": 60}).json()
    assert shorter["expires_at"] == extended["expires_at"]
    ran(http, box["id"], "sh", "-c", "echo kept > file")
    assert [http.post(f"{url}/stop").json()["status"] for _ in range(2)] == ["stopped", "stopped"]
    assert told(http.post(f"{url}/exec", json={"argv": ["true"]})) == (409, "STATE_CONFLICT")
    assert http.get(f"{url}/files/file").content == b"kept\n"
    assert [http.delete(url).status_code for _ in range(2)] == [204, 204]
    assert http.get(url).json()["status"] == "deleted"
    assert told(http.get(f"{url}/files/file")) == (409, "STATE_CONFLICT")
    assert told(http.post(f"{url}/extend_ttl", json={"ttl_seconds": 60})) == (409, "STATE_CONFLICT")
    assert told(http.post(f"{url}/stop")) == (409, "STATE_CONFLICT")


def test_lists_page_by_page(http: httpx2.Client) -> None:
    ids = [made(http)["id"] for _ in range(5)]
    http.post(f"/v1/sandboxes/{ids[2]}/stop")
    first = http.get("/v1/sandboxes", params={"limit": 3}).json()
    assert [box["id"] for box in first["sandboxes"]] == ids[:1:-1]
    rest = http.get("/v1/sandboxes", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert ([box["id"] for box in rest["sandboxes"]], rest["next_cursor"]) == (ids[1::-1], None)
    stopped = http.get("/v1/sandboxes", params={"status": "stopped"}).json()["sandboxes"]
    assert [box["id"] for box in stopped] == [ids[2]]
    assert http.get("/v1/sandboxes", params={"actor_user_id": "bob"}).json()["sandboxes"] == []
    for wrong in ({"status": "sleeping"}, {"cursor": "x"}, {"cursor": "-1"}, {"limit": 0}, {"limit": 201}):
        assert told(http.get("/v1/sandboxes", params=wrong)) == (400, "INVALID_ARGUMENT"), wrong


def test_what_is_anothers_is_not_there(http: httpx2.Client) -> None:
    box = made(http, actor_user_id="ada")
    bob = {"actor_user_id": "bob"}

    def asked(sandbox_id: str) -> list[tuple[int, str]]:
        url = f"/v1/sandboxes/{sandbox_id}"
        return [
            told(http.get(url, params=bob)),
            told(http.delete(url, params=bob)),
            told(http.post(f"{url}/stop", params=bob)),
            told(http.post(f"{url}/extend_ttl", params=bob, json={"ttl_seconds": 60})),
            told(http.post(f"{url}/exec", params=bob, json={"argv": ["true"]})),
            told(http.get(f"{url}/files/x", params=bob)),
            told(http.delete(f"{url}/files/x", params=bob)),
            told(
                http.put(
                    f"{url}/files/x",
                    params=bob,
                    content=b"x",
                    headers={"Content-Type": "application/octet-stream"},
                )
            ),
        ]

    for sandbox_id in (box["id"], NOBODYS, "no-id", "..%2F.."):
        assert set(asked(sandbox_id)) == {(404, "NOT_FOUND")}
    assert http.get(f"/v1/sandboxes/{box['id']}", params={"actor_user_id": "ada"}).json()["status"] == "ready"


def test_an_owner_that_cannot_be_anybody_is_refused_everywhere(http: httpx2.Client, dsn: str) -> None:
    url = f"/v1/sandboxes/{made(http)['id']}"
    for nobody in ("a\x00b", "", "x" * 9000, "a b"):
        params = {"actor_user_id": nobody}
        for reply in (
            http.get("/v1/sandboxes", params=params),
            http.get(url, params=params),
            http.post(f"{url}/stop", params=params),
            http.post("/v1/sandboxes", json=params),
            http.post("/mcp", json={"tool": "sandbox_create", "arguments": params}),
        ):
            assert told(reply) == (400, "INVALID_ARGUMENT"), nobody
    assert count(dsn) == 1


UNMAKEABLE: list[dict[str, Any]] = [
    {"profile": "kubernetes"},
    {"ttl_seconds": 1},
    {"ttl_seconds": 10**7},
    {"env": {"A=B": "x"}},
    {"env": {"": "x"}},
    {"env": {"A": "x\x00"}},
    {"env": {"A": "x" * 40_000}},
    {"sieve": True},
]
UNRUNNABLE: list[dict[str, Any]] = [
    {"argv": []},
    {"argv": [""]},
    {"argv": ["true"], "cwd": "/etc"},
    {"argv": ["true"], "cwd": "a/../.."},
    {"argv": ["true"], "cwd": "no/such/folder"},
    {"argv": ["true"], "timeout_seconds": 0},
    {"argv": ["true"], "timeout_seconds": 700},
    {"argv": ["true"], "stdin": "&", "stdin_encoding": "base64"},
    {"argv": ["true"], "stdin": "é", "stdin_encoding": "base64"},
    {"argv": ["a\x00b"]},
]


def test_what_cannot_be_made_or_run_is_refused_before_anything_is_done(http: httpx2.Client, dsn: str) -> None:
    for wrong in UNMAKEABLE:
        assert told(http.post("/v1/sandboxes", json=wrong)) == (400, "INVALID_ARGUMENT"), wrong
    assert count(dsn) == 0
    url = f"/v1/sandboxes/{made(http)['id']}/exec"
    for wrong in (*UNRUNNABLE, *UNRUNNABLE):
        reply = http.post(url, json=wrong, headers={"Idempotency-Key": "key-1"})
        assert told(reply) == (400, "INVALID_ARGUMENT"), wrong
    assert keys(dsn) == 0


@pytest.mark.anyio
async def test_input_that_is_not_base64_spends_no_key_however_it_comes(
    gateway: str, http: httpx2.Client, dsn: str
) -> None:
    asked = {"sandbox_id": made(http)["id"], "argv": ["cat"], "stdin_encoding": "base64"}
    wrong = {**asked, "idempotency_key": "key-1", "stdin": "é"}
    for _ in range(2):
        bare = http.post("/mcp", json={"tool": "sandbox_exec", "arguments": wrong})
        assert told(bare) == (400, "INVALID_ARGUMENT")
        assert "stdin is not base64" in bare.json()["message"]
    async with Client(f"{gateway}/mcp") as client:
        for _ in range(2):
            assert "stdin is not base64" in str((await client.call_tool("sandbox_exec", wrong)).content)
        assert keys(dsn) == 0
        right = {**wrong, "stdin": "w6k="}
        assert (await client.call_tool("sandbox_exec", right)).structured_content["stdout"] == "é"


def test_one_key_one_sandbox(http: httpx2.Client, dsn: str) -> None:
    key = {"Idempotency-Key": "key-1"}
    first = http.post("/v1/sandboxes", json={"ttl_seconds": 600}, headers=key)
    again = http.post("/v1/sandboxes", json={"ttl_seconds": 600}, headers=key)
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())
    assert "Idempotency-Replayed" not in first.headers
    assert again.headers["Idempotency-Replayed"] == "true"
    other = http.post("/v1/sandboxes", json={"ttl_seconds": 601}, headers=key)
    assert told(other) == (409, "conflict")
    assert first.json()["id"] not in other.text
    bobs = http.post("/v1/sandboxes", json={"ttl_seconds": 600, "actor_user_id": "bob"}, headers=key)
    assert bobs.json()["id"] != first.json()["id"]
    for malformed in ("a b", "x" * 129):
        assert told(http.post("/v1/sandboxes", json={}, headers={"Idempotency-Key": malformed}))[0] == 400
    assert count(dsn) == 2
    changed(dsn, "UPDATE logbook.idempotency_keys SET expires_at = now() - interval '1 second'")
    new = http.post("/v1/sandboxes", json={"ttl_seconds": 601}, headers=key)
    assert (new.status_code, new.json()["id"] != first.json()["id"]) == (201, True)


@pytest.fixture
def few(settings: Settings) -> Iterator[httpx2.Client]:
    """Two sandboxes and one command at a time for each owner."""
    limited = replace(settings, sandbox_max_per_owner=2, sandbox_execs_per_owner=1)
    with (
        serving(build_app(limited)) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=30) as client,
    ):
        yield client


def test_an_owner_may_have_so_many_and_a_refusal_is_not_kept(few: httpx2.Client, dsn: str) -> None:
    key = {"Idempotency-Key": "key-1"}
    ids = [made(few)["id"], made(few)["id"]]
    refused = few.post("/v1/sandboxes", json={}, headers=key)
    assert told(refused) == (429, "LIMIT_REACHED")
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert made(few, actor_user_id="bob")["status"] == "ready"
    with connect(dsn) as connection:
        reserved = connection.execute("SELECT resource_id FROM logbook.idempotency_keys").fetchone()
    few.delete(f"/v1/sandboxes/{ids[0]}")
    second = few.post("/v1/sandboxes", json={}, headers=key)
    assert (second.status_code, second.json()["id"]) == (201, reserved["resource_id"])
    changed(dsn, f"UPDATE sandboxes.sandboxes SET expires_at = now() WHERE id = '{ids[1]}'")
    assert made(few)["status"] == "ready", "one that is over does not count, whoever has noticed"


def test_an_owner_may_run_so_many_at_once_and_a_refusal_is_not_kept(few: httpx2.Client) -> None:
    url = f"/v1/sandboxes/{made(few)['id']}/exec"
    key = {"Idempotency-Key": "key-1"}
    running = {"argv": ["sleep", "60"]}
    with few.stream("POST", url, json=running, headers={"Accept": "text/event-stream"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = few.post(url, json={"argv": ["echo", "x"]}, headers=key)
        assert (*told(refused), refused.headers["Retry-After"]) == (429, "LIMIT_REACHED", "1")

    def tried() -> httpx2.Response | None:
        reply = few.post(url, json={"argv": ["echo", "x"]}, headers=key)
        return reply if reply.status_code == 200 else None

    assert eventually(tried, "room for the command").json()["stdout"] == "x\n"


def test_a_stream_is_followed_and_hanging_up_ends_the_command(http: httpx2.Client) -> None:
    url = f"/v1/sandboxes/{made(http)['id']}/exec"
    accept = {"Accept": "text/event-stream"}
    marker = a_marker()
    body = {"argv": ["sh", "-c", f"echo one; sleep {marker}"]}
    with http.stream("POST", url, json=body, headers=accept) as stream:
        lines = stream.iter_lines()
        assert "event: stdout" in (line for line in lines)
        assert json.loads(next(lines).removeprefix("data: ")) == {"text": "one\n"}
        eventually(lambda: is_running(marker), "the command")
    eventually(lambda: not is_running(marker), "the end of the command")
    whole = http.post(
        url, json={"argv": ["sh", "-c", "printf 'a\\377'; sleep 0.1; echo b >&2; exit 4"]}, headers=accept
    )
    names = [name for name, _ in events(whole.text)]
    assert names == ["started", "stdout", "stderr", "exit"]
    assert events(whole.text)[1][1] == {"base64": "Yf8="}
    assert events(whole.text)[-1][1]["exit_code"] == 4
    assert told(http.post(f"/v1/sandboxes/{NOBODYS}/exec", json=body, headers=accept)) == (404, "NOT_FOUND")


@pytest.fixture
def talkative(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx2.Client]:
    """Passes on more than the network holds, from commands that have little time."""
    monkeypatch.setattr(sandlock_driver, "PATIENCE_SECONDS", 0.5)
    much = replace(settings, sandbox_output_bytes=32 << 20)
    with serving(build_app(much)) as url, httpx2.Client(base_url=url, trust_env=False, timeout=30) as client:
        yield client


def test_who_reads_a_stream_slowly_is_given_its_end(talkative: httpx2.Client) -> None:
    url = f"/v1/sandboxes/{made(talkative)['id']}/exec"
    body = {"argv": ["head", "-c", str(24 << 20), "/dev/zero"], "timeout_seconds": 1}
    key = {"Idempotency-Key": "key-1"}
    with talkative.stream("POST", url, json=body, headers={**key, "Accept": "text/event-stream"}) as stream:
        assert stream.status_code == 200
        time.sleep(2)  # longer than the command has
        whole = events(stream.read().decode())
    assert [name for name, _ in whole][-1] == "exit"
    again = talkative.post(url, json=body, headers=key)
    assert (again.status_code, again.headers["Idempotency-Replayed"]) == (200, "true")
    assert again.json()["ended_by"] == whole[-1][1]["ended_by"] == "time"


def test_those_who_hang_up_leave_no_descriptor(talkative: httpx2.Client) -> None:
    url = f"/v1/sandboxes/{made(talkative)['id']}/exec"
    body = {"argv": ["yes"], "timeout_seconds": 30}
    before = descriptors()
    for _ in range(20):
        with talkative.stream("POST", url, json=body, headers={"Accept": "text/event-stream"}) as stream:
            next(stream.iter_raw())
    eventually(lambda: not {name for name in descriptors() - before if "pipe:" in name}, "the pipes' end")


@pytest.mark.anyio
@pytest.mark.parametrize("stuck_at", ["http.response.start", "http.response.body"])
async def test_a_stream_is_closed_when_its_client_hangs_up_while_it_is_sent(stuck_at: str) -> None:
    """At once, and not when the garbage is collected: what runs for it is ended with it."""
    hung_up, ended = asyncio.Event(), []

    async def followed() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            yield b"second"
        finally:
            ended.append(True)

    async def send(message: Message) -> None:
        if message["type"] == stuck_at:
            hung_up.set()
            await asyncio.Event().wait()

    async def receive() -> Message:
        await hung_up.wait()
        return {"type": "http.disconnect"}

    rest = followed()
    reply = _EndsWhenNobodyListens(await anext(rest), rest)
    await reply({"type": "http"}, receive, send)
    assert ended == [True]


def test_a_keyed_command_never_runs_twice(http: httpx2.Client, dsn: str) -> None:
    box = made(http)["id"]
    url, key = f"/v1/sandboxes/{box}/exec", {"Idempotency-Key": "key-1"}
    body = {"argv": ["sh", "-c", "echo x >> runs; wc -l < runs"]}
    replies = [http.post(url, json=body, headers=key) for _ in range(2)]
    assert replies[0].json() == replies[1].json()
    assert (replies[0].json()["stdout"], replies[1].headers["Idempotency-Replayed"]) == ("1\n", "true")
    streamed = http.post(url, json=body, headers={**key, "Accept": "text/event-stream"})
    assert [data.get("text") for name, data in events(streamed.text) if name == "stdout"] == ["1\n"]
    assert ran(http, box, "cat", "runs")["stdout"] == "x\n"
    other = http.post(url, json={"argv": ["true"]}, headers=key)
    assert told(other) == (409, "conflict")
    changed(dsn, "UPDATE logbook.idempotency_keys SET status_code = NULL, response_snapshot = NULL")
    for accept in ("application/json", "text/event-stream"):
        unknown = http.post(url, json=body, headers={**key, "Accept": accept})
        assert told(unknown) == (409, "idempotency_outcome_unknown")
    assert ran(http, box, "cat", "runs")["stdout"] == "x\n"


def test_files_over_http(http: httpx2.Client, tmp_path: Path) -> None:
    url = f"/v1/sandboxes/{made(http)['id']}/files"
    plain = {"Content-Type": "application/octet-stream"}
    content = bytes(range(256)) * 8_000
    put = http.put(f"{url}/data/a b.bin", content=content, headers=plain)
    assert (put.status_code, put.json()["size_bytes"]) == (200, len(content))
    got = http.get(f"{url}/data/a b.bin")
    assert (got.content == content, got.headers["content-type"]) == (True, "application/octet-stream")
    assert got.headers["content-disposition"] == "attachment"
    assert told(http.put(f"{url}/x", content=b"x", headers={"Content-Type": "text/plain"})) == (
        415,
        "REQUEST_REFUSED",
    )
    untold = http.put(f"{url}/x", content=b"x")
    assert (untold.status_code, untold.json()["message"]) == (
        415,
        "the body must be application/octet-stream",
    )
    assert http.post(f"{url}/x", content=b"x", headers=plain).status_code == 405
    run = url.replace("/files", "/exec")
    assert http.post(run, content=b"x", headers=plain).status_code == 415, "only files are plain bytes"
    assert http.put("/memory/store", content=b"x", headers=plain).status_code == 415, "and only here"
    assert http.put(f"{url}/big", content=b"x" * (5 << 20), headers=plain).status_code == 413
    for path in ("..%2Fx", "%2Fetc%2Fpasswd", "a%2F..%2F..%2Fx", "a%00b", "%2e%2e/%2e%2e/x"):
        assert http.get(f"{url}/{path}").status_code in (400, 404), path
        assert http.put(f"{url}/{path}", content=b"x", headers=plain).status_code in (400, 404, 405), path
    assert told(http.get(f"{url}/missing")) == (404, "NOT_FOUND")
    assert http.delete(f"{url}/data/a b.bin").status_code == 204
    assert told(http.delete(f"{url}/data/a b.bin")) == (404, "NOT_FOUND")


def test_past_its_time_it_is_expired_whoever_has_noticed(http: httpx2.Client, dsn: str) -> None:
    box = made(http)
    url = f"/v1/sandboxes/{box['id']}"
    changed(dsn, "UPDATE sandboxes.sandboxes SET expires_at = now()")
    assert http.get(url).json()["status"] == "expired"
    assert told(http.post(f"{url}/exec", json={"argv": ["true"]})) == (409, "STATE_CONFLICT")
    assert told(http.post(f"{url}/extend_ttl", json={"ttl_seconds": 600})) == (409, "STATE_CONFLICT")
    assert http.delete(url).status_code == 204


def test_where_none_can_run_that_is_said_and_not_kept(settings: Settings, dsn: str) -> None:
    key = {"Idempotency-Key": "key-1"}
    with serving(build_app(replace(settings, sandbox_driver="none"))) as url:
        refused = httpx2.post(f"{url}/v1/sandboxes", json={}, headers=key, trust_env=False)
    assert told(refused) == (503, "SANDBOX_UNAVAILABLE")
    assert "switched off" in refused.json()["message"]
    with serving(build_app(settings)) as url:
        assert httpx2.post(f"{url}/v1/sandboxes", json={}, headers=key, trust_env=False).status_code == 201


@pytest.mark.anyio
async def test_agents_make_one_and_work_in_it(gateway: str, http: httpx2.Client, dsn: str) -> None:
    async with Client(f"{gateway}/mcp") as client:
        call = {"idempotency_key": "key-1"}
        box = (await client.call_tool("sandbox_create", call)).structured_content
        again = http.post("/v1/sandboxes", json={}, headers={"Idempotency-Key": "key-1"})
        assert (again.json(), again.headers["Idempotency-Replayed"]) == (box, "true")
        asked = {"sandbox_id": box["id"], "argv": ["python", "-c", "print(6 * 7)"]}
        said = (await client.call_tool("sandbox_exec", asked)).structured_content
        assert (said["exit_code"], said["stdout"]) == (0, "42\n")
        keyed = {**asked, "idempotency_key": "key-3"}
        assert not (await client.call_tool("sandbox_exec", keyed)).is_error
        changed(dsn, "UPDATE logbook.idempotency_keys SET status_code = NULL, response_snapshot = NULL")
        unknown = await client.call_tool("sandbox_exec", keyed)
        assert "idempotency_outcome_unknown" in str(unknown.content)
        stopped = {"sandbox_id": box["id"], "argv": ["true"], "idempotency_key": "key-2"}
        http.post(f"/v1/sandboxes/{box['id']}/stop")
        refused = [(await client.call_tool("sandbox_exec", stopped)) for _ in range(2)]
        assert ["STATE_CONFLICT" in str(one.content) for one in refused] == [True, True]
