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
    "making.after_row": "the sandbox has its row, its folder is not made yet",
    "making.after_folder": "the sandbox's folder is made, its row does not say so yet",
    "making.after_ready": "the sandbox is ready, whoever asked for it without a key does not know yet",
    "service.after_delete": "the sandbox's row says deleted, its folder is still there",
    "reaper.after_expire": "rows say expired, their folders are still there",
    "idempotency.after_reserve": "the key is reserved, the effect has not begun",
    "idempotency.before_save": "the effect is done, its answer is not stored",
    "idempotency.after_save": "the answer is stored, the reply has not left",
    "outbox_worker.after_claim": "rows are leased, none is delivered",
    "outbox_worker.after_renew": "leases are renewed, none of the rows is delivered",
    "outbox_worker.after_call": "the memory server has the memory, the row is not settled",
    "outbox_worker.after_settle": "rows and their audits are settled, the batch is not over",
    "git.after_fetch": "the mirror has the new commits, no row is written",
    "sync.after_page": "a page of rows is committed, the pass is not over",
    "sync.after_watermark": "the watermark is moved, the run is not closed",
    "patches.after_bytes": "a patch is in the artifact store, no row names it",
    "scm_consumer.after_candidate": "the candidate is kept, the memory is not stored",
    "scm_consumer.after_store": "the memory is stored or parked, the cursor is not moved",
    "pipeline.after_batch": "a batch of a document's passages is written, others are not",
    "vectors.after_fill": "a batch of texts has its vectors, others still wait for theirs",
    "uploads.after_bytes": "a document's bytes are kept, nothing refers to them yet",
    "uploads.after_rows": "document and task are written, the task is not on the stream",
    "uploads.after_put": "the task is on the stream, its row does not say so yet",
    "ingest_worker.after_take": "entries are read from the stream, none of their tasks is started",
    "ingest_worker.after_start": "tasks are leased, none has begun",
    "ingest_worker.after_work": "a document's segments are written, its task is not settled",
    "ingest_worker.before_ack": "tasks are settled, their entries are still pending",
    "ingest_worker.after_ack": "tasks are settled and their entries are off the stream",
    "publisher.after_claim": "lanes are leased, none of their events is sent",
    "publisher.after_publish": "the broker has the events, their rows do not say so",
    "publisher.after_settle": "events are settled, the batch is not over",
    "sweeper.after_put": "tasks are on the stream anew, their rows do not say so yet",
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
