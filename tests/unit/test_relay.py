"""The relay that `verify` puts in front of a memory server it may not stop."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engram.cli.relay import Relay
from engram.web.sockets import bound
from support.serving import serving


async def echo(scope, receive, send) -> None:
    """Says what came in; `/teapot` with a status and a header of its own."""
    request = Request(scope, receive)
    seen = {
        "method": request.method,
        "path": f"{request.url.path}?{request.url.query}",
        "key": request.headers.get("x-api-key"),
        "body": (await request.body()).decode(),
    }
    if request.url.path.endswith("/teapot"):
        answer: Response = Response("short and stout", 418, headers={"x-kind": "tea"})
    else:
        answer = JSONResponse(seen)
    await answer(scope, receive, send)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with serving(echo) as url, Relay(f"{url}/prefix") as relay:
        yield relay


@pytest.fixture
def http(relay: Relay) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=relay.url, trust_env=False, timeout=10) as client:
        yield client


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_what_is_asked_arrives_as_it_was(http: httpx2.Client, method: str) -> None:
    body = "ü" * 100_000 if method != "GET" else ""
    seen = http.request(method, "/memory/all?l=1&u=0", content=body, headers={"x-api-key": "k"}).json()
    assert seen == {"method": method, "path": "/prefix/memory/all?l=1&u=0", "key": "k", "body": body}


def test_it_adds_no_key(http: httpx2.Client) -> None:
    assert http.get("/x").json()["key"] is None


def test_what_is_answered_arrives_as_it_was(http: httpx2.Client) -> None:
    reply = http.get("/teapot")
    assert (reply.status_code, reply.text, reply.headers["x-kind"]) == (418, "short and stout", "tea")


def test_cut_nobody_is_there_and_nobody_else_gets_its_place(relay: Relay, http: httpx2.Client) -> None:
    port = httpx2.URL(relay.url).port
    for _ in range(3):
        assert http.get("/x").status_code == 200
        relay.cut()
        relay.cut()
        with pytest.raises(httpx2.ConnectError):
            http.get("/x")
        relay.mend()
        relay.mend()
        assert httpx2.URL(relay.url).port == port


def test_a_memory_server_that_is_away_is_said_to_be(relay: Relay) -> None:
    with bound("127.0.0.1", 0) as nobody, Relay(f"http://127.0.0.1:{nobody.getsockname()[1]}") as broken:
        reply = httpx2.get(f"{broken.url}/x", trust_env=False)
    assert reply.status_code == 502
