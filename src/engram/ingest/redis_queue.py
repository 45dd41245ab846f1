"""The queue as a Redis stream with a consumer group: the only place of ingest that knows Redis.

An entry that was read stays pending until its task is final. What comes back
after a crash, a flush or a restart of Redis is the sweeper's concern: this
module only says what is there. Every wait is bounded, and a Redis that does not
answer is `RedisUnavailable`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from engram.ingest.queue import Done, Entry
from engram.kernel.errors import RedisUnavailable
from engram.kernel.metrics import INGEST_STREAM_LENGTH, INGEST_STREAM_PENDING

STREAM = "ingest:tasks"
GROUP = "ingest-workers"
ANSWER_SECONDS = 5.0
TASK_FIELD = b"taskId"
MAX_CONNECTIONS = 8

# One entry on the dead-letter stream for each death: only whoever takes the entry off tells of it.
# One that nobody has read yet stays, and is told of when it is read.
_BURY = """
local gone = redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
if gone == 1 then
  redis.call('XDEL', KEYS[1], ARGV[2])
  redis.call('XADD', KEYS[2], '*', 'taskId', ARGV[3], 'attemptCount', ARGV[4], 'lastError', ARGV[5],
             'streamId', ARGV[2], 'stream', KEYS[1])
end
return gone
"""

# Whoever still has entries stays, or they would be forgotten with it.
_DISMISS = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if #pending > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

Address = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Consumer:
    name: str
    pending: int


# As Redis numbers entries.
_ENTRY = re.compile(r"\d+-\d+")


class RedisQueue:
    """`address` is asked whenever there is no client: an embedded Redis may come up later."""

    is_told_by_rows = False
    keeps_entries = True

    def __init__(self, address: Address, *, dlq: str = "", stream: str = STREAM, group: str = GROUP) -> None:
        self.stream, self.group, self.dlq = stream, group, dlq
        self._address = address
        self._redis: Redis | None = None
        self._reached = ""
        self._in_doubt = self._has_group = False
        # How far its own pending entries were read again; None: nothing can have been lost.
        self._read_again: str | None = None

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()
            self._redis = None

    async def put(self, task_ids: Sequence[UUID]) -> list[str]:
        with self._answering():
            async with (await self._client()).pipeline(transaction=False) as pipe:
                for task_id in task_ids:
                    pipe.xadd(self.stream, {TASK_FIELD: str(task_id)})
                return [_text(entry) for entry in await pipe.execute()]

    async def take(self, consumer: str, count: int, wait_seconds: float) -> list[Entry]:
        """After a failure first what is pending for this consumer: a reply with entries may have been lost.

        Among them are those that it has in hand; the rows turn them away.
        """
        if self._read_again is not None:
            own = await self._read(consumer, self._read_again, count, None)
            self._read_again = own[-1].id if own else None
            if own:
                return own
        return await self._read(consumer, ">", count, max(1, int(wait_seconds * 1000)))

    async def _read(self, consumer: str, after: str, count: int, milliseconds: int | None) -> list[Entry]:
        found: Any = await self._grouped(
            lambda redis: redis.xreadgroup(
                self.group, consumer, {self.stream: after}, count=count, block=milliseconds
            )
        )
        return [_entry(raw) for _, entries in found or () for raw in entries]

    async def settle(self, done: Sequence[Done]) -> int:
        """Ack and delete; a death is told on the dead-letter stream by the same script."""
        if not done:
            return 0
        with self._answering():
            redis = await self._client()
            deaths = [(entry.id, entry.death) for entry in done if entry.death is not None and self.dlq]
            plain = [entry.id for entry in done if entry.death is None or not self.dlq]
            async with redis.pipeline(transaction=True) as pipe:
                for entry_id, death in deaths:
                    told = (str(death.task_id), str(death.attempt_count), death.error)
                    pipe.eval(_BURY, 2, self.stream, self.dlq, self.group, entry_id, *told)
                if plain:
                    pipe.xack(self.stream, self.group, *plain)
                    pipe.xdel(self.stream, *plain)
                answers = await pipe.execute()
            return sum(answers[: len(deaths)])

    async def claim_idle(
        self, consumer: str, idle_ms: int, count: int, start: str
    ) -> tuple[str, list[Entry]]:
        """Entries that nobody has touched for so long, now this consumer's; and where to go on."""
        answer: Any = await self._grouped(
            lambda redis: redis.xautoclaim(
                self.stream, self.group, consumer, min_idle_time=idle_ms, start_id=start, count=count
            )
        )
        # Redis 6.2 answers with an empty pair for an entry that was deleted under its reader.
        return _text(answer[0]), [_entry(raw) for raw in answer[1] if raw and raw[0] is not None]

    async def claim_from(self, gone: str, consumer: str, count: int) -> list[Entry]:
        """Entries of a consumer that is gone, now this one's."""
        pending: Any = await self._grouped(
            lambda redis: redis.xpending_range(
                self.stream, self.group, min="-", max="+", count=count, consumername=gone
            )
        )
        ids = [_text(entry["message_id"]) for entry in pending]
        if not ids:
            return []
        claimed: Any = await self._grouped(
            lambda redis: redis.xclaim(self.stream, self.group, consumer, min_idle_time=0, message_ids=ids)
        )
        found = [_entry(raw) for raw in claimed if raw and raw[0] is not None]
        # What was deleted from the stream can only be forgotten.
        lost = set(ids) - {entry.id for entry in found}
        if lost:
            await self._grouped(lambda redis: redis.xack(self.stream, self.group, *lost))
        return found

    async def consumers(self) -> list[Consumer]:
        found: Any = await self._grouped(lambda redis: redis.xinfo_consumers(self.stream, self.group))
        return [Consumer(_text(each["name"]), int(each["pending"])) for each in found]

    async def dismiss(self, consumer: str) -> bool:
        """Remove a consumer that has nothing pending."""
        gone: Any = await self._grouped(
            lambda redis: redis.eval(_DISMISS, 1, self.stream, self.group, consumer)
        )
        return bool(gone)

    async def missing(self, entry_ids: Sequence[str]) -> set[str]:
        """Those of the entries that are not on the stream; those of another queue never are."""
        asked = [entry_id for entry_id in entry_ids if _ENTRY.fullmatch(entry_id)]
        with self._answering():
            async with (await self._client()).pipeline(transaction=False) as pipe:
                for entry_id in asked:
                    pipe.xrange(self.stream, entry_id, entry_id, count=1)
                found = await pipe.execute()
        return set(entry_ids) - {entry_id for entry_id, there in zip(asked, found, strict=True) if there}

    async def take_turn(self, worker_id: str, seconds: float) -> bool:
        """Whether it is this worker's turn to sweep: one of all in so long."""
        with self._answering():
            redis = await self._client()
            return bool(await redis.set(f"{self.stream}:sweeper", worker_id, nx=True, px=int(seconds * 1000)))

    async def length(self) -> int:
        with self._answering():
            return int(await (await self._client()).xlen(self.stream))

    async def pending(self) -> int:
        summary: Any = await self._grouped(lambda redis: redis.xpending(self.stream, self.group))
        return int(summary["pending"])

    async def measure(self) -> int:
        """Set the gauges of what is on the stream."""
        INGEST_STREAM_LENGTH.labels(self.stream).set(await self.length())
        INGEST_STREAM_PENDING.labels(self.stream, self.group).set(await self.pending())
        return 0

    async def _grouped(self, ask: Callable[[Any], Any]) -> Any:
        """Ask something that needs the group; a Redis that came back empty gets it anew."""
        with self._answering():
            redis = await self._client()
            if not self._has_group:
                await self._make_group(redis)
            try:
                return await ask(redis)
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                await self._make_group(redis)
                return await ask(redis)

    async def _make_group(self, redis: Any) -> None:
        try:
            await redis.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._has_group = True

    async def _client(self) -> Redis:
        """The client; after a failure its address is asked for again, for it may have changed."""
        if self._redis is None or self._in_doubt:
            address = await asyncio.to_thread(self._address)
            if address is None:
                raise RedisUnavailable("no Redis is running here", hint="start `engram up`, or set REDIS_URL")
            if self._redis is None or address != self._reached:
                await self.close()
                self._redis, self._reached = _connected(address), address
            self._in_doubt = False
        return self._redis

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, ValueError) as error:
            self._in_doubt, self._has_group, self._read_again = True, False, "0"
            raise RedisUnavailable(f"Redis does not answer: {error}", hint="check REDIS_URL") from error


def _connected(address: str) -> Redis:
    return Redis.from_url(
        address,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=ANSWER_SECONDS,
        max_connections=MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


def _entry(raw: Any) -> Entry:
    entry_id, values = raw
    try:
        task_id = UUID(_text((values or {})[TASK_FIELD]))
    except (KeyError, ValueError):
        task_id = None
    return Entry(_text(entry_id), task_id)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
