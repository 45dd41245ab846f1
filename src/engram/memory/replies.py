"""Errors into replies, in OpenMemory's words. Nothing of an error's inside gets out.

400 invalid_input (with details)    401 unauthorized     403 forbidden, tenant_mismatch
404 not_found                       405 method_not_allowed   409 idempotency_conflict
403 origin_refused   413 too_large   415 unsupported_media_type   421 host_refused
500 internal                        503 unavailable
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from engram.kernel.errors import EngramError, ErrorCode, GuardRefused, InputError
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

_GUARDED = {403: "origin_refused", 413: "too_large", 415: "unsupported_media_type", 421: "host_refused"}
_CODES = {
    ErrorCode.UNAUTHENTICATED: "unauthorized",
    ErrorCode.FORBIDDEN: "forbidden",
    ErrorCode.NOT_FOUND: "not_found",
    ErrorCode.STATE_CONFLICT: "idempotency_conflict",
}
_STATUSES = {404: "not_found", 405: "method_not_allowed"}


def reply_to(error: EngramError) -> JSONResponse:
    """An `error` in the error's context is more exact than its class, and wins."""
    if isinstance(error, InputError):
        return JSONResponse(_invalid(error), 400)
    if isinstance(error, GuardRefused):
        body = {"error": _GUARDED[error.http_status], "message": error.message}
        return JSONResponse(body, error.http_status)
    if error.code in _CODES:
        word = error.context.get("error", _CODES[error.code])
        return JSONResponse({"error": word}, error.http_status)
    return _own_failure(error)


def reply_to_status(error: HTTPException) -> JSONResponse:
    word = _STATUSES.get(error.status_code, "refused")
    return JSONResponse({"error": word}, error.status_code, headers=error.headers)


def reply_to_unexpected(error: Exception) -> JSONResponse:
    log.error("memory.failed", extra=fields(error=type(error).__name__))
    return JSONResponse({"error": "internal"}, 500)


def _invalid(error: InputError) -> dict[str, Any]:
    problems: dict[str, str] = error.context.get("fields", {})
    details = [{"field": field, "message": message} for field, message in problems.items()]
    return {"error": "invalid_input", "message": error.message, "details": details}


def _own_failure(error: EngramError) -> JSONResponse:
    log.error("memory.failed", extra=fields(error=type(error).__name__, said=error.message))
    if error.http_status == 503:
        return JSONResponse({"error": "unavailable"}, 503)
    return JSONResponse({"error": "internal"}, 500)
