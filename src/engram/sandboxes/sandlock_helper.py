"""The process in which sandboxed commands are started. The only module that imports sandlock.

Run as a script, with next to nothing of engram's imported: it has no secret to lose.
It gives up root, then waits on its standard input, a socket, for commands: each
comes as four descriptors (the command's stdin, stdout and stderr, and a socket
for its order and its outcome) and gets a supervisor, a fork of this process.

A supervisor runs one command under sandlock, watches time, processor, disk and
whether the sandbox is still alive, and ends all of the command's processes,
whatever session they fled to, before it tells the outcome. It gives up when the
other end of its socket is closed, and this process when its own is: a gateway
that was killed leaves nothing running.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
from typing import Any, NoReturn

import sandlock  # type: ignore[import-untyped]

# Now: when root is given up its folder may be out of reach.
import sandlock._sdk  # type: ignore[import-untyped]

from engram.kernel import seccomp
from engram.kernel.seccomp import Call

TICK_SECONDS = 0.25
# What a supervisor that waited says: it has a command, or there will be none any more.
TAKEN, OVER = b"t", b"o"
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PF_EXITING = 0x4
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
# The kernel lets these reach any process of the same user, and Landlock does not see them. Of oneself
# a command may ask them all.
_ABOUT_OTHERS = [
    Call("prlimit64", unless={0: 0}),
    Call("sched_setaffinity", unless={0: 0}),
    Call("sched_setscheduler", unless={0: 0}),
    Call("sched_setparam", unless={0: 0}),
    Call("sched_setattr", unless={0: 0}),
    Call("setpriority", unless={0: _PRIO_PROCESS, 1: 0}),
    Call("ioprio_set", unless={0: _IOPRIO_WHO_PROCESS, 1: 0}),
]


class Supervisor:
    """One command, from its order to its outcome."""

    def __init__(self, order: dict[str, Any], line: socket.socket) -> None:
        self.order = order
        self.line = line
        self.ended_by: str | None = None
        self.done = threading.Event()

    def run(self) -> dict[str, Any]:
        if "measure" in self.order:
            return {"used": used(self.order["work"])}
        if not self._alive():
            return {"refused": "gone"}
        if used(self.order["work"]) > self.order["disk_bytes"]:
            return {"refused": "disk"}
        if not os.path.isdir(self.order["cwd"]):
            return {"refused": "cwd"}
        self._limit()
        seccomp.install(_ABOUT_OTHERS)
        process = self._policy().popen(self.order["argv"])
        watcher = threading.Thread(target=self._watch, args=(process,), daemon=True)
        watcher.start()
        result = process.wait()
        self.done.set()
        end_children()
        return {"exit_code": _exit_code(result), "ended_by": self.ended_by}

    def _policy(self) -> sandlock.Sandbox:
        order = self.order
        return sandlock.Sandbox(
            fs_readable=order["readable"],
            fs_writable=[order["work"], "/dev/null"],
            clean_env=True,
            env=order["env"],
            cwd=order["cwd"],
            max_memory=order["memory_bytes"],
            max_processes=order["processes"],
            max_open_files=256,
        )

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = self.order["disk_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def _watch(self, process: sandlock.Process) -> None:
        """Until it has ended. Whoever cannot watch any more, whatever the reason, ends it."""
        with contextlib.suppress(Exception):
            self._watched(process)
        self._end(process)

    def _watched(self, process: sandlock.Process) -> None:
        give_up = time.monotonic() + self.order["timeout_seconds"]
        while not self.done.is_set():
            left = give_up - time.monotonic()
            if left <= 0:
                self.ended_by = "time"
            elif self._told_to_end(min(left, TICK_SECONDS)):
                self.ended_by = "stop"
            elif not self.done.is_set() and left > TICK_SECONDS:
                self.ended_by = self._over()
            if self.ended_by:
                return

    def _end(self, process: sandlock.Process) -> None:
        """Kill until the command is gone. Reaping is for whoever waits for it."""
        while not self.done.wait(0.005):
            process.kill()
            with contextlib.suppress(OSError):
                kill_descendants()

    def _told_to_end(self, seconds: float) -> bool:
        """Whoever gave the order has gone away."""
        readable, _, _ = select.select([self.line], [], [], seconds)
        return bool(readable)

    def _over(self) -> str | None:
        if not self._alive():
            return "stop"
        processes = descendants()
        if spent(processes) > self.order["cpu_seconds"]:
            return "cpu"
        disk = used(self.order["work"]) + unlinked(processes)
        return "disk" if disk > self.order["disk_bytes"] else None

    def _alive(self) -> bool:
        return os.path.exists(self.order["alive"])


def used(folder: str) -> int:
    """Bytes that a folder takes, links not followed; what cannot be looked into is opened first."""
    total, folders = 0, [folder]
    while folders:
        where = folders.pop()
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        total += found.st_blocks * 512 + 512
                        if stat.S_ISDIR(found.st_mode):
                            folders.append(entry.path)
        except PermissionError:
            if _opened_up(where):
                folders.append(where)
        except FileNotFoundError:
            pass
        except OSError:  # too deep to be named: nobody makes that by accident
            return sys.maxsize
    return total


def _opened_up(folder: str) -> bool:
    """Make our own folder readable to us, without following a link that took its place."""
    try:
        fd = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.getuid() or stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 == 0o700:
            return False
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def descendants() -> dict[int, list[str]]:
    """Our processes by pid, with the fields of their `stat` after the name."""
    found: dict[int, list[str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                found[int(name)] = file.read().rpartition(b")")[2].decode().split()
    ours, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, fields in found.items() if int(fields[1]) in ours} - ours
        ours |= more
        grown = bool(more)
    return {pid: found[pid] for pid in ours if pid != os.getpid()}


def spent(processes: dict[int, list[str]]) -> float:
    """Processor seconds: of the living, of what they waited for, and of what ended under us."""
    ticks = sum(int(field) for fields in processes.values() for field in fields[11:15])
    gone = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ticks / _TICKS_PER_SECOND + gone.ru_utime + gone.ru_stime


def unlinked(processes: dict[int, list[str]]) -> int:
    """Bytes in files that have no name any more but are still open: no folder shows them.

    A process that will not be looked into could have any number.
    """
    seen: dict[tuple[int, int], int] = {}
    for pid, fields in processes.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            try:
                opened = os.listdir(f"/proc/{pid}/fd")
            except PermissionError:
                if fields[0] in "ZX" or _has_ended(pid):
                    continue
                return sys.maxsize
            for fd in opened:
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{fd}")
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _has_ended(pid: int) -> bool:
    """Or is about to: its memory, by whose leave one may look, goes before its files."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)
    return True


def kill_descendants() -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_children() -> None:
    """Kill and reap until nothing is below us: a process that flees comes to us, as a child."""
    while _has_children():
        kill_descendants()
        time.sleep(0.002)


def _has_children() -> bool:
    """Reaps those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _exit_code(result: Any) -> int:
    if result.reason == sandlock._sdk.ExitReason.EXITED and result.exit_code >= 0:
        return int(result.exit_code)
    return 128 + (result.signal if result.signal and result.signal > 0 else signal.SIGKILL)


def supervise(descriptors: list[int]) -> NoReturn:
    """A fork: takes the order, runs it, tells the outcome."""
    stdin, stdout, stderr, line_fd = descriptors
    line = socket.socket(fileno=line_fd)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        order = _received(line)
        for fd, standard in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        outcome = Supervisor(order, line).run()
    except Exception as error:  # noqa: BLE001 - the outcome of anything is told; nobody reads a trace here
        outcome = {"error": f"{type(error).__name__}: {error}"}
        end_children()
    for standard in (0, 1, 2):
        os.close(standard)
    with contextlib.suppress(OSError):
        line.sendall(json.dumps(outcome).encode())
        line.close()  # now: whoever waits for it need not wait for our memory to be torn down
    os._exit(0)


def _received(line: socket.socket) -> dict[str, Any]:
    """Its length, then the order."""
    length = int.from_bytes(_exactly(line, 8), "big")
    order: dict[str, Any] = json.loads(_exactly(line, length))
    return order


def _exactly(line: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = line.recv(min(size, 1 << 16))
        if not part:
            raise EOFError("the order ended half-way")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def give_up_root(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # The kernel hides a process that changed its user from itself; sandlock must see its own child.
    _prctl(_PR_SET_DUMPABLE, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> None:
    """`sandlock_helper.py UID`; 0: stay who we are. Says how much of Landlock this kernel has."""
    control = socket.socket(fileno=os.dup(0))
    os.chdir("/")
    os.umask(0o022)
    if uid := int(sys.argv[1]):
        give_up_root(uid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.disable()
    gc.freeze()  # a fork that collects would copy what it touches
    abi = {"landlock": sandlock.landlock_abi_version(), "needed": sandlock.min_landlock_abi()}
    control.sendall(json.dumps(abi).encode())
    Helper(control).serve()


class Helper:
    """Keeps one supervisor waiting for the next command: a fork costs as much as sandlock does."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._supervisors: set[int] = set()
        self._waiting = 0
        self._heard, self._said = os.pipe()

    def serve(self) -> None:
        """Until the gateway is gone; then until each supervisor has noticed that."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        self._start()
        while os.read(self._heard, 1) == TAKEN:
            self._start()
        while self._supervisors:
            time.sleep(0.02)

    def _start(self) -> None:
        ending = {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
            self._wait()
        self._supervisors.add(pid)
        self._waiting = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)

    def _wait(self) -> NoReturn:
        """In the fork: take the next command, and say so, that another may wait for the one after."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 4)
        os.write(self._said, TAKEN if message else OVER)
        for fd in (self._heard, self._said, self._control.detach()):
            os.close(fd)
        if not message:
            os._exit(0)
        supervise(descriptors)

    def _reap(self) -> None:
        """What a supervisor that was killed left behind has come to us: end it."""
        orphaned = False
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                orphaned |= ended[0] not in self._supervisors or os.WIFSIGNALED(ended[1])
                self._supervisors.discard(ended[0])
                if ended[0] == self._waiting and os.WIFSIGNALED(ended[1]):
                    os.write(self._said, TAKEN)
        if orphaned:
            for pid, fields in descendants().items():
                if int(fields[1]) == os.getpid() and pid not in self._supervisors:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
