"""The walls around the reader of documents, tried from the inside."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engram.ingest import confined
from engram.kernel import seccomp

WALLS = Path(confined.__file__)
MEMORY = 1 << 30
NUMBER = {name: seccomp.number(name) for name in seccomp._NUMBERS}
# Each runs by itself with `given`, and returns for success.
ATTEMPTS = {
    "a file of this machine": "open('/etc/passwd').read()",
    "a file of ours": "open(given['file']).read()",
    "the names in a folder of ours": "os.listdir(given['folder'])",
    "the environment of the parent": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "its own memory by its file": "open('/proc/self/mem', 'rb')",
    "a file to write": "open(given['folder'] + '/new', 'x')",
    "a file to cut": "os.truncate(given['file'], 0)",
    "a file to remove": "os.remove(given['file'])",
    "a file to rename": "os.rename(given['file'], given['file'] + '2')",
    "the folder of its preparation": "os.mkdir(folder)",
    "a link": "os.symlink('/', given['folder'] + '/link')",
    "a folder": "os.mkdir(given['folder'] + '/new')",
    "a connection": "socket.create_connection(('127.0.0.1', given['port']), 5)",
    "a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a socket of this machine": "socket.socket(socket.AF_UNIX)",
    "a raw socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "a child": "os.fork() or os._exit(0)",
    "a child by the newer call": "called(435, struct.pack('11Q', 0, 0, 0, 0, 17, *[0] * 6), 88) or os._exit(0)",
    "a file among the libraries": "open(sys.prefix + '/written-by-a-parser', 'x')",
    "another program": "subprocess.run(['/bin/true'])",
    "to become another program": "os.execv('/bin/true', ['true'])",
    "a program without a fork": "os.posix_spawn('/bin/true', ['true'], {})",
    "a signal to the parent": "os.kill(os.getppid(), 0)",
    "a signal by descriptor": "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
    "the memory of the parent": f"called({NUMBER['ptrace']}, 16, os.getppid(), 0, 0)",
    "more memory": "bytearray(2 << 30)",
    "more memory, by its own leave": "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))",
    "a new user and network": f"called({NUMBER['unshare']}, 0x50000000)",
    "a mode of a file of ours": "os.chmod(given['file'], 0o666)",
    "an owner of a file of ours": "os.chown(given['file'], 12345, 12345)",
    "a time of a file of ours": "os.utime(given['file'], (0, 0))",
    "a mark on a file of ours": "os.setxattr(given['file'], 'user.x', b'x')",
    "the limits of the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))",
    "the turn of the parent": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "the processors of the parent": "os.sched_setaffinity(os.getppid(), {0})",
    "memory that stays": f"called({NUMBER['shmget']}, 0, 4096, 0o1600)",
    "a queue that stays": f"called({NUMBER['msgget']}, 0, 0o1600)",
    "a file without a name": "os.memfd_create('x')",
    "to outlive its parent": f"called({NUMBER['prctl']}, 1, 0, 0, 0, 0)",
    "a signal by a thread's number": f"called({NUMBER['tgkill']}, os.getppid(), os.getppid(), 0)",
    "a signal by a file's owner": "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "the name of this host": "socket.sethostname('x')",
    "a ring of calls": "called(425, 4, bytes(120))",
}
REFUSED = ("PermissionError", "MemoryError", "ValueError", "OSError")
PROBE = """
import ctypes, fcntl, json, os, resource, signal, socket, struct, subprocess, sys, threading
def called(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def prepare(folder):
    asked.update(json.load(sys.stdin), folder=folder)
    waiting.start()
def attempt():
    try:
        exec(asked["attempt"], {**globals(), **asked})
    except (OSError, MemoryError, ValueError) as error:
        print(json.dumps(type(error).__name__))
    else:
        print(json.dumps("did it"))
def main():
    attempt()
    if waiting.is_alive():
        go.set()
        waiting.join()
asked, go = {}, threading.Event()
waiting = threading.Thread(target=lambda: (go.wait(), attempt()), daemon=True)
if __name__ == "__main__":
    asked.update(json.load(sys.stdin))
    main()
"""


def tried(program: Path, attempt: str, given: dict[str, Any], *, walls: bool = True) -> list[str]:
    """What came of it: for the main thread, then for one that was there before."""
    command = [sys.executable, "-I", *([str(WALLS), str(MEMORY)] if walls else []), str(program)]
    asked = json.dumps({"attempt": attempt, "given": given})
    ran = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=60, env={}, check=False
    )
    return [json.loads(line) for line in ran.stdout.splitlines()] or [f"ended by {ran.returncode}"]


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "file").write_text("a secret")
    return {"folder": str(folder), "file": str(folder / "file")}


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    path = tmp_path / "probe.py"
    path.write_text(PROBE)
    return path


@pytest.mark.parametrize("what", ATTEMPTS)
def test_what_reading_does_not_need_is_refused(probe: Path, given: dict[str, Any], what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        given["port"] = server.getsockname()[1]
        told = tried(probe, ATTEMPTS[what], given)
    Path(sys.prefix, "written-by-a-parser").unlink(missing_ok=True)
    assert len(told) == 2
    assert set(told) <= set(REFUSED), f"{what}: {told}"
    assert Path(given["file"]).read_text() == "a secret"
    assert os.listdir(given["folder"]) == ["file"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other numbers are those of x32")
def test_a_call_by_its_other_number_is_the_end(probe: Path) -> None:
    """A filter that looked for the usual numbers alone could be passed by."""
    told = tried(probe, f"called(0x40000000 | {NUMBER['socket']}, 2, 1, 0)", {})
    assert told == [f"ended by -{int(signal.SIGSYS)}"]


@pytest.mark.parametrize(
    "what", ["a file of ours", "a file to write", "a connection", "a child", "another program", "more memory"]
)
def test_without_the_walls_it_would_succeed(probe: Path, given: dict[str, Any], what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        given["port"] = server.getsockname()[1]
        assert tried(probe, ATTEMPTS[what], given, walls=False) == ["did it"]


@pytest.mark.parametrize(
    "attempt",
    [
        "import threading; t = threading.Thread(target=int); t.start(); t.join()",
        "import kreuzberg; kreuzberg.extract_bytes_sync(b'a', 'text/plain')",
        "import zoneinfo, encodings.gb18030",
        "os.getrandom(8)",
        "resource.setrlimit(resource.RLIMIT_CPU, (60, resource.RLIM_INFINITY))",
        f"called({NUMBER['tgkill']}, os.getpid(), threading.get_native_id(), 0)",
        "socket.socketpair()",
    ],
)
def test_what_reading_needs_is_left(probe: Path, attempt: str) -> None:
    assert tried(probe, attempt, {}) == ["did it"] * 2


def test_a_machine_without_room_has_no_folder_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: str) -> str:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with confined._passing_folder() as folder, pytest.raises(NotADirectoryError):
        os.makedirs(folder)


def test_the_walls_of_this_machine_are_told() -> None:
    assert confined.landlock_version() >= 1
    assert seccomp.available()
