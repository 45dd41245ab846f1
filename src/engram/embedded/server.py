"""How a server shared by several processes is started, adopted and stopped.

Two lock files lie beside the server's folder.

    <name>.users   held *shared* by everybody who uses the server
    <name>.turn    held *exclusively* while somebody starts or stops it

    start    take the turn; share `users`; adopt the server that runs here, or
             start one; wait until it answers; give the turn back
    release  take the turn; if `users` can be made exclusive nobody else is
             left: stop the server; let go of `users`; give the turn back

Only the holder of the turn makes `users` exclusive, so a server is never
stopped under somebody who is starting, and of many who leave at once the last
one stops it. The kernel drops both locks of a process that is killed: its
server lives on for the others, and the next one to start adopts it.

Never here: what a server's protocol or files look like. That is its subclass's.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar

from engram.embedded import folders, processes
from engram.embedded.accounts import Account, account_for
from engram.embedded.locks import FileLock
from engram.embedded.logfile import LogFile
from engram.embedded.processes import Process
from engram.embedded.waiting import wait_for
from engram.kernel.errors import EmbeddedError
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")

# Crash recovery may read a gigabyte of log; a starter that lives is waited for.
START_LIMIT = 600.0
TURN_LIMIT = START_LIMIT + 60
LEAVE_LIMIT = 60.0
# A backend that outlives its killed postmaster ends by itself unless it is busy.
STRAY_PATIENCE = 5.0
STOP_LIMIT = 60.0
LAUNCHES = 3


class EmbeddedServer(ABC):
    title: ClassVar[str]
    name: ClassVar[str]
    program: ClassVar[str]
    setting: ClassVar[str]
    root_is_refused: ClassVar[bool]
    # Sent one after the other, each with `STOP_LIMIT` to take effect.
    stop_signals: ClassVar[tuple[signal.Signals, ...]]

    def __init__(self, data_dir: Path, *, on_progress: Callable[[str], None] | None = None) -> None:
        self.data_dir = Path(os.path.realpath(data_dir))
        self.folder = self.data_dir / self.name
        self.log_file = self.data_dir / f"{self.name}.log"
        self._log = LogFile(self.log_file)
        self._users = FileLock(self.data_dir / f"{self.name}.users")
        self._turn_file = self.data_dir / f"{self.name}.turn"
        self._launched: Process | None = None
        self._on_progress = on_progress

    def start(self) -> Self:
        """Start or adopt the server, wait until it answers, and count as one of its users."""
        if self._users.held and not self._users.inherited and self._answers():
            return self
        with self._disk_errors_explained():
            folders.make_private_folder(self.data_dir)
            with self._turn(TURN_LIMIT) as turn:
                if turn is None:
                    raise EmbeddedError(
                        f"another process has been starting or stopping {self.title} for {TURN_LIMIT:.0f} s",
                        hint=f"`fuser {self._turn_file}` tells which one; end it if it hangs",
                    )
                self._become_user()
                self._bring_up_or_leave(turn)
        return self

    def release(self) -> None:
        """Stop using the server; whoever is the last to do so stops it."""
        if not self._users.held:
            return
        try:
            with self._disk_errors_explained(), self._turn(LEAVE_LIMIT) as turn:
                if turn is not None:
                    self._leave()
                else:
                    # Somebody is busy starting it, and will be its user.
                    log.warning("embedded.left_running", extra=fields(server=self.title))
        finally:
            self._users.drop()

    def is_alive(self) -> bool:
        """Whether the server's process lives; a log that has grown long is cut on this occasion."""
        self._log.cut()
        return self._find() is not None

    @property
    def pid(self) -> int | None:
        process = self._find()
        return process.pid if process else None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @abstractmethod
    def _fill(self, folder: Path, turn: FileLock) -> None:
        """Make what a new server needs in its still unfinished folder."""

    @abstractmethod
    def _check_folder(self) -> None:
        """Raise, touching nothing, unless engram made the folder and this program can run on it."""

    @abstractmethod
    def _recorded_pid(self) -> int | None:
        """The pid that the server wrote down; it may be anybody's by now."""

    @abstractmethod
    def _command(self) -> list[str]:
        """How to start it; called right before, with nothing running in the folder."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether our server, and not somebody else's, serves requests."""

    def _settle(self) -> None:  # noqa: B027
        """What is left to do once the server answers."""

    def _tidy(self) -> None:  # noqa: B027
        """What is left to do once the server has been stopped."""

    def _find(self) -> Process | None:
        processes.reap()
        pid = self._recorded_pid()
        process = Process.of(pid) if pid else None
        return process if process and process.is_server(self.program, self.folder) else None

    def _account(self) -> Account:
        return account_for(self.data_dir, root_is_refused=self.root_is_refused)

    def _become_user(self) -> None:
        """Nobody can hold `users` exclusively while we have the turn, save a child
        that has been forked from a leaver and is about to become another program."""
        if not wait_for(self._users.share, LEAVE_LIMIT):
            raise EmbeddedError(
                f"{self._users.path} stays locked", hint=f"`fuser {self._users.path}` tells by whom"
            )

    def _bring_up_or_leave(self, turn: FileLock) -> None:
        try:
            self._bring_up(turn)
        except BaseException:
            with suppress(EmbeddedError):
                self._leave()
            raise

    def _bring_up(self, turn: FileLock) -> None:
        self._make_folder(turn)
        self._log.cut()
        for _ in range(LAUNCHES):
            mark = self._log.size()
            adopted = self._find() or self._wait_for_strays()
            process = adopted or self._launch()
            if self._wait_until_it_answers(process):
                self._settle()
                event = "embedded.adopted" if adopted else "embedded.started"
                log.info(event, extra=fields(server=self.title, pid=process.pid))
                return
        raise EmbeddedError(
            f"{self.title} in {self.folder} does not start: {self._log.since(mark)}",
            hint=self._disk_hint() or f"see {self.log_file}, or set {self.setting} to a server of your own",
        )

    def _make_folder(self, turn: FileLock) -> None:
        if folders.is_missing_or_empty(self.folder):
            self._say(f"{self.title}: setting up {self.folder}")
            folders.make_at_once(self.folder, lambda unfinished: self._fill(unfinished, turn))
        self._check_folder()

    def _launch(self) -> Process:
        self._launched = processes.launch(
            self._command(), folder=self.folder, log=self.log_file, account=self._account()
        )
        return self._launched

    def _wait_for_strays(self) -> Process | None:
        """Let what a killed server left behind end, or end it.

        A server whose starter was killed a moment ago looks like a stray until
        it has written down its pid; then it is adopted.
        """

        def settled() -> bool:
            return self._find() is not None or not any(self._strays())

        self._wait(settled, STRAY_PATIENCE, "old processes to end")
        if not settled():
            for stray in self._strays():
                stray.send(signal.SIGKILL)
            self._wait(settled, STOP_LIMIT, "old processes to end")
        return self._find()

    def _strays(self) -> Iterator[Process]:
        return processes.servers_in(self.program, self.folder)

    def _wait_until_it_answers(self, process: Process) -> bool:
        """False when it died; while it lives and works it may take its time."""

        def outcome() -> str:
            if self._answers():
                return "answers"
            return "" if process.alive() else "died"

        said = self._wait(outcome, START_LIMIT, "it to be ready")
        if not said:
            raise EmbeddedError(
                f"{self.title} (pid {process.pid}) runs but has not answered for {START_LIMIT:.0f} s",
                hint=f"see {self.log_file}",
            )
        return said == "answers"

    def _leave(self) -> None:
        try:
            if self._users.make_exclusive():
                self._stop()
        finally:
            self._users.drop()

    def _stop(self) -> None:
        process = self._find() or self._launched
        if process is None or not process.alive():
            return
        for number in self.stop_signals:
            process.send(number)
            if wait_for(lambda: not process.alive(), STOP_LIMIT):
                self._tidy()
                log.info("embedded.stopped", extra=fields(server=self.title, pid=process.pid))
                return
        raise EmbeddedError(
            f"{self.title} (pid {process.pid}) does not stop", hint=f"see {self.log_file}; end it by its pid"
        )

    @contextmanager
    def _turn(self, limit: float) -> Iterator[FileLock | None]:
        """The exclusive right to start or stop the server; None when `limit` seconds did not give it."""
        turn = FileLock(self._turn_file)
        given = self._wait(turn.make_exclusive, limit, "another process to start or stop it")
        try:
            yield turn if given else None
        finally:
            turn.drop()

    def _wait(self, condition: Callable[[], T], limit: float, what: str) -> T:
        def still_waiting(seconds: float) -> None:
            self._say(f"{self.title}: waiting for {what} ({seconds:.0f} s)")

        return wait_for(condition, limit, on_wait=still_waiting)

    def _say(self, text: str) -> None:
        if self._on_progress is not None:
            self._on_progress(text)

    @contextmanager
    def _disk_errors_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.data_dir
            raise EmbeddedError(
                f"{self.title} cannot use {where}: {error.strerror or error}",
                hint=self._disk_hint()
                or "make the folder writable for you, or point ENGRAM_DATA_DIR at another one",
            ) from error

    def _disk_hint(self) -> str | None:
        with suppress(OSError):
            if shutil.disk_usage(self.data_dir).free < 1 << 20:
                return f"the disk of {self.data_dir} is full: make room, or point ENGRAM_DATA_DIR elsewhere"
        return None
