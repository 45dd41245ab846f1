"""Checks of what a caller sent, gathered so that one error names everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engram.gateway.spaces import Space, parse_space
from engram.kernel.content import why_unstorable
from engram.kernel.errors import InputError

MAX_JSON_BYTES = 32_768


def refuse(wrong: Mapping[str, str | None]) -> None:
    """Raise an `InputError` that names each argument with a problem, if there is one."""
    problems = {name: problem for name, problem in wrong.items() if problem}
    if problems:
        raise InputError("; ".join(f"{k} {v}" for k, v in problems.items()), fields=problems)


def text_problem(text: str, most: int, *, may_be_empty: bool = False) -> str | None:
    if not may_be_empty and not text.strip():
        return "must not be empty"
    if len(text) > most:
        return f"has {len(text)} characters; the limit is {most}"
    return why_unstorable(text)


def json_problem(value: Mapping[str, Any]) -> str | None:
    if problem := why_unstorable(value):
        return problem
    size = len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    return f"has {size} bytes; the limit is {MAX_JSON_BYTES}" if size > MAX_JSON_BYTES else None


def number_problem(number: int, low: int, high: int) -> str | None:
    return None if low <= number <= high else f"must be between {low} and {high}"


def actor_problem(actor: str) -> str | None:
    if parse_space(f"private:{actor}") is None:
        return "must be 1 to 128 characters without spaces"
    return why_unstorable(actor)


def project_space(project_key: str) -> Space:
    """The space whose readers see a project, and whose settings govern it."""
    space = parse_space(f"team:{project_key}")
    if space is None:
        raise InputError(
            "project_key is no project",
            fields={"project_key": "must be 1 to 128 characters without spaces"},
        )
    return space
