"""Filters on system calls, each put up in a process of its own and tried there."""

from __future__ import annotations

import errno
import json
import platform
import signal
import subprocess
import sys

import pytest

from engram.kernel import seccomp

PROGRAM = """
import ctypes, json, sys
from engram.kernel import seccomp
from engram.kernel.seccomp import Call
assert seccomp.install(eval(sys.argv[1]))
libc = ctypes.CDLL(None, use_errno=True)
told = []
for number, *arguments in json.loads(sys.argv[2]):
    told.append(ctypes.get_errno() if libc.syscall(number, *arguments) < 0 else 0)
print(json.dumps(told))
"""
AFFINITY, PRIORITY = seccomp.number("sched_setaffinity"), seccomp.number("setpriority")
PRCTL = seccomp.number("prctl")
PR_GET_DUMPABLE, PR_GET_KEEPCAPS, PR_GET_TIMERSLACK = 3, 7, 30


def outcome(calls: str, *asked: tuple[int | None, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, calls, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def errors(calls: str, *asked: tuple[int | None, ...]) -> list[int]:
    ran = outcome(calls, *asked)
    assert ran.returncode == 0, ran.stderr
    told: list[int] = json.loads(ran.stdout)
    return told


def test_a_call_is_refused_and_others_are_not() -> None:
    assert errors("[Call('setpriority')]", (PRIORITY, 0, 0, 0), (PRCTL, PR_GET_DUMPABLE)) == [errno.EPERM, 0]


def test_it_may_say_that_there_is_no_such_call() -> None:
    assert errors("[Call('setpriority', error=38)]", (PRIORITY, 0, 0, 0)) == [errno.ENOSYS]


def test_each_of_the_arguments_must_be_harmless() -> None:
    asked = [(PRIORITY, which, who, 0) for which, who in ((0, 0), (0, 1), (1, 0), (2, 0), (1, 1))]
    told = errors("[Call('setpriority', unless={0: 0, 1: 0})]", *asked)
    assert told == [0, *[errno.EPERM] * 4]


def test_the_upper_half_of_a_process_number_is_nobodys() -> None:
    """The kernel does not look at it, so it cannot hide anything either."""
    assert errors("[Call('setpriority', unless={0: 0, 1: 0})]", (PRIORITY, 0, 1 << 32, 0)) == [0]


def test_a_bit_is_enough() -> None:
    rule = "[Call('prctl', unless={0: 1}, bit=True)]"
    assert errors(rule, (PRCTL, PR_GET_DUMPABLE), (PRCTL, PR_GET_TIMERSLACK)) == [0, errno.EPERM]


def test_some_values_alone_are_refused() -> None:
    rule = f"[Call('prctl', when=(0, ({PR_GET_DUMPABLE}, {PR_GET_KEEPCAPS})))]"
    asked = [(PRCTL, option) for option in (PR_GET_DUMPABLE, PR_GET_TIMERSLACK, PR_GET_KEEPCAPS)]
    assert errors(rule, *asked) == [errno.EPERM, 0, errno.EPERM]


def test_several_calls_each_by_its_own_rule() -> None:
    rule = (
        f"[Call('prctl', when=(0, ({PR_GET_KEEPCAPS},))), Call('setpriority', unless={{1: 0}}),"
        " Call('sched_setaffinity')]"
    )
    asked = [(AFFINITY, 0, 0, 0), (PRIORITY, 0, 1, 0), (PRIORITY, 0, 0, 0), (PRCTL, PR_GET_KEEPCAPS)]
    assert errors(rule, *asked) == [errno.EPERM, errno.EPERM, 0, errno.EPERM]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other numbers are those of x32")
def test_a_call_by_its_other_number_is_the_end() -> None:
    assert outcome("[]", (1 << 30 | (PRIORITY or 0), 0, 0, 0)).returncode == -signal.SIGSYS


def test_more_may_be_refused_later_for_threads_that_are_there() -> None:
    program = (
        "import os, threading\n"
        "from engram.kernel import seccomp\n"
        "from engram.kernel.seccomp import Call\n"
        "go, told = threading.Event(), []\n"
        "def attempt():\n"
        "    try:\n"
        "        os.setpriority(os.PRIO_PROCESS, 0, 0)\n"
        "        told.append('did it')\n"
        "    except PermissionError:\n"
        "        told.append('refused')\n"
        "older = threading.Thread(target=lambda: (attempt(), go.wait(), attempt()))\n"
        "older.start()\n"
        "while not told: pass\n"
        "assert seccomp.install([Call('setpriority')], every_thread=True)\n"
        "go.set()\n"
        "older.join()\n"
        "print(*told)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert (ran.stdout, ran.stderr) == ("did it refused\n", "")


def test_a_machine_whose_numbers_are_not_known_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not seccomp.install([seccomp.Call("socket")])
    assert not seccomp.available()
    assert seccomp.number("socket") is None


def test_this_machine_has_them() -> None:
    assert seccomp.available()
