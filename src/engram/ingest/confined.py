"""Runs a Python file that reads hostile input, once it has given up whatever it does not need.

    python -I confined.py BYTES_OF_MEMORY FILE

Limits hold memory, files and core dumps. Landlock lets it read Python and the system's
libraries, and nothing else of the disk. A filter on system calls takes away sockets,
other programs, children, a hand on any other process, and whatever outlives this one.
All of it is for good: what FILE runs, even code that a document smuggled in, cannot
undo it.

FILE has two functions. `prepare(folder)` may write to a folder, which is gone, and
nothing can be written any more, when `main()` is called. The walls are up before either:
they hold for a thread and those that it starts, and libraries start threads.

A kernel without Landlock or without filters leaves that wall out and the others up;
`engram doctor` tells which stand. It imports next to nothing of engram, so that a child
starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from engram.kernel import seccomp
from engram.kernel.seccomp import Call

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES_VERSION = 0x20080522
_CLONE_THREAD = 0x10000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15

# What reading a document never needs, where Landlock has nothing to say or may be missing.
_REFUSED = """
    socket connect bind sendto
    fork vfork execve execveat
    kill tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_getfd pidfd_send_signal
    ptrace process_vm_readv process_vm_writev perf_event_open bpf userfaultfd io_uring_setup
    chown lchown fchown fchownat utime utimes futimesat utimensat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
    shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink
    memfd_create inotify_init inotify_init1 fanotify_init add_key request_key keyctl
    setpriority sched_setparam sched_setscheduler sched_setaffinity sched_setattr ioprio_set
    mount umount2 mount_setattr move_mount open_tree fsopen pivot_root chroot unshare setns
    sethostname setdomainname settimeofday clock_settime adjtimex
    reboot kexec_load init_module finit_module delete_module swapon swapoff acct syslog
"""
# What only preparing needs.
_REFUSED_NOW = "chmod fchmod fchmodat fchmodat2"

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_BENEATH = 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
# Which accesses to files each version of Landlock knows, by their number of bits.
_FILE_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_FILE_ACCESSES = 16
_ALL_NETWORK_ACCESSES = 2
_ALL_SCOPES = 2
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/share", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    memory, path = int(sys.argv[1]), sys.argv[2]
    # Dies with its parent, however that dies.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with _passing_folder() as folder:
        close_in([sys.prefix, sys.base_prefix, path, *_SYSTEM], folder)
        program = _loaded(path)
        program.prepare(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    seccomp.install((Call(name) for name in _REFUSED_NOW.split()), every_thread=True)
    program.main()


@contextmanager
def _passing_folder() -> Iterator[str]:
    """A private folder that is removed at the end, or if this process dies.

    By another process, which stays outside: from behind the walls it could only be emptied.
    Where none can be made, there is none, and `prepare` will find out.
    """
    try:
        folder = tempfile.mkdtemp(prefix="engram-parser-")
    except OSError:
        yield "/dev/null/none"
        return
    waits, ends = os.pipe()
    remover = os.fork()
    if not remover:
        os.close(ends)
        os.read(waits, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.close(waits)
    try:
        yield folder
    finally:
        os.close(ends)
        os.waitpid(remover, 0)


def _loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("program", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    program = sys.modules["program"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def close_in(readable: Iterable[str], writable: str) -> None:
    """Both walls, as far as this kernel has them."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    version = landlock_version()
    if version:
        _forbid_files_except(readable, writable, version)
    _give_up_capabilities()
    seccomp.install(_refused())


def landlock_version() -> int:
    """0 where the kernel has none, or has it switched off."""
    return int(max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)))


def _forbid_files_except(readable: Iterable[str], writable: str, version: int) -> None:
    handled = (1 << _FILE_ACCESSES.get(version, _ALL_FILE_ACCESSES)) - 1
    asked = struct.pack("=Q", handled)
    if version >= 4:
        asked += struct.pack("=Q", (1 << _ALL_NETWORK_ACCESSES) - 1)
    if version >= 6:
        asked += struct.pack("=Q", (1 << _ALL_SCOPES) - 1)
    rules = _libc.syscall(_CREATE_RULESET, asked, ctypes.c_size_t(len(asked)), 0)
    _require(rules >= 0, "Landlock")
    for path in readable:
        _let(rules, path, _READ_FILE | _READ_FOLDER if os.path.isdir(path) else _READ_FILE)
    _let(rules, writable, handled)
    _require(_libc.syscall(_RESTRICT_SELF, rules, 0) == 0, "Landlock")
    os.close(rules)


def _let(rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not on this machine
    rule = struct.pack("=Qi", access, place)
    _require(_libc.syscall(_ADD_RULE, rules, _BENEATH, rule, 0) == 0, "Landlock")
    os.close(place)


def _refused() -> list[Call]:
    """Threads are made by `clone`; `clone3` hides its flags from a filter, and the C library does without."""
    return [
        *(Call(name) for name in _REFUSED.split()),
        Call("clone", unless={0: _CLONE_THREAD}, bit=True),
        Call("clone3", error=errno.ENOSYS),
        # An abort is a signal to oneself.
        Call("tgkill", unless={0: os.getpid()}),
        Call("fcntl", when=(1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX))),
        Call("prlimit64", unless={0: 0}),
        Call("prctl", when=(0, (_PR_SET_PDEATHSIG,))),
    ]


def _give_up_capabilities() -> None:
    """Root's rights, where it is root: what is left is a user who owns files that it cannot reach."""
    nothing = struct.pack("=6I", *[0] * 6)
    _libc.capset(struct.pack("=Ii", _CAPABILITIES_VERSION, 0), nothing)


def _require(held: bool, what: str) -> None:
    if not held:
        raise OSError(ctypes.get_errno(), f"{what} cannot be put up: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
