"""The tools, each defined once: its arguments, its result, its words for agents.

MCP, the bare form and the REST routes all call `call`, so that a tool behaves
the same wherever it is reached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from engram.api.errors import invalid_arguments
from engram.api.services import Services
from engram.gateway.memory_query import QueryReply, QueryRequest
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel import correlation
from engram.kernel.content import why_unstorable
from engram.kernel.errors import NotFound
from engram.logbook.idempotency_keys import Answer

DEFAULT_ACTOR = "local"


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")

    actor_user_id: str | None = Field(
        default=None, description="Who is acting. Leave out unless you act for a named user."
    )

    @field_validator("*", mode="after")
    @classmethod
    def _can_be_kept(cls, value: Any) -> Any:
        if problem := why_unstorable(value):
            raise ValueError(problem)
        return value

    @property
    def actor(self) -> str:
        return self.actor_user_id or DEFAULT_ACTOR


class _WriteArguments(_Arguments):
    idempotency_key: str | None = Field(
        default=None,
        description="Your own id for this call. Repeat it when you retry: the effect happens once "
        "and you get the first answer. Up to 128 letters, digits, dashes and underscores.",
    )


class StoreArguments(_WriteArguments):
    payload_md: str = Field(
        description="The memory itself, as Markdown. One fact or lesson, 200 to 600 words."
    )
    target_space: str | None = Field(
        default=None,
        description="private:<actor> (the default), team:<project> or org:<name>.",
        examples=["team:payments"],
        max_length=200,
    )
    kind: str | None = Field(
        default=None,
        description="FACT, PROCEDURE, PITFALL, DECISION, REVIEW_GUIDE or REFLECTION.",
        max_length=64,
    )
    meta_json: dict[str, Any] | None = Field(
        default=None, description="Anything worth keeping beside the text."
    )
    evidence_refs: list[str] | None = Field(
        default=None,
        description="Where it comes from: URIs such as mr://project/123.",
        max_length=100,
    )
    item_id: int | None = Field(default=None, ge=1, lt=1 << 63, description="The logbook item it belongs to.")


class QueryArguments(_Arguments):
    query: str = Field(description="What you want to know, in words.")
    spaces: list[str] | None = Field(
        default=None,
        description="Where to look. By default the project's team space and the actor's own.",
        max_length=50,
    )
    top_k: int = Field(default=10, description="How many results at most, 1 to 100.")


async def memory_store(services: Services, asked: StoreArguments) -> StoreReply:
    """Remember something. Use it for what will matter later: facts, decisions, pitfalls, procedures.

    action tells what happened: allow (stored), redirect (policy put it in the
    private space), deferred (the memory server is down; it is kept and will be
    delivered, do not store it again), reject (policy refused it). Storing the same
    text twice in one space is harmless.
    """
    return await services.store.store(
        StoreRequest(
            payload_md=asked.payload_md,
            actor_user_id=asked.actor,
            correlation_id=correlation.current_or_new(),
            target_space=asked.target_space,
            kind=asked.kind,
            meta_json=asked.meta_json or {},
            evidence_refs=asked.evidence_refs or [],
            item_id=asked.item_id,
        )
    )


async def memory_query(services: Services, asked: QueryArguments) -> QueryReply:
    """Search what was remembered. Ask before you start on something unfamiliar.

    degraded true means that the memory server is down and the answer comes from
    the logbook alone: useful, but lean less on it.
    """
    return await services.query.query(
        QueryRequest(
            query=asked.query,
            actor_user_id=asked.actor,
            correlation_id=correlation.current_or_new(),
            spaces=asked.spaces,
            top_k=asked.top_k,
        )
    )


@dataclass(frozen=True)
class Tool:
    name: str
    title: str
    arguments: type[_Arguments]
    result: type[Any]
    run: Callable[[Services, Any], Awaitable[Any]]
    read_only: bool

    @property
    def description(self) -> str:
        return "\n".join(line.strip() for line in (self.run.__doc__ or "").strip().splitlines())

    @cached_property
    def input_schema(self) -> dict[str, Any]:
        return self.arguments.model_json_schema()

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.result)

    @cached_property
    def output_schema(self) -> dict[str, Any]:
        return self._adapter.json_schema(mode="serialization")

    def dump(self, result: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = self._adapter.dump_python(result, mode="json")
        return dumped


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("memory_store", "Remember", StoreArguments, StoreReply, memory_store, read_only=False),
        Tool("memory_query", "Recall", QueryArguments, QueryReply, memory_query, read_only=True),
    )
}


async def call(services: Services, name: str, arguments: Any) -> Answer:
    """Run a tool by name; raises `EngramError` for anything that is not a result."""
    tool = TOOLS.get(name)
    if tool is None:
        raise NotFound(f"there is no tool {name!r}", hint=f"tools: {', '.join(TOOLS)}")
    try:
        asked = tool.arguments.model_validate({} if arguments is None else arguments)
    except ValidationError as error:
        raise invalid_arguments(error) from error
    return await perform(services, tool, asked)


async def perform(services: Services, tool: Tool, asked: _Arguments) -> Answer:
    """Run a tool once for its idempotency key, however the call came in."""
    key = asked.idempotency_key if isinstance(asked, _WriteArguments) else None
    body = asked.model_dump_json(exclude={"idempotency_key"})
    async with services.idempotency.request(
        asked.actor, key, path=tool.name, method="TOOL", body=body
    ) as request:
        if request.response is not None:
            return request.response
        return await request.save(status_code=200, body=tool.dump(await tool.run(services, asked)))
