"""Every error engram raises, in one tree.

    EngramError
    ├── ConfigError               a setting is missing, malformed or unknown
    ├── InputError                the caller sent something that cannot be accepted
    │   ├── OutboxInvalid         ... found when a write was about to be parked
    │   ├── UriError              a URI, key or reference outside the grammar
    │   └── ArtifactTooLarge      more bytes than may be kept
    ├── AccessError               the request may not be served
    │   ├── Unauthenticated       no or unknown token
    │   ├── Forbidden             known caller, not allowed to do this
    │   └── GuardRefused          wrong Host, Origin, content type or size
    ├── NotFound                  no such thing, or not yours
    ├── StateConflict             the thing is not in a state that allows this
    │   ├── IdempotencyMismatch       the key stands for another request
    │   ├── IdempotencyInProgress     the first request with this key is running (retryable)
    │   └── IdempotencyOutcomeUnknown it ended without an answer and must not run twice
    ├── DatabaseError             PostgreSQL said no
    │   ├── DatabaseUnavailable   no connection, or it broke         (retryable)
    │   ├── DatabaseTimeout       a statement or lock took too long  (retryable)
    │   ├── DatabaseContention    deadlock or serialisation failure  (retryable)
    │   └── ConstraintViolated    a CHECK, UNIQUE or foreign key
    ├── ArtifactError             the artifact store is full or broken     (retryable)
    │   └── ArtifactCorrupt       bytes that are not the ones put there
    ├── SchemaError               the database's schema is not this code's
    ├── EmbeddedError             an embedded PostgreSQL or Redis cannot be run
    ├── GatewayUnavailable        no gateway answers where one should        (retryable)
    ├── RedisUnavailable          Redis does not answer, or not to us        (retryable)
    ├── EmbeddingFailed           text could not be made a vector (`retryable` says if it may be later)
    ├── BackendError              the memory server failed (see its attributes)
    ├── AuditWriteFailed          the audit row of a write could not be written
    └── OutboxEnqueueFailed       a write could not be parked

Whether a failure is worth another try is an attribute of the error
(`retryable`), decided where the error is made. Nothing in engram looks for
words in a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """The `error_code` of a reply: stable, for programs."""

    CONFIG_INVALID = "CONFIG_INVALID"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    REQUEST_REFUSED = "REQUEST_REFUSED"
    NOT_FOUND = "NOT_FOUND"
    STATE_CONFLICT = "STATE_CONFLICT"
    DATABASE_ERROR = "DATABASE_ERROR"
    DATABASE_UNAVAILABLE = "DATABASE_UNAVAILABLE"
    DATABASE_TIMEOUT = "DATABASE_TIMEOUT"
    CONSTRAINT_VIOLATED = "CONSTRAINT_VIOLATED"
    SCHEMA_MISMATCH = "SCHEMA_MISMATCH"
    EMBEDDED_FAILED = "EMBEDDED_FAILED"
    GATEWAY_UNAVAILABLE = "GATEWAY_UNAVAILABLE"
    REDIS_UNAVAILABLE = "REDIS_UNAVAILABLE"
    EMBEDDING_FAILED = "EMBEDDING_FAILED"
    BACKEND_FAILED = "BACKEND_FAILED"
    ARTIFACT_FAILED = "ARTIFACT_FAILED"
    ARTIFACT_CORRUPT = "ARTIFACT_CORRUPT"
    ARTIFACT_TOO_LARGE = "ARTIFACT_TOO_LARGE"
    IDEMPOTENCY_MISMATCH = "conflict"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    IDEMPOTENCY_OUTCOME_UNKNOWN = "idempotency_outcome_unknown"
    AUDIT_WRITE_FAILED = "AUDIT_WRITE_FAILED"
    OUTBOX_ENQUEUE_FAILED = "OUTBOX_ENQUEUE_FAILED"
    OUTBOX_DEDUP_HIT = "OUTBOX_DEDUP_HIT"
    OUTBOX_VALIDATION_FAILED = "OUTBOX_VALIDATION_FAILED"
    INTERNAL = "INTERNAL"


class EngramError(Exception):
    """A failure with a code for programs, a message for people and a next step."""

    code: ErrorCode = ErrorCode.INTERNAL
    http_status: int = 500
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context: dict[str, Any] = dict(context or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(EngramError):
    code = ErrorCode.CONFIG_INVALID


class InputError(EngramError):
    """`fields` maps each offending argument to what is wrong with it."""

    code = ErrorCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, message: str, *, fields: Mapping[str, str] | None = None, **kw: Any) -> None:
        super().__init__(message, **kw)
        if fields:
            self.context["fields"] = dict(fields)


class OutboxInvalid(InputError):
    code = ErrorCode.OUTBOX_VALIDATION_FAILED


class UriError(InputError):
    """Outside the grammar. The message shows the offender in ASCII, cut short."""


class ArtifactTooLarge(InputError):
    code = ErrorCode.ARTIFACT_TOO_LARGE
    http_status = 413


class AccessError(EngramError):
    http_status = 403
    code = ErrorCode.FORBIDDEN


class Unauthenticated(AccessError):
    code = ErrorCode.UNAUTHENTICATED
    http_status = 401


class Forbidden(AccessError):
    pass


class GuardRefused(AccessError):
    """Refused before authentication and before the body was read."""

    code = ErrorCode.REQUEST_REFUSED

    def __init__(self, message: str, *, http_status: int = 403, **kw: Any) -> None:
        super().__init__(message, **kw)
        self.http_status = http_status


class NotFound(EngramError):
    code = ErrorCode.NOT_FOUND
    http_status = 404


class StateConflict(EngramError):
    code = ErrorCode.STATE_CONFLICT
    http_status = 409


class IdempotencyMismatch(StateConflict):
    """The key stands for another request. The stored answer is not shown."""

    code = ErrorCode.IDEMPOTENCY_MISMATCH


class IdempotencyInProgress(StateConflict):
    """The first request with this key is still running; ask again in `retry_after` seconds."""

    code = ErrorCode.IDEMPOTENCY_IN_PROGRESS
    retryable = True

    def __init__(self, message: str, *, retry_after: int = 1, **kw: Any) -> None:
        super().__init__(message, **kw)
        self.retry_after = retry_after
        self.context["retry_after"] = retry_after


class IdempotencyOutcomeUnknown(StateConflict):
    """An earlier try ended without an answer, and this operation must not run twice."""

    code = ErrorCode.IDEMPOTENCY_OUTCOME_UNKNOWN


class ArtifactError(EngramError):
    """The store could not do its part: full, not writable, tampered with."""

    code = ErrorCode.ARTIFACT_FAILED
    http_status = 503
    retryable = True


class ArtifactCorrupt(ArtifactError):
    """The bytes under a key are not the ones that were put there."""

    code = ErrorCode.ARTIFACT_CORRUPT
    http_status = 500
    retryable = False


class DatabaseError(EngramError):
    code = ErrorCode.DATABASE_ERROR


class DatabaseUnavailable(DatabaseError):
    code = ErrorCode.DATABASE_UNAVAILABLE
    http_status = 503
    retryable = True


class DatabaseTimeout(DatabaseError):
    code = ErrorCode.DATABASE_TIMEOUT
    http_status = 503
    retryable = True


class DatabaseContention(DatabaseError):
    http_status = 503
    retryable = True


class ConstraintViolated(DatabaseError):
    """`constraint` names the rule of the schema that refused the row."""

    code = ErrorCode.CONSTRAINT_VIOLATED
    http_status = 409

    def __init__(self, message: str, *, constraint: str | None = None, **kw: Any) -> None:
        super().__init__(message, **kw)
        self.constraint = constraint


class SchemaError(EngramError):
    code = ErrorCode.SCHEMA_MISMATCH
    http_status = 503


class EmbeddedError(EngramError):
    code = ErrorCode.EMBEDDED_FAILED


class GatewayUnavailable(EngramError):
    """What a client of the gateway says when it gets no answer, or one that is not engram's."""

    code = ErrorCode.GATEWAY_UNAVAILABLE
    http_status = 503
    retryable = True


class RedisUnavailable(EngramError):
    code = ErrorCode.REDIS_UNAVAILABLE
    http_status = 503
    retryable = True


class EmbeddingFailed(EngramError):
    code = ErrorCode.EMBEDDING_FAILED
    http_status = 502

    def __init__(self, message: str, *, retryable: bool = True, **kw: Any) -> None:
        super().__init__(message, **kw)
        self.retryable = retryable


class BackendError(EngramError):
    """The memory server did not do what was asked.

    reason     one word for audits and metrics (`connection`, `timeout`, ...)
    retryable  another try may succeed
    outage     it says nothing about this memory: the server cannot be reached
               or will not talk to us, so the try does not count
    ambiguous  the server may have applied the write before failing
    """

    code = ErrorCode.BACKEND_FAILED
    http_status = 502

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        retryable: bool,
        outage: bool = False,
        ambiguous: bool = False,
        retry_after: float | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(message, **kw)
        self.reason = reason
        self.retryable = retryable
        self.outage = outage
        self.ambiguous = ambiguous
        self.retry_after = retry_after


class AuditWriteFailed(EngramError):
    code = ErrorCode.AUDIT_WRITE_FAILED
    http_status = 503
    retryable = True


class OutboxEnqueueFailed(EngramError):
    code = ErrorCode.OUTBOX_ENQUEUE_FAILED
    http_status = 503
    retryable = True
