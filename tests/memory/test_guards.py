"""Who is let in, and what is refused before anything is read."""

from __future__ import annotations

import pytest

from engram.kernel.errors import Forbidden, Unauthenticated
from engram.memory.app import MAX_BODY_BYTES
from engram.memory.keys import ApiKeys

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


async def test_a_key_is_needed_when_there_are_keys(refusing):
    async with refusing({"secret-key": "acme"}) as client:
        for method, path in [
            ("POST", "/memory/add"),
            ("POST", "/memory/query"),
            ("GET", "/memory/all"),
            ("GET", "/memory/7"),
            ("PATCH", "/memory/7"),
            ("DELETE", "/memory/7"),
        ]:
            for headers, status, error in [
                ({}, 401, "unauthorized"),
                ({"x-api-key": ""}, 401, "unauthorized"),
                ({"x-api-key": "secret-ke"}, 403, "forbidden"),
                ({"x-api-key": "secret-keyx"}, 403, "forbidden"),
            ]:
                reply = await client.request(method, path, headers={**JSON, **headers})
                assert (reply.status_code, reply.json()) == (status, {"error": error}), (method, path)


async def test_health_is_public(refusing):
    async with refusing({"secret-key": "acme"}) as client:
        reply = await client.get("/health")
        assert reply.status_code == 200
        assert reply.json()["ok"] is True


def test_the_tenant_comes_from_the_key():
    keys = ApiKeys({"one": "a", "two": "a", "three": "b", "schlüssel": "c"})
    assert [keys.tenant(key) for key in ("one", "two", "three")] == ["a", "a", "b"]
    assert keys.tenant("schlüssel".encode().decode("latin-1")) == "c", "a header is bytes"
    with pytest.raises(Unauthenticated):
        keys.tenant(None)
    with pytest.raises(Forbidden):
        keys.tenant("four")
    assert ApiKeys({}).tenant("anything") == "default"


@pytest.mark.parametrize("keys", [{"": "a"}, {"k": ""}])
def test_an_empty_key_or_tenant_is_a_mistake(keys):
    with pytest.raises(ValueError, match="must not be empty"):
        ApiKeys(keys)


ALLOWED = ("memory.internal", "ported.internal:81")


async def test_loopback_and_allowed_hosts_are_answered(refusing):
    hosts = ["127.0.0.1", "127.0.0.1:8080", "127.8.9.1", "localhost:1", "LOCALHOST", "[::1]", "[::1]:80"]
    async with refusing(allowed_hosts=ALLOWED) as client:
        for host in [*hosts, "memory.internal", "memory.internal:8080", "Ported.internal:81"]:
            assert (await client.get("/health", headers={"host": host})).status_code == 200, host


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/memory/add"), ("GET", "/docs")])
async def test_other_hosts_are_refused(refusing, method, path):
    hosts = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", ""]
    hosts += ["10.0.0.1", "[::2]", "ported.internal", "ported.internal:82"]
    hosts += ["localhost:x", "user@localhost", "127.0.0.1:80:80"]
    async with refusing(allowed_hosts=ALLOWED) as client:
        for host in hosts:
            reply = await client.request(method, path, headers={"host": host})
            assert (reply.status_code, reply.json()["error"]) == (421, "host_refused"), host


async def test_two_hosts_are_refused(refused):
    reply = await refused.get("/health", headers=[("host", "127.0.0.1"), ("host", "evil.example")])
    assert reply.status_code == 421


@pytest.mark.parametrize("path", ["/memory/add", "/memory/query", "/nowhere"])
async def test_a_post_must_be_json(refusing, path):
    async with refusing({"secret-key": "acme"}) as client:
        for kind in ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]:
            headers = {"content-type": kind} if kind else {}
            reply = await client.post(path, content=b'{"content": "x"}', headers=headers)
            assert (reply.status_code, reply.json()["error"]) == (415, "unsupported_media_type"), kind


async def test_json_may_name_its_charset(client):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    reply = await client.post("/memory/add", content='{"content": "記憶"}'.encode(), headers=headers)
    assert reply.status_code == 200


async def test_a_declared_length_that_is_too_large_is_refused_unread(refused):
    async def never_sent():
        raise AssertionError("the body was read")
        yield b""

    headers = {**JSON, "content-length": str(MAX_BODY_BYTES + 1)}
    reply = await refused.post("/memory/add", content=never_sent(), headers=headers)
    assert (reply.status_code, reply.json()["error"]) == (413, "too_large")


async def test_the_body_is_counted_as_it_comes(refused):
    """No length is declared; what is read stops soon after the limit."""
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 100:
            sent += 1
            yield b" " * (1 << 18)

    reply = await refused.post("/memory/add", content=endless(), headers=JSON)
    assert (reply.status_code, reply.json()["error"]) == (413, "too_large")
    assert sent <= 10


async def test_a_body_of_exactly_the_limit_is_read(client):
    body = b'{"content": "x"}'
    reply = await client.post("/memory/add", content=body + b" " * (MAX_BODY_BYTES - len(body)), headers=JSON)
    assert reply.status_code == 200
    reply = await client.post(
        "/memory/add", content=body + b" " * (MAX_BODY_BYTES + 1 - len(body)), headers=JSON
    )
    assert reply.status_code == 413


async def test_an_unknown_path_or_method_is_told_in_the_same_shape(refused):
    assert (await refused.get("/nowhere")).json() == {"error": "not_found"}
    reply = await refused.put("/memory/all")
    assert (reply.status_code, reply.json()) == (405, {"error": "method_not_allowed"})


async def test_the_routes_are_described(refused):
    paths = (await refused.get("/openapi.json")).json()["paths"]
    assert set(paths) == {"/memory/add", "/memory/query", "/memory/all", "/memory/{memory_id}", "/health"}
    assert set(paths["/memory/{memory_id}"]) == {"get", "patch", "delete"}
