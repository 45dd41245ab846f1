"""Sandboxes as their owners use them: make, look, run, files, extend, stop, delete.

Every call names the owner, and finds nothing that is somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from engram.kernel.clock import SYSTEM_CLOCK
from engram.kernel.errors import (
    EngramError,
    InputError,
    LimitReached,
    NotFound,
    SandboxUnavailable,
    StateConflict,
)
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.kernel.metrics import SANDBOX_EXEC_SECONDS
from engram.kernel.settings import Settings
from engram.kernel.unfinished import Unfinished
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Query
from engram.sandboxes import making, reaper, rows
from engram.sandboxes.driver import Command, Driver, Ended, EndedBy, Event, Output
from engram.sandboxes.folders import ID
from engram.sandboxes.lifecycle import SANDBOX
from engram.sandboxes.rows import SandboxRow, Wanted

log = logging.getLogger(__name__)

# Given the name of the database, whose sandboxes are kept apart from any other's.
OpenDriver = Callable[[str], Driver | None]

SWITCHED_OFF = "sandboxes are switched off (ENGRAM_SANDBOX_DRIVER=none)"
MAX_ENV = 100
MAX_ENV_CHARS = 32_768
DRAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A command that has ended, with all it wrote."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool
    ended_by: EndedBy | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sandbox that is made but for its last step, as it will be then."""

    row: SandboxRow
    step: Query[bool]


class Sandboxes:
    def __init__(self, db: AsyncExecutor, open_driver: OpenDriver, settings: Settings) -> None:
        self._db = db
        self._open_driver = open_driver
        self._settings = settings
        self._driver: Driver | None = None
        self._opening = asyncio.Lock()
        self._running: Counter[str] = Counter()
        self._unfinished = Unfinished()

    async def create(
        self, owner: str, sandbox_id: str, profile: str, ttl_seconds: int | None, env: dict[str, str]
    ) -> SandboxRow:
        """Make it under this id, or find what an earlier try made."""
        driver = await self._driver_with(profile)
        wanted = self._wanted(owner, profile, ttl_seconds, env)
        at_most = self._settings.sandbox_max_per_owner
        # A caller that goes away must not leave it half-made.
        return await self._unfinished.shielded(
            making.make(self._db, driver, sandbox_id, wanted, at_most=at_most)
        )

    async def prepare(
        self, owner: str, sandbox_id: str, profile: str, ttl_seconds: int | None, env: dict[str, str]
    ) -> SandboxRow | Prepared:
        """The same for a caller who takes the last step together with one of its own."""
        driver = await self._driver_with(profile)
        wanted = self._wanted(owner, profile, ttl_seconds, env)
        at_most = self._settings.sandbox_max_per_owner
        row = await self._unfinished.shielded(
            making.prepare(self._db, driver, sandbox_id, wanted, at_most=at_most)
        )
        return (
            row if row.status != "creating" else Prepared(replace(row, status="ready"), rows.finish(row.id))
        )

    async def made(self, owner: str, sandbox_id: str) -> SandboxRow:
        """What became of one that was prepared, where the last step came too late."""
        return await making.made(self._db, sandbox_id, owner)

    async def get(self, owner: str, sandbox_id: str) -> SandboxRow:
        row = await self._db.run(rows.find(sandbox_id, owner)) if ID.fullmatch(sandbox_id) else None
        if row is None:
            raise NotFound(f"there is no sandbox {sandbox_id!r}", hint="`GET /v1/sandboxes` lists yours")
        return row

    async def page(
        self, owner: str, *, status: str | None = None, before: int | None = None, limit: int = 50
    ) -> list[SandboxRow]:
        if status is not None and status not in SANDBOX.states:
            known = ", ".join(SANDBOX.states)
            raise InputError(f"there is no status {status!r}", fields={"status": f"must be one of {known}"})
        return await self._db.run(rows.page(owner, status=status, before=before, limit=limit))

    async def extend(self, owner: str, sandbox_id: str, ttl_seconds: int) -> SandboxRow:
        """So many seconds from now, or as long as it had anyway."""
        if not await self._db.run(rows.extend(sandbox_id, owner, self._ttl(ttl_seconds))):
            raise _not_now(await self.get(owner, sandbox_id), "be extended")
        return await self.get(owner, sandbox_id)

    async def stop(self, owner: str, sandbox_id: str) -> SandboxRow:
        """To stop what is stopped changes nothing."""
        await self._db.run(rows.stop(sandbox_id, owner))
        row = await self.get(owner, sandbox_id)
        if row.status != "stopped":
            raise _not_now(row, "be stopped")
        await (await self._working_driver()).stop(sandbox_id)
        return row

    async def delete(self, owner: str, sandbox_id: str) -> None:
        """To delete what is deleted changes nothing."""
        row = await self.get(owner, sandbox_id)
        if await self._db.run(rows.delete(row.id, owner)):
            failpoint("service.after_delete")
        if (driver := await self._any_driver()) is not None:
            await self._unfinished.shielded(driver.destroy(row.id))

    @asynccontextmanager
    async def exec(
        self, owner: str, sandbox_id: str, command: Command
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Leaving the block ends the command."""
        async with AsyncExitStack() as held:
            try:
                events = await self._started(held, owner, sandbox_id, command)
            except EngramError as error:
                error.effectless = True
                raise
            with _timed(events) as timed:
                yield timed

    async def _started(
        self, held: AsyncExitStack, owner: str, sandbox_id: str, command: Command
    ) -> AsyncIterator[Event]:
        row, driver = await self._usable(owner, sandbox_id, ("ready",), "run commands")
        longest = self._settings.sandbox_exec_seconds
        if command.timeout_seconds > longest:
            raise InputError(
                f"a command may run at most {longest} seconds",
                fields={"timeout_seconds": f"must be at most {longest}"},
            )
        told = replace(command, env={**row.env, **command.env}, profile=row.profile)
        held.enter_context(self._one_more(owner))
        return await held.enter_async_context(driver.exec(sandbox_id, told))

    async def run(self, owner: str, sandbox_id: str, command: Command) -> Outcome:
        """The whole of a command."""
        async with self.exec(owner, sandbox_id, command) as events:
            return await collected(events)

    async def put_file(self, owner: str, sandbox_id: str, path: str, content: AsyncIterator[bytes]) -> int:
        _, driver = await self._usable(owner, sandbox_id, ("ready",), "take files")
        return await driver.put_file(sandbox_id, path, content)

    async def get_file(self, owner: str, sandbox_id: str, path: str) -> tuple[int, AsyncIterator[bytes]]:
        _, driver = await self._usable(owner, sandbox_id, ("ready", "stopped"), "give files")
        return await driver.get_file(sandbox_id, path)

    async def delete_file(self, owner: str, sandbox_id: str, path: str) -> None:
        _, driver = await self._usable(owner, sandbox_id, ("ready", "stopped"), "delete files")
        await driver.delete_file(sandbox_id, path)

    async def reap(self) -> int:
        """One pass of the reaper; how much it did."""
        driver = await self._any_driver()
        return (await reaper.reap(self._db, driver)).total if driver is not None else 0

    async def reap_quietly(self) -> int:
        """The same, for a loop in a server: what goes wrong is logged, and the next pass tries again."""
        try:
            return await self.reap()
        except (EngramError, OSError) as error:
            log.warning("sandboxes.reaper_failed", extra=fields(error=str(error)))
            return 0

    async def why_not(self) -> str | None:
        """Why no sandbox can be made here; None: it can."""
        driver = await self._any_driver()
        return await driver.why_not() if driver else SWITCHED_OFF

    async def close(self) -> None:
        await self._unfinished.drain(DRAIN_SECONDS)
        if self._driver is not None:
            await self._driver.close()

    async def _usable(
        self, owner: str, sandbox_id: str, states: tuple[str, ...], what: str
    ) -> tuple[SandboxRow, Driver]:
        row = await self.get(owner, sandbox_id)
        if row.status not in states:
            raise _not_now(row, what)
        return row, await self._working_driver()

    async def _driver_with(self, profile: str) -> Driver:
        driver = await self._working_driver()
        if profile not in driver.profiles:
            known = ", ".join(driver.profiles)
            raise InputError(
                f"there is no profile {profile!r}", fields={"profile": f"must be one of {known}"}
            )
        return driver

    def _wanted(self, owner: str, profile: str, ttl_seconds: int | None, env: dict[str, str]) -> Wanted:
        _check_env(env)
        return Wanted(owner, profile, env, self._ttl(ttl_seconds))

    async def _working_driver(self) -> Driver:
        driver = await self._any_driver()
        reason = await driver.why_not() if driver else SWITCHED_OFF
        if driver is None or reason is not None:
            hint = "`engram doctor` says what to do"
            raise SandboxUnavailable(f"no sandbox can run here: {reason}", hint=hint)
        return driver

    async def _any_driver(self) -> Driver | None:
        if self._driver is None:
            async with self._opening:
                if self._driver is None:
                    self._driver = self._open_driver(await self._db.run(rows.database()))
        return self._driver

    def _ttl(self, seconds: int | None) -> int:
        low, high = self._settings.sandbox_min_ttl_seconds, self._settings.sandbox_max_ttl_seconds
        if seconds is None:
            return max(low, min(self._settings.sandbox_ttl_seconds, high))
        if not low <= seconds <= high:
            raise InputError(
                f"a sandbox may live {low} to {high} seconds",
                fields={"ttl_seconds": f"must be between {low} and {high}"},
            )
        return seconds

    @contextmanager
    def _one_more(self, owner: str) -> Iterator[None]:
        at_most = self._settings.sandbox_execs_per_owner
        if self._running[owner] >= at_most:
            raise LimitReached(f"{owner} has {at_most} commands running already", hint="wait until one ends")
        self._running[owner] += 1
        try:
            yield
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]


async def collected(events: AsyncIterator[Event]) -> Outcome:
    written = {"stdout": bytearray(), "stderr": bytearray()}
    ended: Ended | None = None
    async for event in events:
        if isinstance(event, Output):
            written[event.stream] += event.data
        else:
            ended = event
    if ended is None:
        raise SandboxUnavailable("the command ended without an outcome")
    return outcome_of(ended, bytes(written["stdout"]), bytes(written["stderr"]))


def outcome_of(ended: Ended, stdout: bytes, stderr: bytes) -> Outcome:
    timed_out = ended.ended_by == "time"
    return Outcome(ended.exit_code, stdout, stderr, ended.truncated, timed_out, ended.ended_by)


@contextmanager
def _timed(events: AsyncIterator[Event]) -> Iterator[AsyncIterator[Event]]:
    """The same events; when the block is left, how long they took and what ended them is counted."""
    began, ended_by = SYSTEM_CLOCK.monotonic(), "caller"

    async def noted() -> AsyncIterator[Event]:
        nonlocal ended_by
        async for event in events:
            if isinstance(event, Ended):
                ended_by = event.ended_by or "itself"
            yield event

    try:
        yield noted()
    finally:
        SANDBOX_EXEC_SECONDS.labels(ended_by).observe(SYSTEM_CLOCK.monotonic() - began)


def _check_env(env: dict[str, str]) -> None:
    problem = None
    if len(env) > MAX_ENV or sum(len(name) + len(value) for name, value in env.items()) > MAX_ENV_CHARS:
        problem = f"takes at most {MAX_ENV} variables and {MAX_ENV_CHARS} characters"
    elif not all(name and "=" not in name for name in env):
        problem = "has a name that is empty or contains '='"
    if problem:
        raise InputError(f"the environment {problem}", fields={"env": problem})


def _not_now(row: SandboxRow, what: str) -> StateConflict:
    return StateConflict(
        f"sandbox {row.id} is {row.status}: it cannot {what}",
        hint=row.reason or SANDBOX.meanings[row.status],
        context={"status": row.status},
    )
