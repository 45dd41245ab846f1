"""What is refused before anybody looks at it: asked of the guards themselves, in process."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.kernel.errors import GuardRefused
from engram.web.guards import Guards, is_loopback

pytestmark = pytest.mark.anyio

LIMIT = 100
JSON = {"content-type": "application/json"}


def refuse(error: GuardRefused) -> ASGIApp:
    return JSONResponse({"refused": error.message, "hint": error.hint}, status_code=error.http_status)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the whole body, then answers with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await JSONResponse({"size": size})(scope, receive, send)


async def swallow(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes any error for a bad body, as web frameworks do."""
    try:
        await echo(scope, receive, send)
    except Exception:  # noqa: BLE001
        await JSONResponse({"size": "who knows"}, status_code=400)(scope, receive, send)


async def ignore(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading."""
    await JSONResponse({"size": None})(scope, receive, send)


async def talk_first(scope: Scope, receive: Receive, send: Send) -> None:
    """Starts its answer before it reads."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    try:
        await echo(scope, receive, lambda message: _nothing())
    except GuardRefused:
        await send({"type": "http.response.body", "body": b"sorry"})


async def _nothing() -> None:
    return None


class Reply:
    def __init__(self, sent: list[Message]) -> None:
        starts = [message for message in sent if message["type"] == "http.response.start"]
        assert len(starts) == 1, f"{len(starts)} replies were started"
        self.status = starts[0]["status"]
        self.body = b"".join(message.get("body", b"") for message in sent)

    def json(self) -> Any:
        return json.loads(self.body)


class Asked:
    """Requests to a guarded application, as a server would hand them over."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], **options: Any) -> None:
        self.guards = Guards(app, refuse=refuse, max_body_bytes=LIMIT, **options)

    async def __call__(
        self,
        method: str = "POST",
        path: str = "/",
        headers: dict[str, str] | Iterable[tuple[str, str]] = JSON,
        chunks: Iterable[bytes] = (b"{}",),
        host: str | None = "127.0.0.1:8787",
    ) -> Reply:
        pairs = list(headers.items()) if isinstance(headers, dict) else list(headers)
        if host is not None:
            pairs.append(("host", host))
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b""}
        parts = list(chunks)
        messages = [
            {"type": "http.request", "body": part, "more_body": n < len(parts)}
            for n, part in enumerate(parts, start=1)
        ] or [{"type": "http.request", "body": b"", "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.guards(scope, receive, send)
        return Reply(sent)


@pytest.fixture
def ask() -> Asked:
    return Asked(
        echo,
        allowed_hosts=["Memory.Internal", "other.internal:8787"],
        allowed_origins=["https://Console.Internal"],
        multipart_paths={"/upload": 1 << 20},
    )


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8787",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.8.9.10:8787",
        "[::1]",
        "[::1]:8787",
        "memory.internal",
        "MEMORY.internal:9999",
        "other.internal:8787",
    ],
)
async def test_our_own_hosts_are_served(ask: Asked, host: str) -> None:
    assert (await ask(host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8787",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1@evil.example",
        "10.0.0.1",
        "0.0.0.0",  # noqa: S104
        "[::]",
        "[::2]:8787",
        "::1",
        "[::1",
        "localhost:",
        "localhost:port",
        "localhost:8787:8787",
        "local host",
        " localhost",
        "localhost,evil.example",
        "other.internal",
        "other.internal:1",
        "sub.memory.internal",
    ],
)
async def test_foreign_hosts_are_refused(ask: Asked, host: str) -> None:
    reply = await ask(host=host)
    assert reply.status == 421
    assert "ENGRAM_ALLOWED_HOSTS" in reply.json()["hint"]


async def test_no_host_and_two_hosts_are_refused(ask: Asked) -> None:
    assert (await ask(host=None)).status == 421
    assert (await ask(headers={**JSON, "Host": "evil.example"})).status == 421
    assert (await ask(headers=[*JSON.items(), ("Host", "127.0.0.1:8787")])).status == 421


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS", "POST"])
async def test_the_host_is_checked_for_every_method(ask: Asked, method: str) -> None:
    assert (await ask(method=method, host="evil.example")).status == 421


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "http://127.0.0.1:8787",
        "https://[::1]:8787",
        "HTTP://LocalHost",
        "https://console.internal",
        "https://CONSOLE.internal",
    ],
)
async def test_pages_of_our_own_may_ask(ask: Asked, origin: str) -> None:
    assert (await ask(headers={**JSON, "origin": origin})).status == 200


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "https://evil.example",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "http://10.0.0.1:8787",
        "file://",
        "chrome-extension://localhost",
        "localhost",
        "//localhost",
        "http://console.internal",
        "https://console.internal:8443",
        "https://console.internal.evil.example",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_pages_of_somebody_else_may_not(ask: Asked, origin: str, method: str) -> None:
    reply = await ask(method=method, headers={**JSON, "origin": origin})
    assert reply.status == 403
    assert "ENGRAM_ALLOWED_ORIGINS" in reply.json()["hint"]


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://[localhost]"])
async def test_an_origin_that_is_no_url_is_refused(ask: Asked, origin: str) -> None:
    assert (await ask(headers={**JSON, "origin": origin})).status == 403


@pytest.mark.parametrize(
    "given",
    ["application/json", "Application/JSON", "application/json; charset=utf-8", " application/json ;x"],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_json_is_read(ask: Asked, given: str, method: str) -> None:
    reply = await ask(method=method, headers={"content-type": given})
    assert (reply.status, reply.json()) == (200, {"size": 2})


@pytest.mark.parametrize(
    "given",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "application/json-seq",
        "text/plain; application/json",
        "",
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_other_bodies_are_refused(ask: Asked, given: str, method: str) -> None:
    assert (await ask(method=method, headers={"content-type": given})).status == 415


async def test_a_body_without_a_type_is_refused(ask: Asked) -> None:
    assert (await ask(headers={})).status == 415
    assert (await ask(headers={"content-length": "2"})).status == 415


async def test_an_empty_body_needs_no_type(ask: Asked) -> None:
    assert (await ask(headers={"content-length": "0"}, chunks=())).status == 200
    assert (await ask(headers={"content-length": "0", "content-type": "text/plain"})).status == 415


async def test_reading_needs_no_type(ask: Asked) -> None:
    assert (await ask(method="GET", headers={}, chunks=())).status == 200


async def test_multipart_is_read_only_where_it_is_declared(ask: Asked) -> None:
    multipart = {"content-type": "Multipart/Form-Data; boundary=x"}
    assert (await ask(path="/upload", headers=multipart)).status == 200
    for path in ("/", "/upload/", "/Upload", "/upload/x", "/x/upload"):
        assert (await ask(path=path, headers=multipart)).status == 415


@pytest.mark.parametrize("size", [0, 1, LIMIT])
async def test_a_body_up_to_the_limit_is_read(ask: Asked, size: int) -> None:
    headers = {**JSON, "content-length": str(size)}
    reply = await ask(headers=headers, chunks=[b"x" * size])
    assert (reply.status, reply.json()) == (200, {"size": size})


async def test_a_declared_length_that_is_too_large_is_refused_unread() -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the application was asked")

    reply = await Asked(never)(headers={**JSON, "content-length": str(LIMIT + 1)})
    assert reply.status == 413
    assert str(LIMIT) in reply.json()["refused"]


@pytest.mark.parametrize("declared", ["-1", "+5", "1.5", "five", "", "0x10", "1,1"])
async def test_a_length_that_is_no_number_is_refused(ask: Asked, declared: str) -> None:
    assert (await ask(headers={**JSON, "content-length": declared})).status in (400, 413)


async def test_a_length_of_very_many_digits_is_refused(ask: Asked) -> None:
    assert (await ask(headers={**JSON, "content-length": "9" * 5000})).status == 413


OVERLONG = [
    pytest.param(JSON, [b"x" * (LIMIT + 1)], id="undeclared"),
    pytest.param(JSON, [b"x"] * (LIMIT + 1), id="undeclared, in small pieces"),
    pytest.param({**JSON, "transfer-encoding": "chunked"}, [b"x" * 60, b"x" * 60], id="chunked"),
    pytest.param({**JSON, "content-length": "5"}, [b"x" * 60, b"x" * 60], id="falsely declared"),
    pytest.param(
        [*JSON.items(), ("content-length", "5"), ("content-length", "500")],
        [b"x" * 500],
        id="declared twice",
    ),
]


@pytest.mark.parametrize(("headers", "chunks"), OVERLONG)
async def test_an_overlong_stream_is_cut_and_refused_whatever_the_application_makes_of_it(
    headers: Any, chunks: list[bytes]
) -> None:
    reply = await Asked(swallow)(headers=headers, chunks=chunks)
    assert reply.status == 413
    assert reply.json()["refused"] == f"a body may have at most {LIMIT} bytes"


@pytest.mark.parametrize(("headers", "chunks"), OVERLONG)
async def test_an_overlong_stream_is_refused_when_the_application_lets_the_error_pass(
    headers: Any, chunks: list[bytes]
) -> None:
    assert (await Asked(echo)(headers=headers, chunks=chunks)).status == 413


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_the_limit_holds_for_methods_that_need_no_body(method: str) -> None:
    reply = await Asked(swallow)(method=method, headers={}, chunks=[b"x" * (LIMIT + 1)])
    assert reply.status == 413


async def test_the_application_never_sees_more_than_the_limit() -> None:
    seen = 0

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal seen
        for _ in range(5):
            try:
                seen += len((await receive()).get("body", b""))
            except GuardRefused:
                continue
        await JSONResponse({})(scope, receive, send)

    reply = await Asked(count)(chunks=[b"x" * 60] * 5)
    assert reply.status == 413
    assert seen <= LIMIT


async def test_an_application_that_does_not_read_is_left_alone() -> None:
    assert (await Asked(ignore)(chunks=[b"x" * (LIMIT * 10)])).status == 200


async def test_a_reply_that_has_begun_is_not_begun_again() -> None:
    assert (await Asked(talk_first)(chunks=[b"x" * 60] * 5)).status == 200


async def test_lifespan_is_none_of_their_business() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await Guards(app, refuse=refuse, max_body_bytes=LIMIT)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


async def test_a_websocket_from_a_foreign_page_does_not_reach_the_application() -> None:
    reached = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["type"])

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        return None

    scope = {
        "type": "websocket",
        "path": "/",
        "headers": [(b"host", b"evil.example"), (b"origin", b"https://evil.example")],
    }
    await Guards(app, refuse=refuse, max_body_bytes=LIMIT)(scope, receive, send)
    assert reached == []


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.255.255.254", True),
        ("::1", True),
        ("[::1]", True),
        ("[0:0:0:0:0:0:0:1]", True),
        ("", False),
        ("0.0.0.0", False),  # noqa: S104
        ("::", False),
        ("128.0.0.1", False),
        ("127.1", False),
        ("2130706433", False),
        ("localhost.", False),
        ("example.com", False),
    ],
)
def test_loopback(name: str, ours: bool) -> None:
    assert is_loopback(name) is ours
