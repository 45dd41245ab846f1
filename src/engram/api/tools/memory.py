"""Remembering, recalling, forgetting."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from engram.api.tools.base import Arguments, Call, Tool, WriteArguments
from engram.gateway.memory_query import QueryReply, QueryRequest
from engram.gateway.store_reply import StoreReply, StoreRequest


class StoreArguments(WriteArguments):
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


class QueryArguments(Arguments):
    query: str = Field(description="What you want to know, in words.")
    spaces: list[str] | None = Field(
        default=None,
        description="Where to look. By default the project's team space and the actor's own.",
        max_length=50,
    )
    top_k: int = Field(default=10, description="How many results at most, 1 to 100.")


async def memory_store(call: Call[StoreArguments]) -> StoreReply:
    """Remember something. Use it for what will matter later: facts, decisions, pitfalls, procedures.

    action tells what happened: allow (stored), redirect (policy put it in the
    private space), deferred (the memory server is down; it is kept and will be
    delivered, do not store it again), reject (policy refused it). Storing the same
    text twice in one space is harmless.
    """
    asked = call.asked
    return await call.services.store.store(
        StoreRequest(
            payload_md=asked.payload_md,
            actor_user_id=call.caller.actor,
            correlation_id=call.correlation_id,
            target_space=asked.target_space,
            kind=asked.kind,
            meta_json=asked.meta_json or {},
            evidence_refs=asked.evidence_refs or [],
            item_id=asked.item_id,
        )
    )


async def memory_query(call: Call[QueryArguments]) -> QueryReply:
    """Search what was remembered. Ask before you start on something unfamiliar.

    degraded true means that the memory server is down and the answer comes from
    the logbook alone: useful, but lean less on it.
    """
    asked = call.asked
    return await call.services.query.query(
        QueryRequest(
            query=asked.query,
            actor_user_id=call.caller.actor,
            correlation_id=call.correlation_id,
            spaces=asked.spaces,
            top_k=asked.top_k,
        )
    )


TOOLS = (
    Tool("memory_store", "Remember", "/memory/store", "write", StoreArguments, StoreReply, memory_store),
    Tool("memory_query", "Recall", "/memory/query", "read", QueryArguments, QueryReply, memory_query),
)
