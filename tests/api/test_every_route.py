"""Every route there is, taken from the application itself: none escapes the guards or the tokens.

A route that is added later is walked too, without being listed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute, Match, Mount, Route

from engram.api import tokens, tokens_file
from engram.api.authentication import PUBLIC
from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings

pytestmark = pytest.mark.anyio

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Spelled out: whoever makes another path public has to say so here as well.
NEED_NO_TOKEN = {"/health", "/readyz", "/docs", "/openapi.json"}
SECRET = tokens.new_secret()


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    """Not started: what is refused is refused before anything is needed."""
    path = tmp_path / "tokens.toml"
    entry = {"sha256": tokens.sha256_of(SECRET), "owner": "ada", "scopes": ["read", "write", "admin"]}
    tokens_file.edit(path, lambda text: tokens.with_table(text, tokens.checked(entry, "entry")))
    return build_app(replace(Settings.load({}), tokens_file=path))


def paths(routes: Iterable[BaseRoute], prefix: str = "") -> Iterator[str]:
    for route in routes:
        if isinstance(route, Mount):
            yield f"{prefix}{route.path}/x"
            yield from paths(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            whole = re.sub(r"\{[^}]+:uuid\}", str(uuid4()), prefix + route.path)
            yield re.sub(r"\{[^}]+\}", "1", whole)
        else:
            # A router that was included; anything else is new to this walk and fails here.
            yield from paths(route.original_router.routes, prefix + route.include_context.prefix)


def walked(app: FastAPI) -> list[str]:
    """Every path, each of which the application really serves; and one it does not."""
    found = sorted(set(paths(app.routes)))
    for path in found:
        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        assert any(route.matches(scope)[0] is not Match.NONE for route in app.routes), path
    return [*found, "/no/such/route"]


async def ask(
    app: FastAPI, method: str, path: str, **headers: str
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """One request whose body must not be read."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1", "content-type": "application/json", "content-length": "2"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8787),
    }
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, json.loads(body) if body.startswith(b"{") else {}


async def answers(
    app: FastAPI, *, methods: Iterable[str] = METHODS, **headers: str
) -> dict[tuple[str, str], Any]:
    return {
        (method, path): await ask(app, method, path, **headers) for path in walked(app) for method in methods
    }


def test_the_walk_finds_what_is_served(app: FastAPI) -> None:
    assert {"/mcp", "/memory/store", "/memory/query", "/metrics", *NEED_NO_TOKEN} <= set(walked(app))


def test_the_walk_finds_routes_however_they_are_added(app: FastAPI) -> None:
    inner, outer = APIRouter(), APIRouter()
    inner.add_api_route("/a/{name}", lambda: None)
    outer.include_router(inner, prefix="/inner")
    app.include_router(outer, prefix="/outer")
    app.router.routes.append(Mount("/mounted", routes=[Route("/b/{rest:path}", endpoint=lambda _: None)]))
    assert {"/outer/inner/a/1", "/mounted/x", "/mounted/b/1"} <= set(walked(app))


def test_what_is_public_is_known_and_documented() -> None:
    document = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
    table = document.partition("These paths need no token:")[2].partition("`tests/")[0]
    assert PUBLIC == NEED_NO_TOKEN == set(re.findall(r"^\| `(/[^`]*)` \|", table, re.MULTILINE))


async def test_without_a_token_nothing_is_served_and_no_body_read(app: FastAPI) -> None:
    refused = await answers(app)
    served = {path for (_, path), (status, _, _) in refused.items() if status != 401}
    assert served == NEED_NO_TOKEN
    for (_, path), (_, headers, body) in refused.items():
        if path not in NEED_NO_TOKEN:
            assert headers["www-authenticate"] == "Bearer"
            assert headers["x-correlation-id"] == body["correlation_id"]
            assert (body["success"], body["error_code"]) == (False, "UNAUTHENTICATED")


@pytest.mark.parametrize(
    "path",
    ["/health/", "//health", "/health/../metrics", "/HEALTH", "/health;x", "/docs/x", "/readyz/mcp", ""],
)
async def test_only_the_very_path_is_public(app: FastAPI, path: str) -> None:
    assert (await ask(app, "GET", path))[0] == 401


@pytest.mark.parametrize("authorization", ["", f"Bearer {SECRET}"], ids=["no-token", "token"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content_length": "99999999"}, 413),
    ],
    ids=["host", "like-a-host", "origin", "null-origin", "huge"],
)
async def test_the_guards_come_before_the_tokens(
    app: FastAPI, headers: dict[str, str], status: int, authorization: str
) -> None:
    given = {**headers, **({"authorization": authorization} if authorization else {})}
    refused = await answers(app, **given)
    assert {got for got, _, _ in refused.values()} == {status}
    assert {body["error_code"] for _, _, body in refused.values()} == {"REQUEST_REFUSED"}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_no_route_takes_a_body_that_is_not_json(app: FastAPI, kind: str) -> None:
    refused = await answers(app, methods=["POST", "PUT", "PATCH"], content_type=kind)
    assert {status for status, _, _ in refused.values()} == {415}
