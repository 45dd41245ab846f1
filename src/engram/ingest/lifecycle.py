"""The states of an ingest task and the only ways between them."""

from __future__ import annotations

from engram.kernel.states import StateMachine

TASK = StateMachine(
    "ingest_task",
    initial=["QUEUED"],
    meanings={
        "QUEUED": "made, and on the stream or about to be put there",
        "RUNNING": "leased by a worker that renews the lease",
        "RETRYING": "failed or handed back; runs again at next_retry_at",
        "SUCCEEDED": "every segment of the document is written",
        "DEAD": "given up: attempts used up, or a document that cannot be read",
    },
    transitions=[
        ("start", "QUEUED", "RUNNING"),
        ("start", "RETRYING", "RUNNING"),
        ("succeed", "RUNNING", "SUCCEEDED"),
        ("fail, or the lease runs out", "RUNNING", "RETRYING"),
        ("hand back", "RUNNING", "RETRYING"),
        ("last failure, or refused", "RUNNING", "DEAD"),
        ("retry by a person", "DEAD", "QUEUED"),
    ],
)

UNFINISHED = ("QUEUED", "RUNNING", "RETRYING")
FINAL = ("SUCCEEDED", "DEAD")
