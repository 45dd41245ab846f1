"""Takes system calls away from this process and all that it starts, for good.

    seccomp.install([Call("socket"), Call("prlimit64", unless={0: 0})])

It holds for the calling thread and those that it starts from then on, so it is called
while there is one; `every_thread` adds to what is refused later, for all of them.
Needs no right and no library; imports nothing of ours, so that small helper processes
may use it.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

# By name: x86-64, ARM64 (None: it has no such call).
_NUMBERS: Mapping[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bind": (49, 200), "bpf": (321, 280),
    "chmod": (90, None), "chown": (92, None), "chroot": (161, 51), "clock_settime": (227, 112),
    "clone": (56, 220), "clone3": (435, 435), "connect": (42, 203), "delete_module": (176, 106),
    "execve": (59, 221), "execveat": (322, 281), "fanotify_init": (300, 262), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "fcntl": (72, 25), "finit_module": (313, 273), "fork": (57, None), "fremovexattr": (199, 16),
    "fsetxattr": (190, 7), "fsopen": (430, 430), "futimesat": (261, None), "init_module": (175, 105),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30), "kexec_load": (246, 104), "keyctl": (250, 219), "kill": (62, 129),
    "lchown": (94, None), "lremovexattr": (198, 15), "lsetxattr": (189, 6), "memfd_create": (319, 279),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186), "msgrcv": (70, 188),
    "msgsnd": (69, 189), "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "prctl": (157, 167),
    "prlimit64": (302, 261), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "reboot": (169, 142), "removexattr": (197, 14), "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "semctl": (66, 191), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "seccomp": (317, 277), "sendto": (44, 206), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "setpriority": (141, 140), "settimeofday": (164, 170), "setxattr": (188, 5), "shmat": (30, 196),
    "shmctl": (31, 195), "shmget": (29, 194), "socket": (41, 198), "swapoff": (168, 225), "swapon": (167, 224),
    "syslog": (103, 116), "tgkill": (234, 131), "tkill": (200, 130), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, None), "utimensat": (280, 88),
    "utimes": (235, None), "vfork": (58, None),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# From here on come the numbers of x32, a second set for the same calls.
_X32 = 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_FILTER = 2
_SET_FILTER, _EVERY_THREAD = 1, 1
_LOAD, _EQUALS, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_libc = ctypes.CDLL(None, use_errno=True)


class Call(NamedTuple):
    """A call that is refused.

    `unless`: it is let through when each of these arguments has its value, or, with `bit`,
    has that bit. `when`: it is refused only when the argument has one of the values. Only
    the lower half of an argument is looked at: all that is asked about is no longer.
    """

    name: str
    unless: Mapping[int, int] | None = None
    bit: bool = False
    when: tuple[int, tuple[int, ...]] | None = None
    error: int = errno.EPERM


def install(calls: Iterable[Call], *, every_thread: bool = False) -> bool:
    """Refuse these from now on; False: this kernel or this machine has no filters."""
    known = _MACHINES.get(platform.machine())
    if known is None:
        return False
    column, machine = known
    numbered = [(call, _NUMBERS[call.name][column]) for call in calls]
    steps = b"".join(_program([(call, at) for call, at in numbered if at is not None], machine))
    kept = ctypes.create_string_buffer(steps, len(steps))
    # struct sock_fprog: how many, and where.
    program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(kept))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if every_thread:
        done = _libc.syscall(_NUMBERS["seccomp"][column], _SET_FILTER, _EVERY_THREAD, program)
    else:
        done = _libc.prctl(_PR_SET_SECCOMP, _FILTER, program, 0, 0)
    if done == 0:
        return True
    if done == -1 and ctypes.get_errno() == errno.EINVAL:
        return False
    raise OSError(ctypes.get_errno(), "system calls cannot be filtered")


def available() -> bool:
    """A filter that is nowhere is refused for its address where filters are known."""
    refused = _libc.prctl(_PR_SET_SECCOMP, _FILTER, None, 0, 0) == -1 and ctypes.get_errno() == errno.EFAULT
    return platform.machine() in _MACHINES and refused


def number(name: str) -> int | None:
    """A call's number on this machine."""
    known = _MACHINES.get(platform.machine())
    return _NUMBERS[name][known[0]] if known else None


def _program(calls: Iterable[tuple[Call, int]], machine: int) -> Iterator[bytes]:
    """For the kernel's packet filter. Every path through a call's own steps ends in an answer,
    so that the number is still loaded for the next call."""
    yield _step(_LOAD, _MACHINE)
    yield _step(_EQUALS, machine, then=1)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, _NUMBER)
    yield _step(_AT_LEAST, _X32, otherwise=1)
    yield _step(_RETURN, _KILL)
    for call, at in calls:
        steps = list(_judged(call))
        yield _step(_EQUALS, at, otherwise=len(steps))
        yield from steps
    yield _step(_RETURN, _ALLOW)


def _judged(call: Call) -> Iterator[bytes]:
    refuse = _step(_RETURN, _ERRNO | call.error)
    if call.when is not None:
        argument, values = call.when
        yield _argument(argument)
        for value in values:
            yield _step(_EQUALS, value, otherwise=1)
            yield refuse
        yield _step(_RETURN, _ALLOW)
        return
    wanted = list((call.unless or {}).items())
    for place, (argument, value) in enumerate(wanted, 1):
        yield _argument(argument)
        # Past the other questions and the leave to go on.
        yield _step(_HAS_BIT if call.bit else _EQUALS, value, otherwise=2 * (len(wanted) - place) + 1)
    if wanted:
        yield _step(_RETURN, _ALLOW)
    yield refuse


def _argument(place: int) -> bytes:
    return _step(_LOAD, _ARGUMENTS + 8 * place)


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
