"""Scenarios that do not apply to engram, each with its reason. Whatever is not listed here must pass.

A scenario that is listed and passes is taken off: the test says so.
"""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "no session": "engram is stateless, so that any gateway answers any call: it hands out no session "
    "to resume, to end or to send streams to.",
    "no stream": "A reply is one JSON document. engram's tools report no progress and send no log "
    "messages while they run; what they did is in the reply and in the audit.",
    "no questions": "A stateless gateway cannot ask the client something in the middle of a call, since the "
    "answer could reach another gateway. From 2026-07-28 on questions travel in the reply, and those "
    "scenarios pass.",
    "no subscriptions": "engram has no resources of its own, and a stateless gateway could not deliver "
    "an update: to accept a subscription would be an empty promise.",
    "extension": "An optional extension, required by no revision. engram does not offer it.",
}

_2025 = {
    "logging-set-level": "no stream",
    "tools-call-with-logging": "no stream",
    "tools-call-with-progress": "no stream",
    "tools-call-sampling": "no questions",
    "tools-call-elicitation": "no questions",
    "elicitation-sep1034-defaults": "no questions",
    "elicitation-sep1330-enums": "no questions",
    "server-sse-polling": "no session",
    "server-sse-multiple-streams": "no session",
    "resources-subscribe": "no subscriptions",
    "resources-unsubscribe": "no subscriptions",
}
_TASKS = (
    "tasks-lifecycle",
    "tasks-capability-negotiation",
    "tasks-wire-fields",
    "tasks-request-state-removal",
    "tasks-mrtr-input",
    "tasks-request-headers",
    "tasks-dispatch-and-envelope",
    "tasks-status-notifications",
    "tasks-required-task-error",
    "tasks-mrtr-composition",
)

# By revision, then by scenario.
NOT_APPLICABLE: Mapping[str, Mapping[str, str]] = {
    "2025": _2025,
    "2025-11-25": {**_2025, "server-session-lifecycle": "no session"},
    "2026-07-28": {"tools-call-with-progress": "no stream", **dict.fromkeys(_TASKS, "extension")},
}
