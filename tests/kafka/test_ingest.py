"""The same ingest, told by Kafka: uploads, retries, duplicates, and changing from one queue to the other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx2
import pytest
from confluent_kafka import KafkaError, Producer

from engram.assembly.gateway import build_app
from engram.assembly.ingest import open_ingest, open_publishers
from engram.assembly.queues import open_sweeper
from engram.embedded import EmbeddedRedis
from engram.ingest import events, tasks
from engram.ingest.kafka import KafkaSubscriber, Message
from engram.ingest.kafka_queue import TOPIC, KafkaSweeper, _task_of
from engram.ingest.redis_queue import RedisQueue
from engram.ingest.seam import Lease, Work
from engram.kernel.errors import EngramError, KafkaUnavailable
from engram.kernel.runloop import run_loop, run_together
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from engram.postgres.query import Query
from kafka.conftest import make_tasks
from support.processes import environment, eventually, run_engram, started
from support.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("kafka")]


@dataclass
class Noted:
    """A pipeline that notes what it was given."""

    behave: Callable[[int], Awaitable[int]] | None = None
    seen: list[UUID] = field(default_factory=list)

    async def ingest(self, work: Work, lease: Lease) -> int:
        self.seen.append(work.task_id)
        if self.behave is not None:
            return await self.behave(len(self.seen))
        return 1


@pytest.fixture
def kafka_settings(settings_for_kafka: Settings, broker: str, tmp_path: Path) -> Settings:
    return replace(
        settings_for_kafka,
        ingest_queue="kafka",
        kafka_bootstrap_servers=broker,
        data_dir=tmp_path / "data",
        ingest_base_backoff_ms=0,
        ingest_max_attempts=3,
        ingest_lease_seconds=3.0,
        ingest_kafka_publish_interval_ms=50,
    )


@asynccontextmanager
async def working(settings: Settings, pipeline: Noted) -> AsyncIterator[None]:
    """A publisher and a worker, in this process."""
    stop = asyncio.Event()

    async def publish() -> None:
        async with open_publishers(settings) as publishers:
            loops = [run_loop("p", each.run_once, idle_seconds=0.05, stop=stop) for each in publishers]
            await run_together(*loops, stop=stop, patience_seconds=10)

    async def work() -> None:
        async with open_ingest(settings, pipeline, stop=stop) as parts:
            await run_together(
                *parts.loops(settings, stop), parts.worker.finish(), stop=stop, patience_seconds=10
            )

    both = asyncio.gather(publish(), work())
    try:
        yield
    finally:
        stop.set()
        await both


async def until(db: AsyncExecutor, sql: str, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while True:
            async with db.pool.connection() as connection:
                cursor = await connection.execute(sql.encode())
                if (await cursor.fetchall()) == []:
                    return
            await asyncio.sleep(0.05)


ALL_SUCCEEDED = "SELECT FROM ingest.ingest_task WHERE status <> 'SUCCEEDED'"
ALL_DEAD = "SELECT FROM ingest.ingest_task WHERE status <> 'DEAD'"
ALL_SETTLED = "SELECT FROM ingest.outbox_event WHERE status IN ('NEW', 'RETRYING')"


def column(dsn: str, sql: str) -> list:
    with connect(dsn) as connection:
        return [next(iter(row.values())) for row in connection.execute(sql.encode())]


async def test_an_upload_and_its_event_are_one_and_it_arrives(
    db: AsyncExecutor, dsn: str, kafka_settings: Settings
) -> None:
    with (
        serving(build_app(kafka_settings)) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=30) as http,
    ):
        path = "/api/knowledge/documents/upload-async"
        made = http.post(path, files={"file": ("a.md", b"# Leases\n\nFenced.")}).raise_for_status().json()
        assert made["status"] == "QUEUED"
        (event,) = await db.run(events.list_events(None, 10))
        assert (event["status"], str(event["task_id"])) == ("NEW", made["taskId"])
        assert event["aggregateid"] == made["documentId"]
        pipeline = Noted()
        async with working(kafka_settings, pipeline):
            await until(db, ALL_SUCCEEDED)
            await until(db, ALL_SETTLED)
        assert pipeline.seen == [UUID(made["taskId"])]
        task = http.get(f"/api/knowledge/tasks/{made['taskId']}").json()
        assert [step["toStatus"] for step in task["transitions"]] == ["QUEUED", "RUNNING", "SUCCEEDED"]


async def test_a_retry_comes_back_by_an_event_of_its_own(
    db: AsyncExecutor, dsn: str, kafka_settings: Settings
) -> None:
    async def fails_once(time: int) -> int:
        if time == 1:
            raise EngramError("not this time")
        return 1

    (task,) = await make_tasks(db, 1)
    await db.run(events.emit([task]))
    pipeline = Noted(fails_once)
    async with working(kafka_settings, pipeline):
        await until(db, ALL_SUCCEEDED)
    assert pipeline.seen == [task, task]
    assert column(dsn, "SELECT status FROM ingest.outbox_event ORDER BY seq") == ["SENT", "SENT"]


async def test_one_that_always_fails_ends_dead_and_can_be_retried(
    db: AsyncExecutor, dsn: str, kafka_settings: Settings
) -> None:
    async def fails(_: int) -> int:
        raise EngramError("never")

    (task,) = await make_tasks(db, 1)
    await db.run(events.emit([task]))
    async with working(kafka_settings, Noted(fails)):
        await until(db, ALL_DEAD)
    retried = await db.run(tasks.retry("ada", task, emits=True))
    assert retried is not None
    assert retried["event_id"] is not None
    async with working(kafka_settings, Noted()):
        await until(db, ALL_SUCCEEDED)


async def test_a_message_that_comes_again_does_nothing(
    db: AsyncExecutor, dsn: str, kafka_settings: Settings
) -> None:
    made = await make_tasks(db, 5)
    await db.run(events.emit(made))
    pipeline = Noted()
    async with working(kafka_settings, pipeline):
        await until(db, ALL_SUCCEEDED)
        with connect(dsn) as connection:
            connection.execute("UPDATE ingest.outbox_event SET status = 'NEW', sent_at = NULL")
            connection.execute("UPDATE ingest.outbox_lane SET head_seq = 1, due_at = now()")
        await until(db, ALL_SETTLED)
        await asyncio.sleep(0.5)
    assert sorted(pipeline.seen) == sorted(made)


ODD = {
    "nothing": b"",
    "a number": b"5",
    "null": b"null",
    "a list": b"[1, 2]",
    "text": b'"taskId"',
    "a number for a task": b'{"taskId": 5}',
    "null for a task": b'{"taskId": null}',
    "a list for a task": b'{"taskId": ["a"]}',
    "an object for a task": b'{"taskId": {}}',
    "no task": b'{"taskId": "nonsense"}',
    "another's": b'{"hello": "world"}',
    "deep": b"[" * 100_000,
    "deep and closed": b'{"taskId": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "no UTF-8": b'{"taskId": "\xff\xfe"}',
    "half a surrogate": b'{"taskId": "\\ud800"}',
    "a long number": b'{"taskId": ' + b"9" * 100_000 + b"}",
    "large": b'{"taskId": "' + b"a" * 900_000 + b'"}',
}


async def test_messages_that_are_no_task_hold_nobody_up(db: AsyncExecutor, kafka_settings: Settings) -> None:
    """Anybody may write to a topic."""
    (task,) = await make_tasks(db, 1)
    producer = Producer({"bootstrap.servers": kafka_settings.kafka_bootstrap_servers})
    for value in ODD.values():
        producer.produce(TOPIC, value, headers=[("id", b"\x00\xff")])
    known = b'{"taskId": "%s"}' % str(task).encode()
    producer.produce(TOPIC, known, headers=[("id", b"a\x00b")])
    assert await asyncio.to_thread(producer.flush, 20) == 0
    pipeline = Noted()
    async with working(kafka_settings, pipeline):
        await until(db, ALL_SUCCEEDED)
    assert pipeline.seen == [task]


@pytest.mark.parametrize("which", ODD)
def test_what_is_no_task_is_none(which: str) -> None:
    assert _task_of(Message("1", (TOPIC, 0, 1), ODD[which])) is None


class _Told:
    """What librdkafka hands over: a message, or the news of an error."""

    def __init__(self, offset: int, error: KafkaError | None = None) -> None:
        self._offset, self._error = offset, error

    def error(self) -> KafkaError | None:
        return self._error

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def headers(self) -> None:
        return None

    def value(self) -> bytes:
        return b"{}"


def test_an_error_after_messages_is_told_once_they_are_taken() -> None:
    subscriber = KafkaSubscriber("127.0.0.1:1", [TOPIC], "g")
    batches = [[_Told(0), _Told(1), _Told(2, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))], [_Told(2)]]
    subscriber._consumer = SimpleNamespace(consume=lambda *_: batches.pop(0), close=lambda: None)  # type: ignore[assignment]
    assert [message.place[2] for message in subscriber.take(9, 0.1)] == [0, 1]
    with pytest.raises(KafkaUnavailable):
        subscriber.take(9, 0.1)
    assert [message.place[2] for message in subscriber.take(9, 0.1)] == [2]
    subscriber.close()


class ConfirmedAtOnce(AsyncExecutor):
    """A broker and a publisher that are so quick that no event is ever seen waiting."""

    async def run(self, query: Query[Any]) -> Any:
        answer = await super().run(query)
        if query.statement == events.SQL["emit"]:
            async with self.pool.connection() as connection:
                await connection.execute(
                    "UPDATE ingest.outbox_event SET status = 'SENT', sent_at = now() WHERE status = 'NEW'"
                )
        return answer


async def test_a_rebuild_tells_of_each_task_once_however_quick_the_broker_is(
    db: AsyncExecutor, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.ingest.kafka_queue.PAGE", 10)
    made = await make_tasks(db, 25)
    sweeper = KafkaSweeper(ConfirmedAtOnce(db.pool))
    async with asyncio.timeout(30):
        for time in (1, 2):
            assert await sweeper.rebuild() == 25
            told = column(dsn, "SELECT task_id FROM ingest.outbox_event")
            assert sorted(told) == sorted(made * time)
    assert await sweeper.run_once() == 0


async def test_an_event_that_nobody_took_is_explained_and_redriven(
    db: AsyncExecutor, dsn: str, kafka_settings: Settings
) -> None:
    (task,) = await make_tasks(db, 1)
    await db.run(events.emit([task]))
    nobody = replace(kafka_settings, kafka_bootstrap_servers="127.0.0.1:1", ingest_kafka_lease_seconds=2.0)
    async with open_publishers(nobody) as publishers:
        for _ in range(kafka_settings.ingest_kafka_max_attempts):
            await publishers[0].run_once()
            with connect(dsn) as connection:
                connection.execute("UPDATE ingest.outbox_lane SET due_at = now()")
    assert column(dsn, "SELECT status FROM ingest.outbox_event") == ["DEAD"]
    (told,) = column(dsn, "SELECT last_error FROM ingest.ingest_task")
    assert told.startswith("not published: ")
    async with open_sweeper(kafka_settings) as sweeper:
        assert await sweeper.run_once() == 0, "it is not tried for ever"
    assert await db.run(tasks.retry("ada", task, emits=True)) is not None
    async with working(kafka_settings, Noted()):
        await until(db, ALL_SUCCEEDED)
    assert column(dsn, "SELECT last_error FROM ingest.ingest_task") == [None]


async def test_changing_the_queue_under_way_loses_nothing(
    db: AsyncExecutor, dsn: str, kafka_settings: Settings, tmp_path: Path
) -> None:
    with EmbeddedRedis(tmp_path / "redis") as redis:
        by_redis = replace(kafka_settings, ingest_queue="redis", redis_url=redis.url())
        queue = RedisQueue(redis.url)
        made = await make_tasks(db, 4)
        entries = await queue.put(made[:2])
        await db.run(tasks.put_on_stream(list(zip(made[:2], entries, strict=True))))
        pipeline = Noted()
        async with working(kafka_settings, pipeline):
            await until(db, ALL_SUCCEEDED)
        assert sorted(pipeline.seen) == sorted(made), "from Redis to Kafka"
        more = await make_tasks(db, 4)
        await db.run(events.emit(more[:2]))
        with connect(dsn) as connection:
            connection.execute(
                "UPDATE ingest.ingest_task SET stream_id = gen_random_uuid()::text,"
                " updated_at = now() - interval '1 minute' WHERE status = 'QUEUED'"
            )
        async with open_sweeper(by_redis) as sweeper:
            assert await sweeper.rebuild() == 4
        back = Noted()
        async with open_ingest(by_redis, back) as parts:
            async with asyncio.timeout(20):
                while len(back.seen) < 4:
                    await parts.worker.run_once()
                    await parts.worker.settle()
        assert sorted(back.seen) == sorted(more), "and back"
        await queue.close()


@pytest.mark.crash
def test_consumers_killed_lose_and_double_nothing(
    dsn: str, kafka_settings: Settings, tmp_path: Path, scale: float
) -> None:
    """Real documents, real processes; judged by the rows."""
    count = int(12 * scale)
    served = replace(kafka_settings, artifacts_dir=tmp_path / "artifacts")
    folder = tmp_path / "docs"
    folder.mkdir()
    for n in range(count):
        (folder / f"{n}.md").write_text(f"# Part {n}\n\nThis is what part {n} says.\n", "utf-8")
    with serving(build_app(served)) as url:
        with httpx2.Client(base_url=url, trust_env=False, timeout=30) as http:
            for path in sorted(folder.iterdir()):
                files = {"file": (path.name, path.read_bytes())}
                http.post("/api/knowledge/documents/upload-async", files=files).raise_for_status()
        with ExitStack() as held:
            for n, failpoint in enumerate(["ingest_worker.after_work:2", "ingest_worker.before_ack:2"]):
                env = environment(served, ENGRAM_FAILPOINT=failpoint)
                log = tmp_path / f"dying{n}.log"
                process = held.enter_context(started("worker", "ingest", env=env, log=log))
                if n == 0:
                    env = environment(served)
                    log = tmp_path / "publisher.log"
                    held.enter_context(started("worker", "publisher", env=env, log=log))
                eventually(lambda process=process: process.poll() == -signal.SIGKILL, "a killed worker", 60)
            env = environment(served)
            held.enter_context(started("worker", "ingest", env=env, log=tmp_path / "worker.log"))
            done = "SELECT count(*) FROM ingest.ingest_task WHERE status = 'SUCCEEDED'"
            eventually(lambda: column(dsn, done) == [count], "every task", 90)
    copies = column(
        dsn,
        "SELECT count(*) FROM ingest.knowledge_segment GROUP BY document_id, ordinal HAVING count(*) > 1",
    )
    assert copies == []
    said = column(dsn, "SELECT content FROM ingest.knowledge_segment")
    assert all(sum(f"part {n} says" in text for text in said) == 1 for n in range(count))


def test_rebuild_serves_kafka_too(dsn: str, kafka_settings: Settings) -> None:
    made = asyncio.run(_made(dsn))
    done = run_engram("ingest", "rebuild", env=environment(kafka_settings))
    assert done.returncode == 0, done.stderr
    assert f"{len(made)} task(s)" in done.stdout
    assert len(column(dsn, "SELECT id FROM ingest.outbox_event WHERE status = 'NEW'")) == len(made)


async def _made(dsn: str) -> list[UUID]:
    from engram.postgres.pool import async_pool

    async with async_pool(dsn) as pool:
        return await make_tasks(AsyncExecutor(pool), 3)
