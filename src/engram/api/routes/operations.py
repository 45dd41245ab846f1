"""For whoever runs engram: alive, ready, verified, metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from engram import __version__
from engram.api.caller import caller_of
from engram.api.routes.tools import FAILURES
from engram.api.services import Services
from engram.api.tools import call
from engram.api.tools.base import Checked
from engram.gateway import callers
from engram.gateway.gate import CAPABILITIES
from engram.gateway.reliability import ReliabilityReport
from engram.kernel import correlation, metrics

routes = APIRouter(tags=["operations"])


class VerifyArguments(Checked):
    skip: list[str] = Field(
        default=[], description="Capabilities to leave out of the verdict.", examples=[["redis"]]
    )
    mode: Literal["FULL", "DEGRADED"] | None = Field(
        default=None, description="Judge as if in this mode. By default the gateway's own."
    )


class CapabilityReply(BaseModel):
    status: Literal["ok", "failed", "skipped"]
    reason: str
    milliseconds: float


class VerifyReply(BaseModel):
    passed: bool
    reason: str
    mode: str
    capabilities: dict[str, CapabilityReply]
    correlation_id: str


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
    """Ready by the gate: in FULL mode every capability must be there, in DEGRADED the database."""
    services: Services = request.app.state.services
    verdict = await services.gatekeeper.verify()
    # Public: a word for each. A reason may name the host and the user.
    body = {
        "ready": verdict.passed,
        "mode": verdict.mode,
        "reason": verdict.reason,
        "capabilities": {name: finding.public for name, finding in verdict.capabilities.items()},
    }
    return JSONResponse(body, 200 if verdict.passed else 503)


@routes.post(
    "/verify",
    response_model=VerifyReply,
    responses={**FAILURES, 503: {"model": VerifyReply, "description": "the gate is not passed"}},
    description="Look at every capability and judge by the gate; each with what was seen. "
    f"Capabilities: {', '.join(CAPABILITIES)}.",
)
async def verify(request: Request, asked: Annotated[VerifyArguments | None, Body()] = None) -> Response:
    callers.acting(caller_of(request.scope), None).allowed(callers.READ)
    services: Services = request.app.state.services
    wanted = asked or VerifyArguments()
    verdict = await services.gatekeeper.verify(wanted.skip, wanted.mode)
    reply = VerifyReply.model_validate({**asdict(verdict), "correlation_id": correlation.current_or_new()})
    return JSONResponse(reply.model_dump(), 200 if verdict.passed else 503)


@routes.get("/reliability/report", response_model=ReliabilityReport, responses=FAILURES)
async def report(
    request: Request, since: Annotated[str | None, Query(description="e.g. 24h, 7d, 2026-01-30")] = None
) -> Response:
    """The reliability report, for whoever would rather ask with GET."""
    services: Services = request.app.state.services
    answer = await call(services, "reliability_report", {"since": since}, caller_of(request.scope))
    return JSONResponse(answer.body, answer.status_code)


@routes.get("/metrics", response_class=Response, responses={**FAILURES, 200: {"content": {"text/plain": {}}}})
async def prometheus(request: Request) -> Response:
    """Counters and timings, as Prometheus reads them."""
    services: Services = request.app.state.services
    await services.uploads.measure()
    return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)
