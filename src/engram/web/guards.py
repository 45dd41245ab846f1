"""What is refused before anybody is authenticated and before a body is read.

A foreign Host (DNS rebinding), a foreign Origin (a page of somebody else's), a
body that is neither JSON nor declared multipart (a browser may send other types
to any address without asking), a body that is too large. The body is counted
as it streams, so a length that was not declared, or was declared falsely, does
not get past. Pure ASGI: nothing is buffered here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.kernel.errors import GuardRefused

Refuse = Callable[[GuardRefused], ASGIApp]

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:\[\]]+)(?::\d{1,5})?")
_BODY_METHODS = {"POST", "PUT", "PATCH"}
_MULTIPART, _BYTES = "multipart/form-data", "application/octet-stream"


class Guards:
    """`refuse` turns a refusal into the server's own shape of reply. `multipart_paths`: how much each takes;
    `file_paths`: patterns of paths whose body may be plain bytes, and how many."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        refuse: Refuse,
        max_body_bytes: int,
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
        multipart_paths: Mapping[str, int] | None = None,
        file_paths: Mapping[str, int] | None = None,
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._max_body = max_body_bytes
        self._hosts = {host.lower() for host in allowed_hosts}
        self._origins = {origin.lower() for origin in allowed_origins}
        self._multipart = dict(multipart_paths or {})
        self._files = {re.compile(pattern): most for pattern, most in (file_paths or {}).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._guarded(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "no WebSockets here"})

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope, Headers(scope=scope))
        except GuardRefused as refused:
            await self._refuse(refused)(scope, receive, send)
            return
        body = _CountedBody(self._most(scope), scope, receive, send, self._refuse)
        try:
            await self._app(scope, body.receive, body.send)
        except GuardRefused:
            await body.refuse_unless_answered()

    def _check(self, scope: Scope, headers: Headers) -> None:
        self._check_host(headers.getlist("host"))
        self._check_origin(headers.get("origin"))
        if scope["method"] in _BODY_METHODS and self._file_bytes(scope) is None:
            self._check_type(scope, headers)
        declared = headers.get("content-length", "0")
        if not (declared.isascii() and declared.isdecimal()):
            raise GuardRefused("Content-Length is not a number", http_status=400)
        if len(declared) > 18 or int(declared) > self._most(scope):
            raise _too_large(self._most(scope))

    def _most(self, scope: Scope) -> int:
        """The largest body of its type that this path takes."""
        if (most := self._file_bytes(scope)) is not None:
            return most
        if _content_type(Headers(scope=scope)) == _MULTIPART:
            return self._multipart.get(scope["path"], self._max_body)
        return self._max_body

    def _file_bytes(self, scope: Scope) -> int | None:
        """How many plain bytes this request may have; None: it is none that has any."""
        if _content_type(Headers(scope=scope)) != _BYTES:
            return None
        fitting = (most for pattern, most in self._files.items() if pattern.fullmatch(scope["path"]))
        return next(fitting, None)

    def _check_host(self, hosts: list[str]) -> None:
        if len(hosts) == 1 and self._is_ours(hosts[0].lower()):
            return
        raise GuardRefused(
            "this server does not answer to that Host",
            http_status=421,
            hint="add it to ENGRAM_ALLOWED_HOSTS if it is yours",
        )

    def _check_origin(self, origin: str | None) -> None:
        if origin is None or origin.lower() in self._origins or _is_loopback_origin(origin.lower()):
            return
        raise GuardRefused(
            "requests from that Origin are refused",
            http_status=403,
            hint="add it to ENGRAM_ALLOWED_ORIGINS if it is yours",
        )

    def _check_type(self, scope: Scope, headers: Headers) -> None:
        path, given = scope["path"], _content_type(headers)
        bodiless = headers.get("content-length") == "0" and not given
        if bodiless or given == "application/json":
            return
        if given == _MULTIPART and path in self._multipart:
            return
        plain = scope["method"] == "PUT" and any(pattern.fullmatch(path) for pattern in self._files)
        wanted = _BYTES if plain else "application/json"
        raise GuardRefused(f"the body must be {wanted}", http_status=415)

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        return is_loopback(match["name"]) or bool({host, match["name"]} & self._hosts)


class _CountedBody:
    """Counts what streams in; once it is too much, the refusal is the only reply that leaves.

    The application may catch the error and answer something of its own: that
    answer is replaced.
    """

    def __init__(self, limit: int, scope: Scope, receive: Receive, send: Send, refuse: Refuse) -> None:
        self._limit = self._left = limit
        self._scope, self._receive, self._send, self._refuse = scope, receive, send, refuse
        self._begun = self._replying = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _too_large(self._limit)
        return message

    async def send(self, message: Message) -> None:
        """A reply that began before the body was too long goes on; a later one is replaced."""
        if self._left >= 0 or self._replying:
            self._begun = self._replying = True
            await self._send(message)
        else:
            await self.refuse_unless_answered()

    async def refuse_unless_answered(self) -> None:
        if not self._begun:
            self._begun = True
            await self._refuse(_too_large(self._limit))(self._scope, self._receive, self._send)


def _content_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_loopback_origin(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and is_loopback(parts.hostname or "")
    except ValueError:
        return False


def is_loopback(name: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("[::1]"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    if name == "localhost":
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _too_large(limit: int) -> GuardRefused:
    return GuardRefused(f"a body may have at most {limit} bytes", http_status=413)
