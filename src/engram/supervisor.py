"""Runs the whole stack: embedded parts, and every role as a child process kept alive.

A child that dies is started again, after a pause that grows while it keeps
dying. A child whose supervisor is gone (kill -9 included) ends itself: it
holds the reading end of a pipe whose writing end only the supervisor has. The
embedded servers outlive a killed supervisor and are adopted by the next one.

A role can be stopped and kept down from another terminal (`engram hold`): a
file named after it in `hold/` of the data folder says so. `held_while` does it
for as long as its caller lives: its file counts only while it is locked.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from engram.assembly.addresses import MEMORY_DATABASE, migrate_all, renew_memory_port, with_memory_server
from engram.assembly.callers import require_loopback
from engram.embedded import EmbeddedPostgres, EmbeddedRedis
from engram.embedded.folders import make_private_folder, write_private
from engram.embedded.locks import FileLock
from engram.kernel.errors import EmbeddedError
from engram.kernel.logs import fields
from engram.kernel.settings import Settings, described
from engram.web.sockets import bound

log = logging.getLogger(__name__)

PARENT_FD = "ENGRAM_PARENT_FD"
INSTANCE = "ENGRAM_INSTANCE"
WATCH_SECONDS = 0.25
READY_SECONDS = 60.0
STOP_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE, LONG_LIFE = 0.5, 10.0, 30.0
MAX_LOG_BYTES = 10 << 20

# A proxy from the environment has no business with our own loopback addresses.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Child:
    """One role as a process."""

    name: str
    arguments: list[str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    held_down: bool = False
    started_at: float = 0.0
    pause: float = FIRST_PAUSE
    due_at: float = 0.0
    restarts: int = 0

    @property
    def slug(self) -> str:
        """Its name on a command line."""
        return self.name.replace(" ", "-")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, environment: Mapping[str, str], parent_fd: int, working_folder: Path | None) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _trim(self.log_path)
        with open(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
                [sys.executable, "-m", "engram", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, PARENT_FD: str(parent_fd)},
                cwd=working_folder,
                pass_fds=[parent_fd],
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is None or not self.running:
            return
        self.process.send_signal(how)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def plan_restart(self) -> None:
        now = time.monotonic()
        lived_long = now - self.started_at > LONG_LIFE
        self.pause = FIRST_PAUSE if lived_long else min(self.pause * 2, LONGEST_PAUSE)
        self.due_at = now + self.pause
        self.restarts += 1


@dataclass
class Stack:
    """`with Stack(settings) as stack:` — everything is up inside, and stopped after.

    `only`: no more than these roles; every part they need is there already, and its
    address is in the settings.
    """

    settings: Settings
    on_progress: Callable[[str], None] = lambda _: None
    alone: bool = False
    only: Collection[str] = ()
    children: dict[str, Child] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    postgres: EmbeddedPostgres | None = None
    redis: EmbeddedRedis | None = None

    def __post_init__(self) -> None:
        self._held = ExitStack()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._read_fd = self._write_fd = -1
        self._told = ""
        self.instance = secrets.token_hex(8)

    def __enter__(self) -> Stack:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def gateway_url(self) -> str:
        return self.settings.gateway_url

    @property
    def dsn(self) -> str:
        return self.environment["POSTGRES_DSN"]

    def hold_down(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a role and leave it down until `bring_up`."""
        with self._lock:
            child = self.children[name]
            child.held_down = True
            child.stop(how)

    def bring_up(self, name: str) -> None:
        with self._lock:
            child = self.children[name]
            child.held_down = False
            if not child.running:
                child.start(self.environment, self._read_fd, self.settings.data_dir if self.alone else None)
        self._wait_until_ready(name)

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            for child in reversed(self.children.values()):
                child.stop()
            self._held.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Until somebody stops the stack."""
        return self._stopping.wait(seconds)

    def request_stop(self) -> None:
        self._stopping.set()

    def _start(self) -> None:
        self._held.enter_context(_only_one(self.settings.data_dir))
        for role in held_roles(self.settings.data_dir):
            release_role(self.settings.data_dir, role)
        with bound(self.settings.gateway_host, self.settings.gateway_port) as probe:
            self.settings = replace(self.settings, gateway_port=probe.getsockname()[1])
        require_loopback(self.settings)
        self._open_pipe()
        self._start_parts()
        self._plan_children()
        for name, child in self.children.items():
            self.on_progress(f"starting {name}")
            child.start(self.environment, self._read_fd, self.settings.data_dir if self.alone else None)
        for name in self.children:
            self._wait_until_ready(name)
            if self._stopping.is_set():
                return
        threading.Thread(target=self._watch, name="engram-watch", daemon=True).start()

    def _open_pipe(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self._held.callback(os.close, self._read_fd)
        self._held.callback(os.close, self._write_fd)

    def _start_parts(self) -> None:
        renew_memory_port(self.settings.data_dir)
        addressed = with_memory_server(self.settings)
        if not self.only:
            addressed = self._start_embedded(addressed)
        self.environment = {**self._inherited(), **as_environment(addressed), INSTANCE: self.instance}
        if not self.only:
            migrate_all(self.dsn, self.on_progress)

    def _start_embedded(self, addressed: Settings) -> Settings:
        if self.settings.postgres_dsn is None or self.settings.openmemory_base_url is None:
            self.on_progress("starting PostgreSQL")
            self.postgres = EmbeddedPostgres(self.settings.data_dir, on_progress=self.on_progress)
            self._held.enter_context(self.postgres)
            addressed = replace(addressed, postgres_dsn=self.settings.postgres_dsn or self.postgres.dsn())
        if self.settings.redis_url is None:
            self.on_progress("starting Redis")
            self.redis = EmbeddedRedis(self.settings.data_dir, on_progress=self.on_progress)
            self._held.enter_context(self.redis)
            addressed = replace(addressed, redis_url=self.redis.url())
        return addressed

    def _inherited(self) -> dict[str, str]:
        """The environment of the children; alone, nothing of the user's own settings is in it."""
        if not self.alone:
            return dict(os.environ)
        ours = {setting.env for _, setting in described()} | {"ENGRAM_CONFIG"}
        return {name: value for name, value in os.environ.items() if name not in ours}

    def _plan_children(self) -> None:
        roles = {
            "gateway": ["serve"],
            "outbox worker": ["worker", "outbox"],
            "ingest worker": ["worker", "ingest"],
        }
        if self.settings.ingest_queue == "kafka":
            # Imported here: it brings the clients of both queues.
            from engram.assembly.queues import kafka_servers

            kafka_servers(self.settings)  # now, not by roles that die of it again and again
            roles["publisher"] = ["worker", "publisher"]
        if self.settings.openmemory_base_url is None and self.postgres:
            if self.settings.memory_dsn is None:
                self.postgres.ensure_database(MEMORY_DATABASE)
                self.environment["ENGRAM_MEMORY_DSN"] = self.postgres.dsn(MEMORY_DATABASE)
            roles = {"memory server": ["memory-server"], **roles}
        logs = self.settings.data_dir / "logs"
        for name, arguments in roles.items():
            if self.only and name not in self.only:
                continue
            self.children[name] = Child(name, arguments, logs / f"{name.replace(' ', '-')}.log")
        self._tell_roles()

    def _health_of(self, name: str) -> str | None:
        urls = {
            "gateway": f"{self.settings.gateway_url}/health",
            "memory server": f"{self.environment['OPENMEMORY_BASE_URL']}/health",
        }
        return urls.get(name)

    def _wait_until_ready(self, name: str) -> None:
        url, child = self._health_of(name), self.children[name]
        give_up = time.monotonic() + READY_SECONDS
        while url and not (_answers(url, self.instance) and child.running):
            if not child.running:
                raise EmbeddedError(
                    f"the {name} stopped while starting: {_last_line(child.log_path)}",
                    hint=f"its log is {child.log_path}",
                )
            if self._stopping.is_set():
                return
            if time.monotonic() > give_up:
                raise EmbeddedError(f"the {name} did not start in time", hint=f"its log is {child.log_path}")
            time.sleep(0.05)

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            with self._lock:
                if self._stopping.is_set():
                    return
                try:
                    self._mend()
                except Exception as error:  # noqa: BLE001 - whoever watches must not die of anything
                    log.error("supervisor.cannot_mend", extra=fields(error=str(error)))

    def _mend(self) -> None:
        for part in (self.postgres, self.redis):
            if part is not None and not part.is_alive():
                self.on_progress(f"{part.title} died; starting it again")
                part.start()
                if part is self.redis:
                    self.environment["REDIS_URL"] = self.redis.url()
        held = held_roles(self.settings.data_dir)
        for child in self.children.values():
            _trim(child.log_path)
            if child.slug in held:
                child.stop()
                # It did not die: once it is released, it is started without a pause.
                child.due_at = time.monotonic()
            elif not child.held_down and not child.running:
                self._restart(child)
        self._tell_roles()

    def _tell_roles(self) -> None:
        """For other terminals: a line for each role, with its process if it runs."""
        told = "".join(
            f"{child.slug} {child.process.pid if child.process and child.running else '-'}\n"
            for child in self.children.values()
        )
        if told != self._told:
            self._told = told
            write_private(self.settings.data_dir / "roles", told)

    def _restart(self, child: Child) -> None:
        if child.due_at < child.started_at:
            child.plan_restart()
            self.on_progress(f"the {child.name} died; starting it again (its log is {child.log_path})")
        if time.monotonic() >= child.due_at:
            child.start(self.environment, self._read_fd, self.settings.data_dir if self.alone else None)


def is_up(data_dir: Path) -> bool:
    """Whether an `engram up` has this folder."""
    if not (data_dir / "up.lock").exists():
        return False
    lock = FileLock(data_dir / "up.lock")
    free = lock.share()
    lock.drop()
    return not free


def roles_of(data_dir: Path) -> dict[str, int | None]:
    """The roles of the stack that runs in this folder, by their names on a command line, each with
    its process if it runs."""
    try:
        lines = (data_dir / "roles").read_text("utf-8").splitlines()
    except OSError:
        return {}
    named = (line.partition(" ") for line in lines)
    return {role: int(pid) if pid.isdigit() else None for role, _, pid in named}


def held_roles(data_dir: Path) -> set[str]:
    try:
        files = [path for path in (data_dir / "hold").iterdir() if not path.name.startswith(".")]
    except OSError:
        return set()
    return {path.name.partition("~")[0] for path in files if "~" not in path.name or _is_locked(path)}


def hold_role(data_dir: Path, role: str) -> None:
    """Ask the stack of this folder to stop a role and keep it down."""
    make_private_folder(data_dir / "hold")
    (data_dir / "hold" / role).touch(mode=0o600)


def release_role(data_dir: Path, role: str) -> None:
    (data_dir / "hold" / role).unlink(missing_ok=True)


@contextmanager
def held_while(data_dir: Path, role: str) -> Iterator[None]:
    """Hold a role while the block runs. A caller that is killed lets go of it by that."""
    make_private_folder(data_dir / "hold")
    named = data_dir / "hold" / f"{role}~{secrets.token_hex(4)}"
    lock = FileLock(named.with_name(f".{named.name}"))
    lock.share()
    # Locked before it can be seen: whoever sees it unlocked takes it for a dead caller's.
    lock.path.rename(named)
    try:
        yield
    finally:
        named.unlink(missing_ok=True)
        lock.drop()


def _is_locked(path: Path) -> bool:
    """Whether its holder lives; what a dead one left is removed."""
    lock = FileLock(path)
    if not lock.make_exclusive():
        return True
    path.unlink(missing_ok=True)
    lock.drop()
    return False


def die_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """In a child: end when the supervisor does, whatever became of it."""
    if PARENT_FD not in environment:
        return
    fd = int(environment[PARENT_FD])

    def watch() -> None:
        os.read(fd, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="engram-parent", daemon=True).start()


@contextmanager
def _only_one(data_dir: Path) -> Iterator[None]:
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(data_dir / "up.lock", os.O_WRONLY | os.O_CREAT, 0o600), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EmbeddedError(
                f"engram is already up on {data_dir}",
                hint="use it, stop it, or set ENGRAM_DATA_DIR and GATEWAY_PORT for a second one",
            ) from None
        yield


def as_environment(settings: Settings) -> dict[str, str]:
    """Every setting that is set, so that children see what this process read from its file."""
    found = {}
    for name, setting in described():
        value = getattr(settings, name)
        if value not in (None, ()):
            found[setting.env] = ",".join(value) if isinstance(value, tuple) else str(value)
    return found


def _answers(url: str, instance: str) -> bool:
    """Whether the role we started answers there, and not somebody who has its port."""
    try:
        with _DIRECT.open(url, timeout=2) as response:
            return bool(json.load(response).get("instance") == instance)
    except (urllib.error.URLError, OSError, ValueError, AttributeError):
        return False


def _trim(path: Path) -> None:
    """Keep one older log; the file itself stays, because its writer has it open for appending."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(path, path.with_suffix(".log.1"))
        os.truncate(path, 0)


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").strip().splitlines() if path.exists() else []
    return " ".join(line.strip() for line in lines[-2:])[:600] if lines else "it said nothing"
