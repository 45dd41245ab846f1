"""REST twins of the memory tools."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.responses import JSONResponse, Response

from engram.api.errors import ErrorReply
from engram.api.services import Services
from engram.api.tools import TOOLS, QueryArguments, StoreArguments, perform
from engram.gateway.memory_query import QueryReply
from engram.gateway.store_reply import StoreReply
from engram.kernel.errors import InputError

routes = APIRouter(prefix="/memory", tags=["memory"])

_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 403, 409, 413, 415, 421, 500, 503)
}


@routes.post("/store", response_model=StoreReply, responses=_FAILURES)
async def store(
    request: Request,
    asked: StoreArguments,
    idempotency_key: Annotated[str | None, Header(alias="Idempotency-Key")] = None,
) -> Response:
    """`Idempotency-Key` may stand in the header or in the body."""
    if idempotency_key is not None:
        if asked.idempotency_key not in (None, idempotency_key):
            raise InputError(
                "the header and the body have different idempotency keys",
                fields={"idempotency_key": "differs from the Idempotency-Key header"},
            )
        asked = asked.model_copy(update={"idempotency_key": idempotency_key})
    return await _run(request, "memory_store", asked)


@routes.post("/query", response_model=QueryReply, responses=_FAILURES)
async def query(request: Request, asked: QueryArguments) -> Response:
    return await _run(request, "memory_query", asked)


async def _run(request: Request, name: str, asked: Any) -> Response:
    services: Services = request.app.state.services
    answer = await perform(services, TOOLS[name], asked)
    return JSONResponse(answer.body, answer.status_code, headers=answer.headers)
