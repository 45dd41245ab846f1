"""What `memory_store` answers, and the only places where an answer is made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engram.gateway.policy import Decision
from engram.kernel.errors import BackendError, ErrorCode
from engram.logbook.outbox import content_context
from engram.logbook.writes import Parked, Write

Action = Literal["allow", "redirect", "deferred", "reject", "error"]


@dataclass(frozen=True, slots=True)
class StoreRequest:
    payload_md: str
    actor_user_id: str
    correlation_id: str
    target_space: str | None = None
    kind: str | None = None
    meta_json: dict[str, Any] = field(default_factory=dict)
    evidence_refs: list[str] = field(default_factory=list)
    item_id: int | None = None
    is_bulk: bool = False


@dataclass(frozen=True, slots=True)
class StoreReply:
    """`context` says which write an `error_code` is about; without one it is None."""

    ok: bool
    action: Action
    correlation_id: str
    message: str
    space_written: str | None = None
    memory_id: str | None = None
    outbox_id: int | None = None
    evidence_refs: list[str] = field(default_factory=list)
    deduplicated: bool = False
    error_code: str | None = None
    context: dict[str, Any] | None = None


def stored(
    request: StoreRequest,
    write: Write,
    memory_id: str | None,
    decision: Decision,
    *,
    deduplicated: bool = False,
) -> StoreReply:
    said = f"stored in {write.target_space}"
    if deduplicated:
        said = f"was stored in {write.target_space} already"
    if decision.diverted:
        said += f" instead of {write.requested_space} ({decision.rule})"
    return StoreReply(
        ok=True,
        action="redirect" if decision.diverted else "allow",
        space_written=write.target_space,
        memory_id=memory_id,
        deduplicated=deduplicated,
        correlation_id=request.correlation_id,
        evidence_refs=request.evidence_refs,
        message=said,
    )


def parked(
    request: StoreRequest,
    write: Write,
    decision: Decision,
    parked: Parked,
    error: BackendError,
) -> StoreReply:
    if parked.status == "sent":
        return stored(request, write, parked.memory_id, decision, deduplicated=True)
    if not parked.fresh:
        return already_parked(request, write, parked.outbox_id)
    return deferred(request, parked.outbox_id, error.message)


def deferred(request: StoreRequest, outbox_id: int, why: str) -> StoreReply:
    return StoreReply(
        ok=False,
        action="deferred",
        outbox_id=outbox_id,
        correlation_id=request.correlation_id,
        evidence_refs=request.evidence_refs,
        message=f"kept in the outbox as {outbox_id} and delivered later: {why}",
    )


def already_parked(request: StoreRequest, write: Write, outbox_id: int) -> StoreReply:
    context = content_context(write.payload_md, write.target_space)
    return replace(
        deferred(request, outbox_id, "the same content is waiting there already"),
        deduplicated=True,
        error_code=ErrorCode.OUTBOX_DEDUP_HIT.value,
        context={**context, "outbox_id": outbox_id},
    )


def rejected(request: StoreRequest, write: Write, decision: Decision) -> StoreReply:
    return StoreReply(
        ok=False,
        action="reject",
        correlation_id=request.correlation_id,
        evidence_refs=request.evidence_refs,
        message=f"not stored: {write.target_space!r} ({decision.rule}); "
        f"use private:{request.actor_user_id}, team:<project> or org:<name>",
    )
