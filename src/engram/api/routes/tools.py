"""REST twins of the tools: one route for each, made from the same table as the MCP tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Request
from starlette.responses import JSONResponse, Response

from engram.api.caller import caller_of
from engram.api.errors import ErrorReply
from engram.api.services import Services
from engram.api.tools import TOOLS, Arguments, Tool, WriteArguments, perform
from engram.api.tools.base import KEY_SHAPE
from engram.kernel.errors import InputError

FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 409, 413, 415, 421, 500, 503)
}


@cache
def twins() -> APIRouter:
    """The same for every app of a process: reading the models takes a tenth of a second."""
    routes = APIRouter()
    for tool in TOOLS.values():
        routes.add_api_route(
            tool.path,
            _writing(tool) if issubclass(tool.arguments, WriteArguments) else _reading(tool),
            methods=["POST"],
            name=tool.name,
            summary=tool.title,
            description=tool.description,
            tags=[tool.path.split("/")[1]],
            response_model=tool.result,
            responses=FAILURES,
        )
    return routes


def _reading(tool: Tool) -> Callable[..., Awaitable[Response]]:
    async def route(request: Request, asked: Any) -> Response:
        return await run(request, tool, asked)

    # FastAPI reads the arguments' model from the annotation.
    route.__annotations__["asked"] = Annotated[tool.arguments, Body()]
    return route


def _writing(tool: Tool) -> Callable[..., Awaitable[Response]]:
    async def route(request: Request, asked: Any, idempotency_key: Any = None) -> Response:
        return await run(request, tool, _with_key(asked, idempotency_key))

    route.__annotations__["asked"] = Annotated[tool.arguments, Body()]
    key = Header(alias="Idempotency-Key", json_schema_extra=KEY_SHAPE)
    route.__annotations__["idempotency_key"] = Annotated[str | None, key]
    return route


def _with_key(asked: WriteArguments, header: str | None) -> WriteArguments:
    """The key may stand in the header or in the body."""
    if header is None:
        return asked
    if asked.idempotency_key not in (None, header):
        raise InputError(
            "the header and the body have different idempotency keys",
            fields={"idempotency_key": "differs from the Idempotency-Key header"},
        )
    return asked.model_copy(update={"idempotency_key": header})


async def run(request: Request, tool: Tool, asked: Arguments) -> Response:
    services: Services = request.app.state.services
    answer = await perform(services, tool, asked, caller_of(request.scope))
    return JSONResponse(answer.body, answer.status_code, headers=answer.headers)
