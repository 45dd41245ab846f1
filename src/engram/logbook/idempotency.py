"""A repeated request has one effect: reserve the key, act, record the answer.

    check   a stored answer, or a reservation: a lease, and the id of what is to be made
    renew   keeps the lease while the effect runs
    save    stores the answer; a holder that lost its lease gets its successor's
    request the three of them around a block

A key that ends up unfinished (crash, exception, an answer not worth keeping)
is resumed by the same request with the same resource id, so the effect must be
one that finds what an earlier try has made. What cannot be resumed is never
run again.

It never holds a connection while the effect runs or while it waits, never
writes on a replay, and never shows an answer to another owner or another
request. Asynchronous throughout; a script uses `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from math import ceil
from typing import Any, TypeVar

from engram.kernel.backoff import exponential_capped_ms
from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import (
    DatabaseError,
    EngramError,
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyOutcomeUnknown,
    InputError,
)
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.unfinished import Later, Unfinished
from engram.logbook.idempotency_keys import (
    Answer,
    Asked,
    Found,
    NewId,
    Reservation,
    Running,
    complete,
    find,
    fingerprint,
    new_uuid,
    release,
    renew,
    reserve,
    storable,
    sweep,
    withdraw,
)
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Query, both

log = logging.getLogger(__name__)

TTL_SECONDS = 24 * 3600
LEASE_SECONDS = 30.0
WAIT_SECONDS = 5.0
RETRY_AFTER_AT_MOST = 5
POLL_MS = (10, 250)
# Reservations between two sweeps: a sweep deletes more than came in meanwhile.
SWEEP_EVERY = 64

KEY_PATTERN = "[a-zA-Z0-9_-]{1,128}"
_KEY = re.compile(KEY_PATTERN)

T = TypeVar("T")


class IdempotencyService:
    def __init__(
        self,
        db: AsyncExecutor,
        *,
        ttl_seconds: float = TTL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._db = db
        self._ttl = ttl_seconds
        self._lease = lease_seconds
        self._wait = wait_seconds
        self._reservations = 0
        self.unfinished = Unfinished()

    async def check(
        self,
        owner: str,
        key: str,
        path: str,
        method: str,
        body: bytes | str,
        *,
        resumable: bool = True,
        new_id: NewId = new_uuid,
    ) -> Reservation | Answer:
        """The stored answer, or the right to make one; waits a little for a twin that is running.

        `new_id` draws the id of the resource to be made, for a key that has none yet.
        """
        _require_well_formed(key)
        asked = Asked(owner, key, fingerprint(method, path, body), resumable)
        return await self._polled(lambda: self._attempt(asked, new_id))

    async def renew(self, held: Reservation) -> bool:
        """False: somebody else has the key now, or it is settled."""
        return await self._db.run(renew(held, ttl_seconds=self._ttl))

    async def save_with(
        self, held: Reservation, step: Query[Any], *, status_code: int, body: Any
    ) -> Answer | None:
        """Finish with an answer in one statement with the effect's last step, which it is stored only with.

        None: the step came too late, or the database's reply was lost; the effect has to be looked at.
        """
        own = Answer(status_code, body)
        done = await self._insisted(both(step, complete(held, own, ttl_seconds=self._ttl)))
        if done.first and not done.second:
            return await self.save(held, status_code=status_code, body=body)
        return own if done.second else None

    async def save(self, held: Reservation, *, status_code: int, body: Any) -> Answer:
        """Finish with an answer; returns the one to give, which may be a successor's."""
        own = Answer(status_code, body)
        settle = (
            complete(held, own, ttl_seconds=self._ttl)
            if storable(status_code)
            else release(held, ttl_seconds=self._ttl)
        )
        if await self._settled(held, settle):
            return own
        return await self._polled(lambda: self._answer_elsewhere(held, own))

    async def release(self, held: Reservation) -> bool:
        """Finish without an answer: the next try resumes at once."""
        return await self._db.run(release(held, ttl_seconds=self._ttl))

    @asynccontextmanager
    async def request(
        self,
        owner: str,
        key: str | None,
        *,
        path: str,
        method: str,
        body: bytes | str,
        resumable: bool = True,
        new_id: NewId = new_uuid,
    ) -> AsyncIterator[IdempotentRequest]:
        """Around an effect: reserves, renews, and releases what was not saved.

        Without a key the block just runs.
        """
        if key is None:
            yield IdempotentRequest(self, resource_id=new_id())
            return
        checked = await self.check(owner, key, path, method, body, resumable=resumable, new_id=new_id)
        if isinstance(checked, Answer):
            yield IdempotentRequest(self, response=checked)
            return
        async with self._held(checked, resumable) as request:
            yield request

    async def drain(self) -> None:
        """Wait for saves and releases whose callers have gone; for shutdown."""
        await self.unfinished.drain(self._lease)

    async def _attempt(self, asked: Asked, new_id: NewId) -> Reservation | Answer | Running:
        found = await self._db.run(reserve(asked, new_id(), lease_seconds=self._lease, ttl_seconds=self._ttl))
        if isinstance(found, Reservation):
            self._sweep_now_and_then()
            return found
        # Taken by another request this moment, or given up by one: the next look tells.
        return (_judged(found, asked) if found else None) or Running(0.0)

    async def _polled(self, look: Callable[[], Awaitable[T | Running]]) -> T:
        """Look until there is something to say; no connection is held in between."""
        give_up = SYSTEM_CLOCK.monotonic() + self._wait
        looks = 0
        while isinstance(found := await look(), Running):
            looks += 1
            pause = exponential_capped_ms(looks, *POLL_MS) / 1000
            if SYSTEM_CLOCK.monotonic() + pause > give_up:
                raise _in_progress(found)
            await asyncio.sleep(pause)
        return found

    async def _settled(self, held: Reservation, settle: Query[bool]) -> bool:
        if await self._insisted(settle):
            return True
        # The lease was over: its holder may renew late if nobody has taken the key.
        return await self.renew(held) and await self._db.run(settle)

    async def _insisted(self, settle: Query[T]) -> T:
        """The effect is done: one broken connection must not cost its answer."""
        try:
            return await self._db.run(settle)
        except DatabaseError as error:
            if not error.retryable:
                raise
            return await self._db.run(settle)

    async def _answer_elsewhere(self, held: Reservation, own: Answer) -> Answer | Running:
        """What a holder that could not settle gives: its successor's answer, or its own if it has none."""
        found = await self._db.run(find(held.owner, held.key))
        if found is None or found.resource_id != held.resource_id:
            return own  # the key's time is over, so nobody succeeded this holder
        if found.lease_token == held.lease_token:
            return own  # settled by this very lease; only the database's reply was lost
        return found.answer or Running(found.lease_left)

    @asynccontextmanager
    async def _held(self, held: Reservation, resumable: bool) -> AsyncIterator[IdempotentRequest]:
        failpoint("idempotency.after_reserve")
        request = IdempotentRequest(self, held=held)
        renewals = Later(self._lease / 3, lambda: self._renewals(held))
        given_up = release(held, ttl_seconds=self._ttl)
        try:
            yield request
        except EngramError as error:
            if error.effectless and not resumable:
                given_up = withdraw(held)
            raise
        finally:
            renewals.cancel()
            if not request.saved:
                await self.unfinished.shielded(self._let_go(given_up))

    async def _renewals(self, held: Reservation) -> None:
        while True:
            try:
                if not await self.renew(held):
                    return
            except EngramError as error:
                log.warning("idempotency.renewal_failed", extra=fields(error=str(error), code=error.code))
            await asyncio.sleep(self._lease / 3)

    async def _let_go(self, given_up: Query[bool]) -> None:
        try:
            await self._db.run(given_up)
        except EngramError as error:  # nothing is lost: the lease runs out by itself
            log.warning("idempotency.release_failed", extra=fields(error=str(error), code=error.code))

    def _sweep_now_and_then(self) -> None:
        self._reservations += 1
        if self._reservations % SWEEP_EVERY == 0:
            self.unfinished.spawned(self._swept())

    async def _swept(self) -> None:
        try:
            await self._db.run(sweep())
        except EngramError as error:
            log.warning("idempotency.sweep_failed", extra=fields(error=str(error), code=error.code))


class IdempotentRequest:
    """One request inside its block: a stored answer, or a resource to make and an answer to save."""

    def __init__(
        self,
        service: IdempotencyService,
        *,
        held: Reservation | None = None,
        response: Answer | None = None,
        resource_id: str = "",
    ) -> None:
        self._service = service
        self._held = held
        self.response = response
        self.replayed = response is not None
        self.resource_id = held.resource_id if held else resource_id
        self.resumed = held is not None and held.resumed
        self.saved = False

    async def save(self, *, status_code: int, body: Any) -> Answer:
        """Store the answer; returns the one to give. Goes on if the caller is cancelled."""
        if self._held is None:
            self.response = Answer(status_code, body)
            return self.response
        answer = await self._saved(self._service.save(self._held, status_code=status_code, body=body))
        self.response = answer
        return answer

    async def save_with(self, step: Query[Any], *, status_code: int, body: Any) -> Answer | None:
        """The same together with the effect's last step; None: it came too late, and nothing is stored yet."""
        if self._held is None:
            raise ValueError("without a key there is no answer to keep a step together with")
        saving = self._service.save_with(self._held, step, status_code=status_code, body=body)
        self.response = await self._saved(saving)
        self.saved = self.response is not None
        return self.response

    async def _saved(self, saving: Coroutine[Any, Any, T]) -> T:
        self.saved = True
        try:
            failpoint("idempotency.before_save")
            answer = await self._service.unfinished.shielded(saving)
            failpoint("idempotency.after_save")
        except Exception:
            self.saved = False
            raise
        return answer


def _require_well_formed(key: str) -> None:
    if not _KEY.fullmatch(key):
        problem = "must be 1 to 128 letters, digits, dashes and underscores"
        raise InputError(f"the idempotency key {problem}", fields={"idempotency_key": problem})


def _judged(found: Found, asked: Asked) -> Answer | Running | None:
    """None: unfinished and nobody's, so this request may take it."""
    if found.request_fingerprint != asked.fingerprint:
        raise IdempotencyMismatch(
            "this idempotency key was used for another request", hint="use a new key for a new request"
        )
    if answer := found.answer:
        return answer
    if found.lease_left > 0:
        return Running(found.lease_left)
    if not asked.resumable:
        raise IdempotencyOutcomeUnknown(
            "an earlier try with this idempotency key ended without an answer; it may have run",
            hint="find out what it did; use a new key to run it again",
        )
    return None


def _in_progress(running: Running) -> IdempotencyInProgress:
    return IdempotencyInProgress(
        "a request with this idempotency key is still running",
        hint="ask again with the same key",
        retry_after=max(1, min(ceil(running.lease_left), RETRY_AFTER_AT_MOST)),
    )
