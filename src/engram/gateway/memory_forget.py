"""`memory_forget`: unreadable at once, audited, and erased from the memory server as soon as it can be.

    find -> may the caller? -> forget (one commit) -> erase the copy -> reply

The commit is the promise. A copy that cannot be erased now is erased by
reconcile. A memory that the caller may not read does not exist for them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from engram.gateway.callers import Caller
from engram.gateway.erasing import Eraser
from engram.gateway.spaces import parse_space
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.content import MAX_ID
from engram.kernel.errors import EngramError, Forbidden, InputError, NotFound, StateConflict
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.settings import Settings
from engram.kernel.unfinished import Unfinished
from engram.logbook import memories, writes
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """By the memory server's id or by the outbox's: exactly one of them."""

    caller: Caller
    correlation_id: str
    memory_id: str | None = None
    outbox_id: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ForgetReply:
    ok: bool
    forgotten: bool
    correlation_id: str
    message: str


class MemoryForget:
    def __init__(self, db: AsyncExecutor, eraser: Eraser, settings: Settings) -> None:
        self._db = db
        self._eraser = eraser
        self._deadline = settings.store_deadline_seconds
        self._unfinished = Unfinished()

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        _validate(request)
        return await self._unfinished.shielded(self._forget(request))

    async def drain(self) -> None:
        """Wait for what callers that have gone had begun; for shutdown."""
        await self._unfinished.drain(self._deadline)

    async def _forget(self, request: ForgetRequest) -> ForgetReply:
        give_up = SYSTEM_CLOCK.monotonic() + self._deadline
        done: list[Row] = []
        while not done:
            found = await self._permitted(request, give_up)
            if not found:
                said = "it was forgotten before; nobody can read it"
                return ForgetReply(
                    ok=True, forgotten=True, correlation_id=request.correlation_id, message=said
                )
            failpoint("memory_forget.before_forget")
            # None: it was written or requeued this moment, so it is looked at again.
            done = [row for row in [await self._unreadable(request, one) for one in found] if row]
        failpoint("memory_forget.after_forget")
        # One after the other: two spaces may share a copy, and the last one to go takes it along.
        left = [row for row in done if row["to_erase"] and not await self._erased(row)]
        said = "forgotten; nobody can read it any more"
        if left:
            said += "; the memory server's copy will be deleted as soon as that is possible"
        return ForgetReply(ok=True, forgotten=True, correlation_id=request.correlation_id, message=said)

    async def _permitted(self, request: ForgetRequest, give_up: float) -> list[Row]:
        """The memories meant, each settled: one that is being written is waited for. None is left
        if they were forgotten before."""
        while True:
            found = await self._db.run(memories.to_forget.query(request.memory_id, request.outbox_id))
            readable = [row for row in found if _readable(request.caller, row)]
            if not readable:
                raise _missing(request)
            _require_right(request.caller, readable)
            live = [row for row in readable if row["state"] != "forgotten"]
            writing = [row for row in live if row["state"] == "intent"]
            if not writing:
                return live
            if SYSTEM_CLOCK.monotonic() > give_up:
                raise StateConflict("this memory is being written", hint="try again in a few seconds")
            await self._wait_for(writing)

    async def _wait_for(self, writing: list[Row]) -> None:
        for row in writing:
            if row["overdue"]:
                await self._db.run(writes.park_abandoned(row["audit_id"]))
        await asyncio.sleep(POLL_SECONDS)

    async def _unreadable(self, request: ForgetRequest, row: Row) -> Row | None:
        query = memories.forget.query(
            row["memory_record_id"],
            request.caller.actor,
            correlation_id=request.correlation_id,
            because=request.reason,
        )
        return await self._db.run(query)

    async def _erased(self, row: Row) -> bool:
        """It is forgotten whatever happens here: what fails now is done by reconcile."""
        try:
            return await self._eraser.erase(row["memory_record_id"])
        except EngramError as error:
            log.warning("memory_forget.erase_later", extra=fields(error=error.message, code=error.code))
            return False


def _readable(caller: Caller, row: Row) -> bool:
    space = parse_space(row["target_space"])
    return space is not None and caller.may_read(space)


def _require_right(caller: Caller, found: list[Row]) -> None:
    """What is shared may be forgotten by whoever wrote it, or by an administrator."""
    if caller.is_admin or all(row["actor_user_id"] == caller.actor for row in found):
        return
    if all(row["target_space"] == f"private:{caller.actor}" for row in found):
        return
    raise Forbidden(
        "a shared memory is forgotten by who wrote it, or by an administrator",
        hint="ask one of them",
    )


def _missing(request: ForgetRequest) -> NotFound:
    named = f"memory {request.memory_id}" if request.memory_id else f"outbox row {request.outbox_id}"
    return NotFound(f"there is no {named}", hint="use an id that an answer gave you")


def _validate(request: ForgetRequest) -> None:
    if (request.memory_id is None) == (request.outbox_id is None):
        raise InputError(
            "give either memory_id or outbox_id",
            fields={"memory_id": "exactly one of the two", "outbox_id": "exactly one of the two"},
        )
    if request.outbox_id is not None and not 0 < request.outbox_id <= MAX_ID:
        raise InputError("no such outbox_id", fields={"outbox_id": "must be a positive number"})
