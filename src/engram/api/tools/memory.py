"""Remembering, recalling, forgetting."""

from __future__ import annotations

from typing import Any

from pydantic import AwareDatetime, Field

from engram.api.tools.base import Arguments, Call, Checked, Tool, WriteArguments
from engram.gateway.memory_forget import ForgetReply, ForgetRequest
from engram.gateway.memory_query import QueryReply, QueryRequest
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.logbook.memories import NO_FILTERS, Filters


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
    is_bulk: bool = Field(
        default=False, description="One of many stored at once; shared spaces may limit those."
    )
    item_id: int | None = Field(default=None, ge=1, lt=1 << 63, description="The logbook item it belongs to.")


class QueryFilters(Checked):
    """Keeps only memories for which all of this holds."""

    kind: str | list[str] | None = Field(default=None, description="One kind, or any of several.")
    actor_user_id: str | None = Field(default=None, description="Who stored it.", max_length=200)
    item_id: int | None = Field(default=None, ge=1, lt=1 << 63, description="The logbook item it belongs to.")
    since: AwareDatetime | None = Field(default=None, description="Stored at or after, ISO 8601 with zone.")
    until: AwareDatetime | None = Field(default=None, description="Stored before, ISO 8601 with zone.")
    meta: dict[str, Any] | None = Field(default=None, description="Contained in the memory's meta_json.")

    def asked(self) -> Filters:
        kinds = [self.kind] if isinstance(self.kind, str) else self.kind
        return Filters(
            kinds=None if kinds is None else tuple(kinds),
            actor_user_id=self.actor_user_id,
            item_id=self.item_id,
            since=self.since,
            until=self.until,
            meta=self.meta,
        )


class QueryArguments(Arguments):
    query: str = Field(description="What you want to know, in words.")
    spaces: list[str] | None = Field(
        default=None,
        description="Where to look. By default the project's team space and the actor's own.",
        max_length=50,
    )
    filters: QueryFilters | None = Field(
        default=None, description="Narrow it down by kind, author, item, time or metadata."
    )
    top_k: int = Field(default=10, description="How many results at most, 1 to 100.")


class ForgetArguments(WriteArguments):
    memory_id: str | None = Field(
        default=None, description="The memory_id of an answer.", min_length=1, max_length=512
    )
    outbox_id: int | None = Field(
        default=None, ge=1, lt=1 << 63, description="The outbox_id of a deferred store."
    )
    reason: str | None = Field(default=None, description="Why; it is kept in the audit.", max_length=1000)


async def memory_store(call: Call[StoreArguments]) -> StoreReply:
    """Remember something. Use it for what will matter later: facts, decisions, pitfalls, procedures.

    action tells what happened: allow (stored), redirect (policy put it in the
    private space), deferred (the memory server is down; it is kept and will be
    delivered, do not store it again), reject (policy refused it). Storing the same
    text twice in one space is harmless.
    """
    asked = call.asked
    if asked.target_space is not None:
        call.caller.check_listed(asked.target_space)
    return await call.services.store.store(
        StoreRequest(
            payload_md=asked.payload_md,
            actor_user_id=call.caller.actor,
            correlation_id=call.correlation_id,
            target_space=asked.target_space,
            kind=asked.kind,
            meta_json=asked.meta_json or {},
            evidence_refs=asked.evidence_refs or [],
            is_bulk=asked.is_bulk,
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
            filters=asked.filters.asked() if asked.filters else NO_FILTERS,
            shared_spaces=call.caller.shared_spaces,
        )
    )


async def memory_forget(call: Call[ForgetArguments]) -> ForgetReply:
    """Forget a memory that is wrong, outdated or should never have been stored.

    It is unreadable at once and cannot be brought back; its copy in the memory
    server is deleted as well. Name it by the memory_id, or by the outbox_id of a
    deferred store, as an earlier answer gave it. The same text may be stored anew.
    """
    asked = call.asked
    return await call.services.forget.forget(
        ForgetRequest(
            caller=call.caller,
            correlation_id=call.correlation_id,
            memory_id=asked.memory_id,
            outbox_id=asked.outbox_id,
            reason=asked.reason,
        )
    )


TOOLS = (
    Tool("memory_store", "Remember", "/memory/store", "write", StoreArguments, StoreReply, memory_store),
    Tool("memory_query", "Recall", "/memory/query", "read", QueryArguments, QueryReply, memory_query),
    Tool(
        "memory_forget",
        "Forget",
        "/memory/forget",
        "write",
        ForgetArguments,
        ForgetReply,
        memory_forget,
        destructive=True,
    ),
)
