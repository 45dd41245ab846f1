"""`memory_store`: an acknowledged write is in the database before the reply leaves.

    decide -> begin (commit one) -> call the memory server -> finish or park (commit two) -> reply

No transaction is open during the call. Whatever the call does, the write ends
stored or parked; if the database cannot say so, the caller is told that it
failed. From `begin` on the work is shielded: a caller that hangs up does not
leave it half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

from engram.gateway import policy, store_reply
from engram.gateway.inputs import actor_problem, refuse, text_problem
from engram.gateway.openmemory_client import Memory, OpenMemoryClient
from engram.gateway.placement import CLOSED, governing_project, tell_problems
from engram.gateway.spaces import private_space
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel.backoff import exponential_capped_ms
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.content import payload_sha, why_unstorable
from engram.kernel.errors import (
    AuditWriteFailed,
    BackendError,
    DatabaseError,
    EngramError,
    OutboxEnqueueFailed,
    SchemaError,
)
from engram.kernel.failpoints import failpoint
from engram.kernel.metrics import STORE_SECONDS, STORES
from engram.kernel.settings import Settings
from engram.kernel.unfinished import Unfinished
from engram.logbook import governance, writes
from engram.logbook.outbox import content_context
from engram.logbook.uri import build_evidence_refs_json, split_evidence_refs
from engram.logbook.writes import Begun, Write
from engram.postgres.executors import AsyncExecutor

MAX_PAYLOAD_CHARS = 200_000
TWIN_POLL_MS = (20, 250)
WAIT_MS = (50, 250)


class MemoryStore:
    def __init__(
        self,
        db: AsyncExecutor,
        client: OpenMemoryClient,
        settings: Settings,
        *,
        on_parked: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = db
        self._client = client
        self._on_parked = on_parked
        self._project = settings.project_key
        self._deadline = settings.store_deadline_seconds
        self._looks = max(1, int(self._deadline * 1000 / TWIN_POLL_MS[1]))
        self._unfinished = Unfinished()

    async def store(self, request: StoreRequest) -> StoreReply:
        started = SYSTEM_CLOCK.monotonic()
        _validate(request)
        try:
            reply = await self._unfinished.shielded(self._store(request))
        except EngramError:
            STORES.labels("error").inc()
            raise
        STORES.labels(reply.action).inc()
        STORE_SECONDS.labels(reply.action).observe(SYSTEM_CLOCK.monotonic() - started)
        return reply

    async def drain(self) -> None:
        """Wait for writes whose callers have gone; for shutdown."""
        await self._unfinished.drain(self._deadline)

    async def _store(self, request: StoreRequest) -> StoreReply:
        write, decision = await self._decided(request)
        failpoint("memory_store.before_intent")
        if decision.rejected:
            return await self._reject(request, write, decision)
        begun = await self._begin(write)
        match begun.disposition:
            case "stored":
                return store_reply.stored(request, write, begun.memory_id, decision, deduplicated=True)
            case "parked":
                return store_reply.already_parked(request, write, int(begun.outbox_id or 0))
            case _:
                failpoint("memory_store.after_intent")
                return await self._finish(request, write, decision, begun)

    async def _decided(self, request: StoreRequest) -> tuple[Write, policy.Decision]:
        requested = request.target_space or str(private_space(request.actor_user_id))
        decision = policy.decide(
            requested,
            request.actor_user_id,
            await self._governance(request, requested),
            kind=request.kind,
            evidence_refs=request.evidence_refs,
            chars=len(request.payload_md),
            is_bulk=request.is_bulk,
        )
        tell_problems(requested, decision)
        return _write_of(request, requested, decision), decision

    async def _governance(self, request: StoreRequest, requested: str) -> dict[str, Any]:
        project = governing_project(requested, self._project)
        if project is None:
            return CLOSED
        with _failing_as(AuditWriteFailed, "governance settings could not be read", request, requested):
            found = await self._db.run(governance.read_settings.query(project))
        return found or CLOSED

    async def _reject(self, request: StoreRequest, write: Write, decision: policy.Decision) -> StoreReply:
        with _failing_as(AuditWriteFailed, "the audit could not be written", request, write.target_space):
            await self._db.run(writes.reject(write))
        return store_reply.rejected(request, write, decision)

    async def _begin(self, write: Write) -> Begun:
        """Commit one, begun again until it is known whose write this is.

        A twin in flight is waited for; past its deadline it is parked. A copy that is being
        erased after a forget is waited for too, at most as long as a store may take.
        """
        give_up = SYSTEM_CLOCK.monotonic() + self._deadline
        with _failing_as(AuditWriteFailed, "the audit could not be written", write, write.target_space):
            query = writes.begin(write, deadline_seconds=self._deadline)
            tries = 0
            while (begun := await self._db.run(query)).disposition in ("in_flight", "erasing"):
                tries += 1
                if begun.disposition == "erasing":
                    said = "this content was forgotten and its old copy is still being erased"
                    await self._wait_or_give_up(write, said, tries, give_up)
                elif begun.overdue:
                    if await self._db.run(writes.park_abandoned(begun.audit_id)) is None:
                        said = "this content is being written, and that write cannot be finished"
                        await self._wait_or_give_up(write, said, tries, give_up)
                else:
                    await self._wait_for_twin(begun.audit_id)
            return begun

    async def _wait_or_give_up(self, write: Write, said: str, tries: int, give_up: float) -> None:
        if SYSTEM_CLOCK.monotonic() >= give_up:
            raise AuditWriteFailed(
                said,
                hint="nothing was written; try again in a moment",
                context=content_context(write.payload_md, write.target_space),
            )
        await asyncio.sleep(exponential_capped_ms(tries, *WAIT_MS) / 1000)

    async def _wait_for_twin(self, audit_id: int) -> None:
        """A small read now and then, until the twin's outcome is known or its time is up."""
        for attempt in range(1, self._looks + 1):
            await asyncio.sleep(exponential_capped_ms(attempt, *TWIN_POLL_MS) / 1000)
            row = await self._db.run(writes.outcome(audit_id))
            if row is None or row["status"] != "pending":
                return

    async def _finish(
        self, request: StoreRequest, write: Write, decision: policy.Decision, begun: Begun
    ) -> StoreReply:
        try:
            memory_id = await self._deliver(write, begun)
        except BackendError as error:
            failpoint("memory_store.before_park")
            return await self._park(request, write, decision, begun, error)
        failpoint("memory_store.after_call")
        with _failing_as(AuditWriteFailed, "the audit could not be finished", write, write.target_space):
            finished = await self._db.run(writes.finish_stored(begun.audit_id, memory_id))
            failpoint("memory_store.after_final")
            if not finished:
                return await self._as_it_is(request, write, decision, begun)
        return store_reply.stored(request, write, memory_id, decision)

    async def _deliver(self, write: Write, begun: Begun) -> str:
        memory = Memory(
            content=write.payload_md,
            space=write.target_space,
            payload_sha=write.payload_sha,
            idempotency_key=idempotency_key(begun.delivery_key),
            metadata=metadata_of(write.kind, write.actor_user_id, write.correlation_id, write.meta_json),
        )
        memory_id, _ = await self._client.store(memory, find_first=begun.ambiguous, seconds=self._deadline)
        return memory_id

    async def _park(
        self,
        request: StoreRequest,
        write: Write,
        decision: policy.Decision,
        begun: Begun,
        error: BackendError,
    ) -> StoreReply:
        query = writes.park(
            begun.audit_id,
            reason=f"openmemory_write_failed:{error.reason}",
            error=error.message,
            ambiguous=error.ambiguous or begun.ambiguous,
            delay_seconds=self._deadline if error.ambiguous else 0.0,
        )
        with _failing_as(OutboxEnqueueFailed, "the write could not be parked", write, write.target_space):
            parked = await self._db.run(query)
            failpoint("memory_store.after_final")
            if parked is None:
                return await self._as_it_is(request, write, decision, begun)
        self._on_parked()
        return store_reply.parked(request, write, decision, parked, error)

    async def _as_it_is(
        self, request: StoreRequest, write: Write, decision: policy.Decision, begun: Begun
    ) -> StoreReply:
        """Somebody finished this write for us: answer by what is there."""
        row = await self._db.run(writes.outcome(begun.audit_id)) or {}
        if row.get("state") == "stored":
            return store_reply.stored(request, write, row["memory_id"], decision)
        if row.get("outbox_id") is not None:
            return store_reply.deferred(
                request, row["outbox_id"], "it was parked because its answer came too late"
            )
        raise AuditWriteFailed(
            "the write was finished elsewhere and is gone",
            context=content_context(write.payload_md, write.target_space),
        )


def idempotency_key(delivery_key: UUID) -> str:
    """By the record, never by the attempt: every delivery of a memory has the same key, and no
    memory of another database has it."""
    return f"engram-{delivery_key}"


def metadata_of(
    kind: str | None, actor: str | None, correlation_id: str | None, meta_json: dict[str, Any] | None
) -> dict[str, Any]:
    known = {"kind": kind, "actor_user_id": actor, "correlation_id": correlation_id}
    return {**(meta_json or {}), **{k: v for k, v in known.items() if v is not None}}


def _validate(request: StoreRequest) -> None:
    actor = request.actor_user_id
    refuse(
        {
            "payload_md": text_problem(request.payload_md, MAX_PAYLOAD_CHARS),
            "actor_user_id": actor_problem(actor) or why_unstorable(actor),
            "target_space": why_unstorable(request.target_space),
            "kind": why_unstorable(request.kind),
            "meta_json": why_unstorable(request.meta_json),
        }
    )


def _write_of(request: StoreRequest, requested: str, decision: policy.Decision) -> Write:
    evidence = split_evidence_refs(request.evidence_refs)
    extra: dict[str, Any] = {"correlation_id": request.correlation_id, **evidence["extra"]}
    if decision.rule:
        extra["policy_rule"] = decision.rule
    prefix = "policy_reject" if decision.rejected else "policy_redirect"
    return Write(
        payload_md=request.payload_md,
        payload_sha=payload_sha(request.payload_md),
        requested_space=requested,
        target_space=requested if decision.target is None else str(decision.target),
        actor_user_id=request.actor_user_id,
        correlation_id=request.correlation_id,
        evidence_refs_json=build_evidence_refs_json(evidence["patches"], evidence["attachments"], extra),
        reason=f"{prefix}:{decision.rule}" if decision.rule else None,
        kind=request.kind,
        meta_json=request.meta_json,
        item_id=request.item_id,
    )


class _failing_as:  # noqa: N801 - reads as a statement
    """Database failures inside become the specification's error, with its context."""

    def __init__(
        self,
        kind: type[AuditWriteFailed | OutboxEnqueueFailed],
        said: str,
        write: Write | StoreRequest,
        space: str,
    ) -> None:
        self._kind, self._said, self._write, self._space = kind, said, write, space

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, DatabaseError | SchemaError):
            raise self._kind(
                f"{self._said}: {error.message}",
                hint="nothing was acknowledged; try again",
                context=content_context(self._write.payload_md, self._space),
            ) from error
