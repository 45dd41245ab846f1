"""The error tree: complete, drawn as it is, and each class usable by a program."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from engram.kernel import errors
from engram.kernel.errors import BackendError, EngramError, ErrorCode, GuardRefused

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, EngramError) and value.__module__ == errors.__name__
]
ARGUMENTS: dict[type[EngramError], dict[str, Any]] = {BackendError: {"reason": "timeout", "retryable": True}}


ASK_LATER = (errors.IdempotencyInProgress, errors.LimitReached)


def made(kind: type[EngramError]) -> EngramError:
    return kind("it broke", **ARGUMENTS.get(kind, {}))


def drawn_tree() -> dict[str, str]:
    """Child -> parent, as the docstring's picture has it."""
    parents: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"(?P<indent>[\s│├└─]*)(?P<name>[A-Z]\w+)\b", line):
            depth = len(match["indent"]) // 4
            if depth == 1 or match["indent"].endswith("── "):
                above[depth] = match["name"]
                if depth > 1:
                    parents[match["name"]] = above[depth - 1]
    return parents


def test_the_drawn_tree_is_the_tree() -> None:
    real = {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES if kind is not EngramError}
    assert drawn_tree() == real


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_says_what_a_caller_needs(kind: type[EngramError]) -> None:
    error = made(kind)
    assert isinstance(error.code, ErrorCode)
    assert 400 <= error.http_status < 600
    assert isinstance(error.retryable, bool)
    assert str(error) == error.message == "it broke"
    assert error.hint is None
    assert error.context == ({"retry_after": 1} if kind in ASK_LATER else {})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_only_what_is_not_the_callers_fault_is_retryable(kind: type[EngramError]) -> None:
    """A 4xx repeated as it is fails as it did; a retryable failure says so by its status too."""
    error = made(kind)
    if kind in ASK_LATER:
        assert error.retryable, "asking again is what it is for"
        return
    if error.retryable:
        assert error.http_status in (502, 503)
    if error.http_status < 500:
        assert not error.retryable


def test_codes_are_their_own_names_and_each_is_spelled_once() -> None:
    """Those of document 001 are the specification's own words."""
    of_idempotency = {"conflict", "idempotency_in_progress", "idempotency_outcome_unknown"}
    others = [code for code in ErrorCode if not code.name.startswith("IDEMPOTENCY_")]
    assert all(code.value == code.name for code in others)
    assert {code.value for code in ErrorCode} - {code.value for code in others} == of_idempotency


@pytest.mark.parametrize(
    ("kind", "code", "status", "retryable"),
    [
        (errors.EngramError, "INTERNAL", 500, False),
        (errors.ConfigError, "CONFIG_INVALID", 500, False),
        (errors.InputError, "INVALID_ARGUMENT", 400, False),
        (errors.OutboxInvalid, "OUTBOX_VALIDATION_FAILED", 400, False),
        (errors.Unauthenticated, "UNAUTHENTICATED", 401, False),
        (errors.Forbidden, "FORBIDDEN", 403, False),
        (errors.GuardRefused, "REQUEST_REFUSED", 403, False),
        (errors.NotFound, "NOT_FOUND", 404, False),
        (errors.StateConflict, "STATE_CONFLICT", 409, False),
        (errors.DatabaseUnavailable, "DATABASE_UNAVAILABLE", 503, True),
        (errors.DatabaseTimeout, "DATABASE_TIMEOUT", 503, True),
        (errors.DatabaseContention, "DATABASE_ERROR", 503, True),
        (errors.ConstraintViolated, "CONSTRAINT_VIOLATED", 409, False),
        (errors.SchemaError, "SCHEMA_MISMATCH", 503, False),
        (errors.AuditWriteFailed, "AUDIT_WRITE_FAILED", 503, True),
        (errors.OutboxEnqueueFailed, "OUTBOX_ENQUEUE_FAILED", 503, True),
    ],
)
def test_what_programs_rely_on(kind: type[EngramError], code: str, status: int, retryable: bool) -> None:
    error = made(kind)
    assert (error.code, error.http_status, error.retryable) == (code, status, retryable)


def test_the_hint_follows_the_message() -> None:
    error = errors.NotFound("no such row", hint="list them", context={"id": 7})
    assert str(error) == "no such row (list them)"
    assert error.message == "no such row"
    assert error.context == {"id": 7}


def test_the_context_is_a_copy() -> None:
    given = {"id": 7}
    error = EngramError("x", context=given)
    error.context["more"] = 1
    assert given == {"id": 7}


def test_an_input_error_names_its_fields() -> None:
    error = errors.InputError("bad", fields={"limit": "1 or more"}, context={"tool": "x"})
    assert error.context == {"tool": "x", "fields": {"limit": "1 or more"}}
    assert "fields" not in errors.InputError("bad").context


def test_a_guard_chooses_its_status_without_changing_the_class() -> None:
    assert GuardRefused("too large", http_status=413).http_status == 413
    assert GuardRefused("foreign").http_status == 403


def test_a_backend_error_carries_its_own_verdict() -> None:
    refused = BackendError("no", reason="rejected", retryable=False)
    slow = BackendError("slow", reason="timeout", retryable=True, ambiguous=True, retry_after=2.5)
    assert (refused.retryable, refused.outage, refused.ambiguous, refused.retry_after) == (
        False,
        False,
        False,
        None,
    )
    assert (slow.reason, slow.retryable, slow.ambiguous, slow.retry_after) == ("timeout", True, True, 2.5)
    assert BackendError.retryable is False


def test_a_violation_names_its_constraint() -> None:
    assert errors.ConstraintViolated("no", constraint="outbox_sha_is_hex").constraint == "outbox_sha_is_hex"
    assert errors.ConstraintViolated("no").constraint is None
