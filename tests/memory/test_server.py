"""The server as a process: started, killed, stopped, and its database killed under it."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from engram.postgres.pool import connect

pytestmark = pytest.mark.crash

JSON = {"content-type": "application/json"}


@pytest.fixture
def dsn(fresh_dsn: str) -> str:
    return fresh_dsn


def test_the_main_flow(server):
    with httpx2.Client(base_url=server.url) as client:
        health = client.get("/health").json()
        assert health["ok"] is True

        body = {"content": "部署前请先续租约", "tags": ["space:private:ann"], "metadata": {"kind": "note"}}
        added = client.post("/memory/add", json=body, headers={"Idempotency-Key": "k1"}).json()
        assert client.post("/memory/add", json=body).json() == {**added, "deduplicated": True}

        asked = {"query": "租约", "k": 3, "filters": {"tags": ["space:private:ann"]}}
        (match,) = client.post("/memory/query", json=asked).json()["matches"]
        assert (match["id"], match["content"]) == (added["id"], body["content"])
        assert "metadata" not in match

        got = client.get(f"/memory/{added['id']}").json()
        assert {name: got[name] for name in body} == body
        assert client.get("/memory/all").json()["items"] == [got]
        assert client.delete(f"/memory/{added['id']}").json() == {"ok": True}
        assert client.get(f"/memory/{added['id']}").json() == {"error": "not_found"}


def test_guards_hold_on_the_wire(server):
    with httpx2.Client(base_url=server.url) as client:
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 421
        assert client.post("/memory/add", content=b"{}").status_code == 415
        assert client.post("/memory/add", content=b" " * (3 << 20), headers=JSON).status_code == 413
        chunks = (b" " * (1 << 16) for _ in range(64))
        assert client.post("/memory/add", content=chunks, headers=JSON).status_code == 413
        assert client.get("/health").status_code == 200


def test_identical_adds_of_many_clients_make_one_memory(server):
    def add(number: int) -> str:
        headers = {"Idempotency-Key": f"k{number % 4}"}
        return httpx2.post(f"{server.url}/memory/add", json={"content": "x"}, headers=headers).json()["id"]

    with ThreadPoolExecutor(16) as threads:
        ids = set(threads.map(add, range(32)))
    assert len(ids) == 1
    assert len(httpx2.get(f"{server.url}/memory/all").json()["items"]) == 1


def test_an_acknowledged_add_survives_kill_9(server):
    reply = httpx2.post(
        f"{server.url}/memory/add", json={"content": "lease"}, headers={"Idempotency-Key": "k"}
    )
    assert server.kill() == -signal.SIGKILL
    added = reply.json()

    server.start()
    assert httpx2.get(f"{server.url}/memory/{added['id']}").json()["content"] == "lease"
    again = httpx2.post(
        f"{server.url}/memory/add", json={"content": "lease"}, headers={"Idempotency-Key": "k"}
    )
    assert again.json() == added


def test_sigterm_ends_it_cleanly(server):
    assert server.kill(signal.SIGTERM) in (0, -signal.SIGTERM)
    assert server.health() is None


def test_the_key_guards_a_served_database(dsn, server):
    server.kill()
    server.api_key = "secret-key"
    server.start()
    assert httpx2.get(f"{server.url}/memory/all").status_code == 401
    assert httpx2.get(f"{server.url}/memory/all", headers={"x-api-key": "other"}).status_code == 403
    assert httpx2.get(f"{server.url}/memory/all", headers={"x-api-key": "secret-key"}).status_code == 200


def test_it_outlives_its_database(server, postgres, kill_postgres, eventually):
    added = httpx2.post(f"{server.url}/memory/add", json={"content": "lease"}).json()
    kill_postgres()
    try:
        eventually(lambda: server.health() == 503)
        reply = httpx2.post(f"{server.url}/memory/add", json={"content": "x"}, timeout=10)
        assert (reply.status_code, reply.json()) == (503, {"error": "unavailable"})
    finally:
        postgres.start()
    eventually(lambda: server.health() == 200)
    assert httpx2.get(f"{server.url}/memory/{added['id']}").json()["content"] == "lease"
    assert httpx2.post(f"{server.url}/memory/add", json={"content": "x"}).status_code == 200


def test_a_fresh_database_is_migrated_by_whoever_comes_first(server, postgres):
    name = "memory_fresh"
    postgres.ensure_database(name)
    server.kill()
    server.dsn = postgres.dsn(name)
    server.start()
    assert httpx2.post(f"{server.url}/memory/add", json={"content": "x"}).status_code == 200
    server.kill()
    with connect(postgres.dsn("postgres")) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
