"""What a caller sees when the server or its database fails; and that it passes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from engram.kernel.errors import ConfigError, DatabaseUnavailable
from engram.memory import store
from engram.memory.app import create_app
from engram.memory.server import serve
from engram.postgres.pool import connect

pytestmark = pytest.mark.anyio


@pytest.fixture
def dsn(fresh_dsn: str) -> str:
    return fresh_dsn


@contextmanager
def away(postgres, dsn):
    """The database refuses connections and drops those it has."""
    name = dsn.rpartition("dbname=")[2].strip("'")
    with connect(postgres.dsn("postgres")) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())


async def test_without_its_database_it_says_so_and_recovers(client, postgres, dsn):
    added = (await client.post("/memory/add", json={"content": "lease"})).json()
    with away(postgres, dsn):
        # The first to ask finds the dropped connection, later ones find none to be had.
        for _ in range(2):
            async with asyncio.timeout(4):  # shorter than a gateway's patience
                health, *others = await asyncio.gather(
                    client.get("/health"),
                    client.post("/memory/add", json={"content": "x"}),
                    client.post("/memory/query", json={"query": "lease"}),
                    client.get(f"/memory/{added['id']}"),
                    client.delete(f"/memory/{added['id']}"),
                )
            assert (health.status_code, health.json()) == (503, {"ok": False})
            for reply in others:
                assert (reply.status_code, reply.json()) == (503, {"error": "unavailable"})

    for _ in range(10):
        reply = await client.get(f"/memory/{added['id']}")
        if reply.status_code == 200:
            break
    assert reply.json()["content"] == "lease"
    assert (await client.get("/health")).status_code == 200
    assert (await client.post("/memory/add", json={"content": "lease"})).json()["id"] == added["id"]


async def test_health_is_not_fooled_by_a_database_without_the_schema(client, sql):
    sql("ALTER TABLE memories RENAME TO elsewhere")
    assert (await client.get("/health")).status_code == 503
    reply = await client.post("/memory/add", json={"content": "x"})
    assert (reply.status_code, reply.json()) == (503, {"error": "unavailable"})


async def test_an_unexpected_error_tells_nothing(client, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(store, "add", broken)
    reply = await client.post("/memory/add", json={"content": "x"})
    assert (reply.status_code, reply.json()) == (500, {"error": "internal"})


async def test_a_caller_who_leaves_half_way_is_no_error(dsn):
    app = create_app(dsn)
    sent: list[dict[str, Any]] = []
    said = [{"type": "http.request", "body": b'{"con', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return said.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/memory/add", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    assert sent[0]["status"] == 400


async def test_a_refusal_by_the_schema_tells_nothing(client, sql):
    sql("ALTER TABLE memories ADD CONSTRAINT refuses_all CHECK (content = 'never')")
    reply = await client.post("/memory/add", json={"content": "hunter2"})
    assert (reply.status_code, reply.json()) == (500, {"error": "internal"})


async def test_the_schema_refuses_what_is_not_a_memory(client, sql):
    await client.post("/memory/add", json={"content": "x"})
    for column, value in [
        ("tenant", "''"),
        ("content", "''"),
        ("content", "repeat('x', 200001)"),
        ("content_sha", "'ABC'"),
        ("space", "'a space that no tag names'"),
        ("metadata", "'[]'"),
    ]:
        with pytest.raises(psycopg.errors.CheckViolation):
            sql(f"UPDATE memories SET {column} = {value}")


def test_it_does_not_start_without_its_database(postgres):
    with pytest.raises(DatabaseUnavailable, match="memory server's database cannot be reached"):
        serve(postgres.dsn("no_such_database"), "127.0.0.1", 0)


def test_an_open_server_listens_on_loopback_only(dsn):
    with pytest.raises(ConfigError, match="without an API key"):
        serve(dsn, "0.0.0.0", 0)  # noqa: S104


def test_it_imports_nothing_of_those_who_talk_to_it():
    code = (
        "import sys, engram.memory.server;"
        "print(*sorted(m for m in sys.modules if m.count('.') == 1 and m.startswith('engram.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == [
        "engram.kernel",
        "engram.memory",
        "engram.postgres",
        "engram.search",
        "engram.web",
    ]
