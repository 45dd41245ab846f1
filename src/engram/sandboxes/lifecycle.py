"""The states of a sandbox and the only ways between them; `rows.sql` has a guarded update for each."""

from __future__ import annotations

from engram.kernel.states import StateMachine

SANDBOX = StateMachine(
    "sandboxes",
    initial=["creating"],
    meanings={
        "creating": "reserved under its id; its folder is being made",
        "ready": "commands can run",
        "failed": "could not be made, or was left half-made; the same request makes it anew",
        "stopped": "no command runs any more; its files can still be read",
        "expired": "past its time; its files are gone",
        "deleted": "its owner is done with it; its files are gone",
    },
    transitions=[
        ("finish", "creating", "ready"),
        ("fail", "creating", "failed"),
        ("begin again", "failed", "creating"),
        ("stop", "ready", "stopped"),
        ("extend", "ready", "ready"),
        ("extend", "stopped", "stopped"),
        ("expire", "creating", "expired"),
        ("expire", "ready", "expired"),
        ("expire", "stopped", "expired"),
        ("delete", "creating", "deleted"),
        ("delete", "ready", "deleted"),
        ("delete", "failed", "deleted"),
        ("delete", "stopped", "deleted"),
        ("delete", "expired", "deleted"),
    ],
)

# A sandbox that may have a folder, and counts against its owner's limit.
ALIVE = ("creating", "ready", "stopped")
