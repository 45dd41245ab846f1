"""For whoever runs engram: alive, ready, metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from engram import __version__
from engram.api.caller import caller_of
from engram.api.routes.tools import FAILURES
from engram.api.services import Services
from engram.api.tools import call
from engram.gateway.reliability import ReliabilityReport
from engram.kernel import metrics
from engram.kernel.errors import BackendError, EngramError
from engram.logbook import governance

routes = APIRouter(tags=["operations"])


@routes.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Alive, and in which mode. Says nothing of what engram depends on: ask /readyz."""
    services: Services = request.app.state.services
    return {
        "ok": True,
        "mode": services.settings.gateway_mode,
        "version": __version__,
        "instance": services.settings.instance,
    }


@routes.get("/readyz", responses={503: {"description": "not ready; the body says why"}})
async def ready(request: Request) -> Response:
    """Ready when the database is; in FULL mode the memory server must be there too."""
    services: Services = request.app.state.services
    parts = {"database": await _database(services), "openmemory": await _openmemory(services)}
    needed = parts if services.settings.gateway_mode == "FULL" else {"database": parts["database"]}
    is_ready = all(state == "ok" for state in needed.values())
    body = {"ready": is_ready, "mode": services.settings.gateway_mode, "capabilities": parts}
    return JSONResponse(body, 200 if is_ready else 503)


@routes.get("/reliability/report", response_model=ReliabilityReport, responses=FAILURES)
async def report(
    request: Request, since: Annotated[str | None, Query(description="e.g. 24h, 7d, 2026-01-30")] = None
) -> Response:
    """The reliability report, for whoever would rather ask with GET."""
    services: Services = request.app.state.services
    answer = await call(services, "reliability_report", {"since": since}, caller_of(request.scope))
    return JSONResponse(answer.body, answer.status_code)


@routes.get("/metrics")
async def prometheus() -> Response:
    return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)


async def _database(services: Services) -> str:
    try:
        await services.db.run(governance.read_settings.query(services.settings.project_key))
    except EngramError as error:
        # Public: the code only. The message may name the host and the user.
        return f"failed: {error.code}"
    return "ok"


async def _openmemory(services: Services) -> str:
    try:
        await services.client.probe()
    except BackendError as error:
        return f"failed: {error.reason}"
    return "ok"
