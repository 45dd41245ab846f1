"""The supervisor of a command by itself, in a process of its own: it ends all that is below it."""

from __future__ import annotations

import subprocess
import sys

CANNOT_WATCH = """
import socket, subprocess
from engram.sandboxes.sandlock_helper import Supervisor

class Process:
    def kill(self):
        command.kill()
        command.wait()
        supervisor.done.set()

line, other = socket.socketpair()
command = subprocess.Popen(["sleep", "60"])
supervisor = Supervisor({"timeout_seconds": 60}, line)  # without what it would look at
supervisor._watch(Process())
print(command.returncode)
"""


def test_a_command_that_cannot_be_watched_is_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CANNOT_WATCH], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.stdout, done.stderr) == ("-9\n", "")
