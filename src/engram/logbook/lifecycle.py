"""The states of the logbook's entities and the only ways between them.

The CHECK constraints of the schema, the guarded updates in the `.sql` files,
the diagrams of the documentation and the tests all agree with these tables.
"""

from __future__ import annotations

from engram.kernel.states import StateMachine

OUTBOX = StateMachine(
    "outbox_memory",
    initial=["pending"],
    meanings={
        "pending": "waits for a worker, or is leased by one",
        "sent": "the memory server has it",
        "dead": "given up: retries used up, or the server refused the content",
    },
    transitions=[
        ("ack_sent", "pending", "sent"),
        ("mark_dead", "pending", "dead"),
        ("fail_retry", "pending", "pending"),
        ("claim, renew, release", "pending", "pending"),
    ],
)

MEMORY = StateMachine(
    "memories",
    initial=["intent", "parked"],
    meanings={
        "intent": "audited and about to be sent to the memory server",
        "stored": "the memory server has it",
        "parked": "in the outbox",
        "forgotten": "unreadable; the content may be stored anew",
    },
    transitions=[
        ("finish_stored", "intent", "stored"),
        ("park", "intent", "parked"),
        ("ack_sent", "parked", "stored"),
        ("store again after dead", "parked", "intent"),
        ("forget", "intent", "forgotten"),
        ("forget", "stored", "forgotten"),
        ("forget", "parked", "forgotten"),
    ],
)

AUDIT = StateMachine(
    "write_audit",
    initial=["pending", "success", "redirected", "failed"],
    meanings={
        "pending": "the write's outcome is not known yet",
        "success": "final: decided and done",
        "redirected": "final: parked in the outbox",
        "failed": "final: the attempt failed",
    },
    transitions=[
        ("finish_stored", "pending", "success"),
        ("park", "pending", "redirected"),
        ("meet a parked twin", "pending", "success"),
        ("fail", "pending", "failed"),
    ],
)


IDEMPOTENCY = StateMachine(
    "idempotency_keys",
    initial=["reserved"],
    meanings={
        "reserved": "leased: the effect is running",
        "unfinished": "nobody's lease: the same request may resume it, with the same resource id",
        "completed": "the answer is stored and is what every repeat gets",
        "expired": "as if the key had never been used, until it is swept",
    },
    transitions=[
        ("renew", "reserved", "reserved"),
        ("save", "reserved", "completed"),
        ("release, or the lease runs out", "reserved", "unfinished"),
        ("resume, or renew late", "unfinished", "reserved"),
        ("TTL after the last lease", "unfinished", "expired"),
        ("TTL after completion", "completed", "expired"),
        ("reserve anew", "expired", "reserved"),
    ],
)

ACTIONS = {
    "pending": "begun; exactly while the status is pending",
    "allow": "stored",
    "redirect": "parked in the outbox, and nothing else",
    "reject": "refused by policy, or given up by the worker",
    "error": "a failed attempt",
    "dedup": "the same content was on its way already",
    "retry": "a delivery that will be tried again",
    "conflict": "a settle refused because the lease was lost",
    "stale": "a lease that nobody let go of",
}


def audit_status(action: str) -> str:
    """The status an audit has by its action; only `pending` may change later."""
    return {"pending": "pending", "redirect": "redirected", "error": "failed"}.get(action, "success")
