"""Hooks for schemathesis: most of the requests that keep to the schema also make sense.

By the schema alone a space is any string and a key may come twice: nearly every
call would end at the first check, and no reply would be worth looking at. A
third of those requests, and all that break the schema, stay as they were made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import schemathesis

_numbers = itertools.count(1)


def _one_of(values: Sequence[Any]) -> Callable[[], Any]:
    """Each in turn, so that a run can be repeated."""
    turns: Iterator[Any] = itertools.cycle(values)
    return lambda: next(turns)


# By argument; for those that are strings, and those that are lists of them.
SENSIBLE: dict[str, Callable[[], Any]] = {
    "actor_user_id": _one_of(["ada", "ada", None, "ada", "李"]),
    "target_space": _one_of([None, "private:ada", "team:default", "org:all", "nowhere"]),
    "spaces": _one_of([None, ["team:default"], ["team:default", "org:all"]]),
    "project_key": _one_of([None, "default"]),
    "idempotency_key": lambda: f"key-{next(_numbers) // 2}",
    "since": _one_of([None, "24h", "7d", "2026-01-30", "2026-01-30T10:00:00Z"]),
    "evidence_refs": _one_of([None, [], ["mr://project/123"]]),
    "policy_json": _one_of([None, {}, {"max_chars": 50}]),
    "encoding": _one_of(["utf-8"]),
    "skip": _one_of([[], ["redis"]]),
    "file": lambda: f"# Part {next(_numbers)}\n\nWho may settle a row?".encode(),
}
# What replies named, to be asked for again.
LEARNT: dict[str, Any] = {
    "uri": f"memory://attachments/1/{'0' * 64}",
    "memory_id": "m",
    "outbox_id": 1,
    "item_id": None,
}
# The same, for what stands in paths.
IN_PATHS = {"taskId": "", "documentId": ""}
NEVER_BLANK = (
    "payload_md",
    "query",
    "content",
    "content_md",
    "title",
    "item_type",
    "event_type",
    "kind",
    "name",
    "text",
)


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    made = case.meta.generation.mode if case.meta else None
    if made is not schemathesis.GenerationMode.POSITIVE or next(_numbers) % 3 == 0:
        return
    if isinstance(case.body, dict):
        case.body = _sensible(case.body)
        case.headers.pop("Idempotency-Key", None)
    for name in IN_PATHS.keys() & case.path_parameters.keys():
        if IN_PATHS[name]:
            case.path_parameters[name] = IN_PATHS[name]
    if "since" in case.query:
        case.query["since"] = SENSIBLE["since"]() or "24h"


@schemathesis.hook
def after_call(
    context: schemathesis.HookContext, case: schemathesis.Case, response: schemathesis.Response
) -> None:
    if response.status_code in (200, 201, 202) and case.method == "POST":
        reply = response.json()
        LEARNT.update({name: reply[name] for name in LEARNT if reply.get(name) is not None})
        IN_PATHS.update({name: reply[name] for name in IN_PATHS if reply.get(name) is not None})


def _sensible(body: dict[str, Any]) -> dict[str, Any]:
    changed = {name: SENSIBLE[name]() if name in SENSIBLE else value for name, value in body.items()}
    changed.update({name: value for name, value in LEARNT.items() if name in body})
    for name in NEVER_BLANK:
        if isinstance(changed.get(name), str) and not changed[name].strip():
            changed[name] = f"word {next(_numbers)}"
    if "memory_id" in changed and "outbox_id" in changed:
        del changed["memory_id" if next(_numbers) % 2 else "outbox_id"]
    return changed
