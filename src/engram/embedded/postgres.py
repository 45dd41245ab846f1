"""The embedded PostgreSQL: one cluster in the data folder, reached by a Unix socket.

Its superuser and its first database are called `engram`. It listens on no
address; whoever may enter the private folder of the socket may use it.
Durability is PostgreSQL's own default and is not weakened.
"""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from engram.embedded import folders, wire
from engram.embedded.binaries import POSTGRES_MAJOR, postgres_binary
from engram.embedded.locks import FileLock
from engram.embedded.processes import server_environment
from engram.embedded.server import EmbeddedServer
from engram.kernel.errors import EmbeddedError

USER = "engram"
DATABASE = "engram"

_PORT = 5432
_SOCKET = f".s.PGSQL.{_PORT}"
_LONGEST_SOCKET_PATH = 107
_INITDB_LIMIT = 300.0
_ANSWER_LIMIT = 2.0
_CREATE_LIMIT = 120.0
_CREATE_LOCK = int.from_bytes(b"engram", "big")

_PID_FILE = ("pid", "folder", "started", "port", "socket_folder", "address", "memory", "status")
_HBA = "local all all trust\nlocal replication all trust\n"
_CLUSTER = (
    f"--username={USER}",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "-cmax_connections=200",
    "-cshared_buffers=512MB",
    # A drain of a million rows writes two; at every checkpoint in between each page would be logged whole again.
    "-cmax_wal_size=4GB",
    # What a worker has settled stands in the way of the next claim until it is vacuumed.
    "-cautovacuum_naptime=15s",
    # Its files are on this machine, mostly in memory: a page by its number is no dearer than the next one.
    "-crandom_page_cost=1.1",
    "-clisten_addresses=",
    "-ctimezone=UTC",
    "-clog_timezone=UTC",
    "-clog_line_prefix=%m [%p] ",
)


class EmbeddedPostgres(EmbeddedServer):
    title = "PostgreSQL"
    name = "postgres"
    program = "postgres"
    setting = "POSTGRES_DSN"
    root_is_refused = True
    stop_signals = (signal.SIGINT, signal.SIGQUIT)

    def dsn(self, database: str = DATABASE) -> str:
        """A libpq connection string for one of the databases."""
        values = {"host": str(self._socket_folder()), "port": str(_PORT), "user": USER, "dbname": database}
        return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())

    def ensure_database(self, name: str) -> None:
        """Create the database unless it is there; any number of processes may ask at once."""
        try:
            self._create_unless_there(name)
        except (OSError, wire.ServerRefused) as error:
            raise EmbeddedError(
                f"PostgreSQL did not create the database {name}: {error}", hint=f"see {self.log_file}"
            ) from error

    def _create_unless_there(self, name: str) -> None:
        there = f"select 1 from pg_database where datname = {wire.literal(name)}"  # noqa: S608
        with self._session("postgres", _CREATE_LIMIT) as session:
            if not session.execute(there):
                session.execute(f"select pg_advisory_lock({_CREATE_LOCK})")
                if not session.execute(there):
                    session.execute(f"create database {wire.identifier(name)} template template0")

    def _fill(self, folder: Path, turn: FileLock) -> None:
        """Run `initdb`. It inherits the turn, so that nobody clears its folder away under it
        if we are killed meanwhile."""
        account = self._account()
        command = [*account.prefix, str(postgres_binary("initdb")), f"--pgdata={folder}", *_CLUSTER]
        try:
            made = subprocess.run(  # noqa: S603
                command,
                cwd="/",
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_INITDB_LIMIT,
                pass_fds=[turn.fileno()],
                check=False,
                **account.options(),
            )
        except subprocess.TimeoutExpired as error:
            raise EmbeddedError(f"initdb took longer than {_INITDB_LIMIT:.0f} s in {folder}") from error
        if made.returncode:
            said = "\n".join(made.stdout.decode(errors="replace").strip().splitlines()[-12:])
            raise EmbeddedError(
                f"initdb failed for {self.folder}: {said}",
                hint=self._disk_hint() or "put right what it names and start again; nothing was left behind",
            )
        folders.write_private(folder / "pg_hba.conf", _HBA)

    def _check_folder(self) -> None:
        version = self._version()
        if version not in (None, POSTGRES_MAJOR):
            raise EmbeddedError(
                f"{self.folder} was made by PostgreSQL {version}, and this engram brings {POSTGRES_MAJOR}; "
                "it was left as it is",
                hint="dump it with the older engram and restore it here (pg_dump, psql), "
                "or point ENGRAM_DATA_DIR at another folder",
            )
        folders.require_ours(self.folder)
        if version is None:
            raise EmbeddedError(
                f"{self.folder} has no PG_VERSION: it is not a whole PostgreSQL cluster",
                hint="restore it from a backup, or move it away to begin with an empty one",
            )

    def _version(self) -> str | None:
        try:
            return (self.folder / "PG_VERSION").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _recorded_pid(self) -> int | None:
        with suppress(ValueError):
            return int(self._pid_file().get("pid", ""))
        return None

    def _pid_file(self) -> Mapping[str, str]:
        """What the postmaster wrote down about itself."""
        try:
            lines = (self.folder / "postmaster.pid").read_text(errors="replace").splitlines()
        except OSError:
            return {}
        return dict(zip(_PID_FILE, map(str.strip, lines), strict=False))

    def _command(self) -> list[str]:
        socket_folder = _usable_socket_folder(self.data_dir)
        self._drop_misleading_pids(socket_folder)
        settings = {
            "listen_addresses": "",
            "port": str(_PORT),
            "unix_socket_directories": wire.identifier(str(socket_folder)),
            "unix_socket_permissions": "0700",
        }
        options = [f"-c{key}={value}" for key, value in settings.items()]
        return [str(postgres_binary("postgres")), "-D", str(self.folder), *options]

    def _drop_misleading_pids(self, socket_folder: Path) -> None:
        """PostgreSQL takes the pid of a zombie or of a stranger for a running server, and refuses.

        We know that none of its processes works in this folder. What it knows
        of shared memory it still checks: the key comes from the folder.
        """
        pid = self._recorded_pid()
        if pid is not None and Path(f"/proc/{pid}").exists():
            (self.folder / "postmaster.pid").unlink(missing_ok=True)
        (socket_folder / f"{_SOCKET}.lock").unlink(missing_ok=True)

    def _socket_folder(self) -> Path:
        """Where the running server says its socket is, else where one would put it."""
        recorded = self._pid_file().get("socket_folder")
        return Path(recorded) if recorded else _preferred_socket_folder(self.data_dir)

    def _session(self, database: str, timeout: float) -> wire.Session:
        return wire.Session(self._socket_folder() / _SOCKET, user=USER, database=database, timeout=timeout)

    def _answers(self) -> bool:
        # Asking a server that is still recovering would fill its log with refusals.
        if self._pid_file().get("status") != "ready":
            return False
        try:
            self._session("postgres", _ANSWER_LIMIT).close()
        except wire.ServerRefused as error:
            return error.code == wire.TOO_MANY_CONNECTIONS
        except OSError:
            return False
        return True

    def _settle(self) -> None:
        try:
            self._create_unless_there(DATABASE)
        except wire.ServerRefused as error:
            # Then it is an adopted server, which has served many already.
            if error.code != wire.TOO_MANY_CONNECTIONS:
                raise EmbeddedError(
                    f"PostgreSQL did not create its first database: {error}", hint=f"see {self.log_file}"
                ) from error

    def _tidy(self) -> None:
        with suppress(OSError, EmbeddedError):
            socket_folder = _preferred_socket_folder(self.data_dir)
            if socket_folder.parent != self.data_dir:
                socket_folder.rmdir()


def running_postgres(data_dir: Path, database: str = DATABASE) -> str | None:
    """The connection string of the server that runs on this data folder, if one does."""
    server = EmbeddedPostgres(data_dir)
    return server.dsn(database) if server.is_alive() and server._answers() else None


def _preferred_socket_folder(data_dir: Path) -> Path:
    """In the data folder, unless the path is too long for a socket or libpq would split it."""
    inside = data_dir / "postgres.socket"
    return inside if _fits_a_socket(inside) else _short_socket_folder(data_dir)


def _fits_a_socket(folder: Path) -> bool:
    return len(os.fsencode(folder / _SOCKET)) <= _LONGEST_SOCKET_PATH and "," not in str(folder)


def _short_socket_folder(data_dir: Path) -> Path:
    name = f"engram-{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]}"
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if base and os.access(base, os.W_OK) and _fits_a_socket(Path(base) / name):
            return Path(base) / name
    raise EmbeddedError(
        f"the path {data_dir} is too long for a Unix socket, and so is the folder for temporary files",
        hint="point ENGRAM_DATA_DIR at a folder with a shorter path",
    )


def _usable_socket_folder(data_dir: Path) -> Path:
    """A private folder; one that somebody else put there is refused."""
    folder = _preferred_socket_folder(data_dir)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folders.give_to_owner_of(data_dir, folder)
    found = folder.lstat()
    owner = os.geteuid() or data_dir.stat().st_uid
    if (stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid) != (
        stat.S_IFDIR,
        0o700,
        owner,
    ):
        raise EmbeddedError(
            f"{folder}, where PostgreSQL's socket would be, is not a private folder (0700) of its user's",
            hint="remove it, or point ENGRAM_DATA_DIR at a folder with a shorter path",
        )
    return folder


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
