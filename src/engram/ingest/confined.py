"""Runs a Python file that reads hostile input, once it has given up whatever it does not need.

    python -I confined.py BYTES_OF_MEMORY FILE

Limits hold memory, files and core dumps. Landlock lets it read Python and the system's
libraries, and nothing else of the disk. A filter on system calls takes away sockets,
other programs, children, and a hand on any other process. All of it is for good: what
FILE runs, even code that a document smuggled in, cannot undo it.

FILE has two functions. `prepare(folder)` may write to a folder, which is gone, and
nothing can be written any more, when `main()` is called. The walls are up before either:
they hold for a thread and those that it starts, and libraries start threads.

A kernel without Landlock or without filters leaves that wall out and the others up;
`engram doctor` tells which stand. It imports nothing of engram, so that a child starts
in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

# What reading a document never needs. Threads are made by `clone`, which is looked at more closely;
# `clone3` hides its flags from a filter, and the C library goes back to `clone` without it.
_DENIED = {
    "x86_64": {
        "socket": 41, "connect": 42, "sendto": 44, "bind": 49, "fork": 57, "vfork": 58, "execve": 59,
        "kill": 62, "ptrace": 101, "mount": 165, "tkill": 200, "add_key": 248, "request_key": 249,
        "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "bpf": 321, "execveat": 322, "userfaultfd": 323,
        "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434, "pidfd_getfd": 438,
    },
    "aarch64": {
        "mount": 40, "unshare": 97, "ptrace": 117, "kill": 129, "tkill": 130, "socket": 198, "bind": 200,
        "connect": 203, "sendto": 206, "add_key": 217, "request_key": 218, "keyctl": 219, "execve": 221,
        "perf_event_open": 241, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
        "bpf": 280, "execveat": 281, "userfaultfd": 282, "pidfd_send_signal": 424,
        "io_uring_setup": 425, "pidfd_open": 434, "pidfd_getfd": 438,
    },
}  # fmt: skip
_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
_LOAD, _EQUALS, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

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
    if platform.machine() in _DENIED:
        _forbid_calls(platform.machine())


def landlock_version() -> int:
    """0 where the kernel has none, or has it switched off."""
    return int(max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)))


def filters_calls() -> bool:
    """A filter that is nowhere is refused for its address where filters are known."""
    refused = _libc.prctl(_PR_SET_SECCOMP, 2, None, 0, 0) == -1 and ctypes.get_errno() == errno.EFAULT
    return platform.machine() in _DENIED and refused


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


def _forbid_calls(machine: str) -> None:
    steps = b"".join(_filter(machine))
    kept = ctypes.create_string_buffer(steps, len(steps))
    # struct sock_fprog: how many, and where.
    program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(kept))
    done = _libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0)
    # A kernel that was built without filters says so; the other walls stand.
    _require(done == 0 or ctypes.get_errno() == errno.EINVAL, "the filter of system calls")


def _filter(machine: str) -> Iterator[bytes]:
    """A program of the kernel's packet filter: a call's number decides, and for `clone` its flags."""
    yield _step(_LOAD, _ARCH)
    yield _step(_EQUALS, _ARCHES[machine], then=1)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, _NUMBER)
    yield from _answer(_AT_LEAST, _X32, _KILL)
    yield from _answer(_EQUALS, _CLONE3, _ERRNO | errno.ENOSYS)
    for number in sorted(_DENIED[machine].values()):
        yield from _answer(_EQUALS, number, _ERRNO | errno.EPERM)
    yield _step(_EQUALS, _CLONE[machine], then=1)
    yield _step(_RETURN, _ALLOW)
    yield _step(_LOAD, _FIRST_ARGUMENT)
    yield from _answer(_HAS_BIT, _CLONE_THREAD, _ALLOW)
    yield _step(_RETURN, _ERRNO | errno.EPERM)


def _answer(question: int, value: int, answer: int) -> tuple[bytes, bytes]:
    return _step(question, value, otherwise=1), _step(_RETURN, answer)


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def _require(held: bool, what: str) -> None:
    if not held:
        raise OSError(ctypes.get_errno(), f"{what} cannot be put up: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
