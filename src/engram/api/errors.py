"""One shape for every error:

{"success": false, "error_code", "message", "correlation_id", "context": {...}}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match

from engram.kernel import correlation
from engram.kernel.errors import (
    EngramError,
    ErrorCode,
    IdempotencyInProgress,
    InputError,
    LimitReached,
    Unauthenticated,
)
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_BY_STATUS = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.REQUEST_REFUSED}


class ErrorReply(BaseModel):
    """What any call answers when it fails."""

    success: bool = False
    error_code: str
    message: str
    correlation_id: str
    context: dict[str, Any] = {}


def envelope(code: str, message: str, context: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "success": False,
        "error_code": str(code),
        "message": message,
        "correlation_id": correlation.current_or_new(),
        "context": context or {},
    }


def envelope_of(error: EngramError) -> dict[str, Any]:
    return envelope(error.code, str(error), error.context)


def reply_to(error: EngramError) -> JSONResponse:
    if error.http_status >= 500:
        log.error("request.failed", extra=fields(code=error.code, error=error.message))
    headers = {}
    if isinstance(error, IdempotencyInProgress | LimitReached):
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(envelope_of(error), error.http_status, headers=headers)


def invalid_arguments(error: ValidationError | RequestValidationError) -> InputError:
    """Names each wrong field; never repeats the value, which may be private."""
    problems = {_field(e): e["msg"] for e in error.errors()}
    said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    return InputError(f"invalid arguments: {said}", fields=problems)


def unexpected(error: Exception) -> EngramError:
    log.error("request.crashed", exc_info=error)
    return EngramError("an internal error; the log has it under this correlation id")


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(EngramError)
    async def engram_error(request: Request, error: EngramError) -> JSONResponse:
        return reply_to(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return reply_to(invalid_arguments(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = _BY_STATUS.get(error.status_code, ErrorCode.REQUEST_REFUSED)
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        return JSONResponse(envelope(code, str(error.detail)), error.status_code, headers=headers)


def _allowed(request: Request) -> str:
    """Every method that the path takes: two routes may share one, and each knows only its own."""
    routes = request.app.routes
    asked = [(method, {**request.scope, "method": method}) for method in METHODS]
    taken = [m for m, scope in asked if any(route.matches(scope)[0] is Match.FULL for route in routes)]
    return ", ".join(taken)


def _field(problem: Mapping[str, Any]) -> str:
    """What is no JSON at all is located by its character; that is no field."""
    location = () if problem["type"] == "json_invalid" else problem["loc"]
    named = [str(part) for part in location if part != "body"]
    return ".".join(named) or "body"
