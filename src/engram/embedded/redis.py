"""The embedded Redis: append-only, on a loopback port, behind a password of its own.

It carries wake-ups and streams; the database is the truth. Its password is
never on a command line. A Redis that answers on our port counts as ours only
if it takes our password and is the process that works in our folder.
"""

from __future__ import annotations

import re
import secrets
import signal
import socket
from contextlib import suppress
from pathlib import Path

from engram.embedded import folders
from engram.embedded.binaries import redis_binary
from engram.embedded.locks import FileLock
from engram.embedded.server import EmbeddedServer
from engram.kernel.errors import EmbeddedError
from engram.kernel.logs import hide

_HOST = "127.0.0.1"
_ANSWER_LIMIT = 2.0
_PROCESS_ID = re.compile(rb"process_id:(\d+)")

# Paths are relative: the server works in its folder, which may be moved while it is stopped.
_CONFIG = """\
bind {host}
port {port}
requirepass {password}
protected-mode yes
daemonize no
supervised no
pidfile redis.pid
logfile ""
dir ./
appendonly yes
appendfsync everysec
aof-load-truncated yes
save ""
maxmemory-policy noeviction
always-show-logo no
"""


class EmbeddedRedis(EmbeddedServer):
    title = "Redis"
    name = "redis"
    program = "redis-server"
    setting = "REDIS_URL"
    root_is_refused = False
    stop_signals = (signal.SIGTERM, signal.SIGKILL)

    def url(self) -> str:
        """The URL of the server as it was last started; the port may differ after a restart."""
        return f"redis://:{self._password()}@{_HOST}:{self._port()}/0"

    def _fill(self, folder: Path, turn: FileLock) -> None:
        folders.write_private(folder / "password", secrets.token_urlsafe(32))
        folders.write_private(folder / "port", str(_free_port()))

    def _check_folder(self) -> None:
        folders.require_ours(self.folder)
        self._password()

    def _recorded_pid(self) -> int | None:
        with suppress(OSError, ValueError):
            return int((self.folder / "redis.pid").read_text())
        return None

    def _command(self) -> list[str]:
        port = self._port()
        if not port or not _is_free(port):
            port = _free_port()
            folders.write_private(self.folder / "port", str(port))
        config = _CONFIG.format(host=_HOST, port=port, password=self._password())
        folders.write_private(self.folder / "redis.conf", config)
        return [str(redis_binary("redis-server")), "redis.conf"]

    def _password(self) -> str:
        try:
            password = (self.folder / "password").read_text().strip()
        except OSError as error:
            raise EmbeddedError(
                f"the password of the embedded Redis cannot be read: {error}",
                hint=f"start it first; if {self.folder} was damaged, move it away to begin with an empty one",
            ) from error
        hide(password)
        return password

    def _port(self) -> int:
        with suppress(OSError, ValueError):
            return int((self.folder / "port").read_text())
        return 0

    def _answers(self) -> bool:
        process = self._find()
        if process is None:
            return False
        try:
            replies = _ask(self._port(), f"AUTH {self._password()}", "PING", "INFO server")
        except OSError:
            return False
        told = _PROCESS_ID.search(replies)
        ready = replies.startswith(b"+OK\r\n+PONG\r\n")
        return ready and told is not None and int(told[1]) == process.pid


def running_redis(data_dir: Path) -> str | None:
    """The URL of the server that runs on this data folder, if one does."""
    server = EmbeddedRedis(data_dir)
    return server.url() if server._answers() else None


def _ask(port: int, *commands: str) -> bytes:
    """Send inline commands, then QUIT, and return everything that was answered."""
    with socket.create_connection((_HOST, port), timeout=_ANSWER_LIMIT) as connection:
        connection.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
        with connection.makefile("rb") as stream:
            return stream.read()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As Redis itself does: connections of its predecessor that linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True
