"""Search in documents over REST. Field names are camelCase here, as in all of `/api/knowledge`."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.responses import JSONResponse, Response

from engram.api.caller import caller_of
from engram.api.routes.tools import FAILURES
from engram.api.services import Services
from engram.api.tools import TOOLS, perform
from engram.api.tools.base import Checked
from engram.api.tools.knowledge import SearchArguments
from engram.ingest.search import MAX_QUERY_CHARS, MAX_RESULTS

routes = APIRouter(prefix="/api/knowledge", tags=["knowledge"])
_NAMES = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class SearchRequest(Checked):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    query: str = Field(
        description="What you want to know, in words or as a question.", max_length=MAX_QUERY_CHARS
    )
    top_k: int = Field(default=5, ge=1, le=MAX_RESULTS, description="How many passages at most.")
    document_id: UUID | None = Field(default=None, description="Look in this document only.")


class HitReply(BaseModel):
    model_config = _NAMES

    document_id: UUID
    title: str
    heading: str
    page: int | None
    ordinal: int
    passage: str
    score: float


class SearchReply(BaseModel):
    model_config = _NAMES

    results: list[HitReply]
    total: int
    words_only_because: str | None
    correlation_id: str


@routes.post("/search", response_model=SearchReply, responses=FAILURES)
async def search(request: Request, asked: Annotated[SearchRequest, Body()]) -> Response:
    """The best passages of your documents: by words and by meaning, each with where it stands."""
    services: Services = request.app.state.services
    tool = TOOLS["knowledge_search"]
    arguments = SearchArguments(**asked.model_dump())
    answer = await perform(services, tool, arguments, caller_of(request.scope))
    reply = SearchReply.model_validate(answer.body)
    return JSONResponse(reply.model_dump(mode="json", by_alias=True), answer.status_code)
