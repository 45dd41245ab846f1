"""A way to the memory server that can be cut: an HTTP relay on a loopback port.

For a memory server that is not ours to stop. Whoever goes through the relay
finds nobody there while it is cut; everybody else notices nothing. It keeps its
port meanwhile, and adds nothing to what passes, least of all a key.
"""

from __future__ import annotations

import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import httpx2

from engram.web.guards import is_loopback
from engram.web.sockets import bound

HOST = "127.0.0.1"
ANSWER_SECONDS = 60.0
# They belong to one connection, not to the message; the body is passed on unpacked.
_OF_THE_CONNECTION = {
    "host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
    "proxy-connection", "content-length", "content-encoding", "accept-encoding",
}  # fmt: skip


class Relay:
    def __init__(self, target: str) -> None:
        # Bound and never listening: nobody else gets the port, and a connection is refused.
        self._anchor = bound(HOST, 0)
        self._port: int = self._anchor.getsockname()[1]
        self._target = target
        self._http = httpx2.Client(
            timeout=ANSWER_SECONDS, trust_env=not is_loopback(urlsplit(target).hostname or "")
        )
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def __enter__(self) -> Relay:
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._http.close()
        self._anchor.close()

    def mend(self) -> None:
        if self._server is None:
            self._server = _Server((HOST, self._port), self._handler())
            threading.Thread(
                target=self._server.serve_forever, args=(0.02,), name="engram-relay", daemon=True
            ).start()

    def cut(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        class Handler(_Passing):
            http, target = self._http, self._target

        return Handler


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class _Passing(BaseHTTPRequestHandler):
    """HTTP/1.0, so that a connection ends with its answer and none outlives a cut."""

    http: httpx2.Client
    target: str

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        given = {k: v for k, v in self.headers.items() if k.lower() not in _OF_THE_CONNECTION}
        try:
            answer = self.http.request(
                self.command, f"{self.target}{self.path}", headers=given, content=self.rfile.read(length)
            )
        except httpx2.HTTPError as error:
            self.send_error(502, f"the memory server did not answer: {type(error).__name__}")
            return
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name.lower() not in _OF_THE_CONNECTION:
                self.send_header(name, value)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        return None
