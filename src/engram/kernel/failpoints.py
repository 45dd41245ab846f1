"""Named places where a process can be made to kill itself.

`ENGRAM_FAILPOINT=<name>` makes the process send itself SIGKILL the first time
it reaches that place; `<name>:3` the third time. Nothing is cleaned up: that
is the point. A crash test starts the real command with one of these names and
checks that the process died of it, so a failpoint that was never reached
cannot pass for a crash that was survived.
"""

from __future__ import annotations

import os
import signal

from engram.kernel.errors import ConfigError

VARIABLE = "ENGRAM_FAILPOINT"

FAILPOINTS: dict[str, str] = {
    "memory_store.before_intent": "the request is valid, nothing is written yet",
    "memory_store.after_intent": "commit one is done, the memory server was not called",
    "memory_store.after_call": "the memory server has answered, commit two is not done",
    "memory_store.before_park": "the memory server failed, the write is not parked yet",
    "memory_store.after_final": "commit two is done, the reply has not left",
    "memory_forget.before_forget": "the request is valid and allowed, nothing is written yet",
    "memory_forget.after_forget": "the memory is unreadable, its copy is still in the memory server",
    "erasing.after_lease": "the erasing is leased, the copy is still in the memory server",
    "erasing.after_delete": "the copy is deleted, that is not recorded yet",
    "reconcile_outbox.after_park": "an abandoned write is parked, the rest is not looked at yet",
    "reconcile_outbox.after_repair": "missing audits are written, stale locks are not looked at yet",
    "evidence.after_bytes": "the bytes are in the artifact store, nothing refers to them yet",
    "idempotency.after_reserve": "the key is reserved, the effect has not begun",
    "idempotency.before_save": "the effect is done, its answer is not stored",
    "idempotency.after_save": "the answer is stored, the reply has not left",
    "outbox_worker.after_claim": "rows are leased, none is delivered",
    "outbox_worker.after_renew": "leases are renewed, none of the rows is delivered",
    "outbox_worker.after_call": "the memory server has the memory, the row is not settled",
    "outbox_worker.after_settle": "rows and their audits are settled, the batch is not over",
    "vectors.after_fill": "a batch of memories has its vectors, others still wait for theirs",
}


def _parse(value: str) -> tuple[str, int]:
    name, _, count = value.partition(":")
    if name not in FAILPOINTS:
        raise ConfigError(
            f"{VARIABLE}: there is no failpoint {name!r}",
            hint="known: " + ", ".join(FAILPOINTS),
        )
    if count and not (count.isdigit() and int(count) > 0):
        raise ConfigError(f"{VARIABLE}: {value!r} has a bad count", hint=f"e.g. {name}:3")
    return name, int(count or 1)


class _Armed:
    def __init__(self, value: str) -> None:
        self.name, self.left = _parse(value)

    def reach(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


_armed: _Armed | None = None


def arm_from_environment() -> None:
    """Called once by the command line; an unknown name is refused there."""
    global _armed
    value = os.environ.get(VARIABLE)
    _armed = _Armed(value) if value else None


def failpoint(name: str) -> None:
    """Mark a place. Costs one comparison when nothing is armed."""
    if _armed is not None:
        if name not in FAILPOINTS:
            raise AssertionError(f"undeclared failpoint {name!r}")
        _armed.reach(name)
