"""Real servers, real processes, real kills; every test must leave none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engram.embedded import EmbeddedPostgres, EmbeddedRedis
from engram.embedded.processes import Process, reap, servers_in
from engram.embedded.server import EmbeddedServer
from engram.embedded.waiting import wait_for

KINDS: dict[str, type[EmbeddedServer]] = {"postgres": EmbeddedPostgres, "redis": EmbeddedRedis}
SCRIPT = Path(__file__).with_name("server_user.py")


class ServerUser:
    """Another process that uses the server."""

    def __init__(self, name: str, data_dir: Path, *rest: str, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-B", str(SCRIPT), name, str(data_dir), *rest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self.server_pid = 0

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ready(self) -> ServerUser:
        line = self.line()
        assert line.startswith("ready "), line + (self.process.stdout.read() if self.process.stdout else "")
        self.server_pid = int(line.split()[1])
        return self

    def tell(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def release(self) -> None:
        self.tell("release")
        assert self.line() == "released"

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def reused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making a cluster takes most of a test's time: tests that ask for this share one data folder."""
    return tmp_path_factory.mktemp("reused") / "data"


@pytest.fixture
def data_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    path: Path = tmp_path / "data"
    if "reused" in request.fixturenames:
        path = request.getfixturevalue("reused")
    yield path
    left = list(processes_of(path))
    for process in left:
        process.send(signal.SIGKILL)
        wait_for(lambda process=process: not process.alive(), 10)
    assert not left, "a server was left running"


def processes_of(path: Path) -> Iterator[Process]:
    """Every process of a server that works somewhere below `path`."""
    for folder in {Path(cwd) for cwd in working_folders() if Path(cwd).is_relative_to(path)}:
        for kind in KINDS.values():
            yield from servers_in(kind.program, folder)


def working_folders() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                yield os.readlink(entry / "cwd")


@pytest.fixture
def running(data_dir: Path) -> Callable[[], set[int]]:
    """The pids of every process of a server in the data folder."""
    return lambda: {process.pid for process in processes_of(data_dir)}


@pytest.fixture(params=list(KINDS))
def new_kind(request: pytest.FixtureRequest) -> type[EmbeddedServer]:
    """A server that starts for the first time."""
    return KINDS[request.param]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, reused: Path) -> type[EmbeddedServer]:
    """A server that may have been in its folder before."""
    return KINDS[request.param]


@pytest.fixture
def another_user(data_dir: Path) -> Iterator[Callable[..., ServerUser]]:
    """Start another process that uses a server."""
    made: list[ServerUser] = []

    def make(kind: type[EmbeddedServer], *rest: str, **options: object) -> ServerUser:
        made.append(ServerUser(kind.name, data_dir, *rest, **options))
        return made[-1]

    yield make
    for user in made:
        user.close()
    reap()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A live process that has nothing to do with any server."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    assert process.poll() is None, "a stranger's process was ended"
    process.kill()
    process.wait()


@pytest.fixture
def kill() -> Callable[[int | None], None]:
    def kill_for_good(pid: int | None) -> None:
        assert pid
        process = Process.of(pid)
        assert process
        os.kill(pid, signal.SIGKILL)
        # Not `alive`, which would bury it: a zombie is what the tests are about.
        assert wait_for(lambda: Process.of(pid) != process, 10)

    return kill_for_good


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's; pytest's own may not, in a parallel run."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        yield Path(folder)
