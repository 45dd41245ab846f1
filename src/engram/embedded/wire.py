"""Just enough of PostgreSQL's protocol to ask whether it is ready and to create a database.

Unix socket and trust authentication only. Whoever wants rows uses a driver.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

TOO_MANY_CONNECTIONS = "53300"

_PROTOCOL_3_0 = 196608


class ServerRefused(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code


class Session:
    """One connection; raises `OSError` when there is nobody to talk to."""

    def __init__(self, socket_path: Path, *, user: str, database: str, timeout: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._stream = self._socket.makefile("rb")
        try:
            self._socket.connect(str(socket_path))
            self._start(user, database)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def execute(self, sql: str) -> int:
        """Run one statement; how many rows it returned."""
        text = sql.encode() + b"\0"
        self._socket.sendall(b"Q" + struct.pack("!i", len(text) + 4) + text)
        return sum(kind == b"D" for kind, _ in self._until_ready())

    def _start(self, user: str, database: str) -> None:
        options = {"user": user, "database": database, "application_name": "engram"}
        text = b"".join(f"{key}\0{value}\0".encode() for key, value in options.items()) + b"\0"
        self._socket.sendall(struct.pack("!ii", len(text) + 8, _PROTOCOL_3_0) + text)
        for _ in self._until_ready():
            pass

    def _until_ready(self) -> Iterator[tuple[bytes, bytes]]:
        """Messages up to ReadyForQuery; an error is raised once the server is done talking."""
        refused: ServerRefused | None = None
        while True:
            header = self._stream.read(5)
            if len(header) < 5:
                raise refused or ConnectionResetError("the server closed the connection")
            kind, length = header[:1], struct.unpack("!i", header[1:])[0]
            body = self._stream.read(length - 4)
            if kind == b"E":
                refused = _refusal(body)
            elif kind == b"Z":
                if refused:
                    raise refused
                return
            else:
                yield kind, body


def _refusal(body: bytes) -> ServerRefused:
    fields = {part[:1]: part[1:].decode(errors="replace") for part in body.split(b"\0") if part}
    return ServerRefused(fields.get(b"C", ""), fields.get(b"M", "no message"))


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
