"""REST twins of the memory tools."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from engram.api.errors import ErrorReply
from engram.api.services import Services
from engram.api.tools import TOOLS, QueryArguments, StoreArguments
from engram.gateway.memory_query import QueryReply
from engram.gateway.store_reply import StoreReply

routes = APIRouter(prefix="/memory", tags=["memory"])

_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 403, 413, 415, 421, 500, 503)
}


@routes.post("/store", response_model=StoreReply, responses=_FAILURES)
async def store(request: Request, asked: StoreArguments) -> Response:
    return await _run(request, "memory_store", asked)


@routes.post("/query", response_model=QueryReply, responses=_FAILURES)
async def query(request: Request, asked: QueryArguments) -> Response:
    return await _run(request, "memory_query", asked)


async def _run(request: Request, name: str, asked: Any) -> Response:
    services: Services = request.app.state.services
    tool = TOOLS[name]
    return JSONResponse(tool.dump(await tool.run(services, asked)))
