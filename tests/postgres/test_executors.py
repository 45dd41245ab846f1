"""One query, two executors, the same answers and the same errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import PoolTimeout

from engram.embedded import EmbeddedPostgres
from engram.kernel.errors import (
    ConstraintViolated,
    DatabaseContention,
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    EngramError,
    SchemaError,
)
from engram.logbook import governance, outbox
from engram.postgres import AsyncExecutor, Query, Row, Statement, SyncExecutor
from engram.postgres.errors import translate
from engram.postgres.pool import WAIT_FOR_CONNECTION_SECONDS, async_pool, connect, sync_pool
from engram.postgres.query import any_row, maybe_row, nothing, one_row, rows, scalar

pytestmark = pytest.mark.anyio

Run = Callable[..., Coroutine[Any, Any, Any]]
Pools = Callable[..., Run]


def query(text: str, read: Callable[[list[Row]], Any] = rows, **params: Any) -> Query[Any]:
    return Query(Statement("test.statement", text), read, params)


@pytest.fixture(params=["sync", "async"])
async def pools(request: pytest.FixtureRequest, scratch_dsn: str) -> AsyncIterator[Pools]:
    """Make a pool of either kind; its executor's `run` is awaitable either way."""
    blocking = request.param == "sync"
    opened: list[Any] = []

    def make(options: str | None = None, *, wait: float | None = None, max_size: int = 4) -> Run:
        dsn = make_conninfo(scratch_dsn, options=options) if options else scratch_dsn
        pool: Any = sync_pool(dsn, max_size=max_size) if blocking else async_pool(dsn, max_size=max_size)
        opened.append(pool)
        if wait is not None:
            pool.timeout = wait
        executor: Any = SyncExecutor(pool) if blocking else AsyncExecutor(pool)

        async def run(asked: Query[Any]) -> Any:
            if blocking:
                return await asyncio.to_thread(executor.run, asked)
            if pool.closed:
                await pool.open()
            return await executor.run(asked)

        return run

    yield make
    for pool in opened:
        if blocking:
            await asyncio.to_thread(pool.close)
        else:
            await pool.close()


@pytest.fixture
def run(pools: Pools) -> Run:
    return pools(max_size=2)


# The same value through both


NUMBERS = "SELECT n, 'x' || n AS name FROM generate_series(1, %(count)s) AS n ORDER BY n"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (query(NUMBERS, rows, count=2), [{"n": 1, "name": "x1"}, {"n": 2, "name": "x2"}]),
        (query(NUMBERS, rows, count=0), []),
        (query(NUMBERS, maybe_row, count=0), None),
        (query(NUMBERS, maybe_row, count=1), {"n": 1, "name": "x1"}),
        (query(NUMBERS, one_row, count=1), {"n": 1, "name": "x1"}),
        (query(NUMBERS, any_row, count=0), False),
        (query(NUMBERS, any_row, count=3), True),
        (query("SELECT 7 AS n", scalar), 7),
        (query("SELECT %(v)s::jsonb AS v", scalar, v='{"a": [1, null, "é"]}'), {"a": [1, None, "é"]}),
        (query("SELECT %(v)s::text AS v", scalar, v="续租约 100% ' \\"), "续租约 100% ' \\"),
        (query("SELECT %(v)s::int[] AS v", scalar, v=[1, None]), [1, None]),
        (
            query("SELECT timestamptz '2026-01-01 12:00+02' AS v", scalar),
            datetime(2026, 1, 1, 10, tzinfo=UTC),
        ),
        (query("CREATE TABLE t (a int)", nothing), None),
        (query("CREATE TABLE t (a int)", len), 0),
    ],
)
async def test_an_answer(run: Run, asked: Query[Any], answer: object) -> None:
    assert await run(asked) == answer


def steady(answer: Any) -> Any:
    """Without what time alone changes."""
    if isinstance(answer, dict):
        return {key: value for key, value in answer.items() if key != "oldest_pending_seconds"}
    return answer


async def test_one_value_through_both_gives_the_same(dsn: str) -> None:
    asked: list[Query[Any]] = [
        outbox.enqueue_memory.query("the same memory", "team:payments"),
        outbox.stats.query(),
        outbox.get.query(1),
        governance.read_settings.query("nobody"),
        governance.invariants.query(),
    ]

    async with async_pool(dsn) as not_blocking:
        from_async = [steady(await AsyncExecutor(not_blocking).run(one)) for one in asked]
    with sync_pool(dsn) as blocking:
        from_sync = [steady(SyncExecutor(blocking).run(one)) for one in asked]
    assert from_sync == from_async
    assert from_sync[0] == 1
    assert from_sync[4]


@pytest.mark.parametrize("count", [0, 2])
def test_readers_that_expect_one_row_refuse_others(count: int) -> None:
    for read in (one_row, scalar):
        with pytest.raises(ValueError):
            read([{"n": 1}] * count)


async def test_a_statement_is_committed_when_it_returns(run: Run, observer: psycopg.Connection[Row]) -> None:
    observer.execute("CREATE TABLE t (a int)")
    await run(query("INSERT INTO t VALUES (1)", nothing))
    assert observer.execute("SELECT a FROM t").fetchall() == [{"a": 1}]
    busy = observer.execute(
        "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'engram'"
    ).fetchall()
    assert {row["state"] for row in busy} <= {"idle", None}, "None: still connecting"


async def test_a_statement_is_done_or_it_is_not(run: Run, observer: psycopg.Connection[Row]) -> None:
    observer.execute("CREATE TABLE t (a int CHECK (a < 3))")
    with pytest.raises(ConstraintViolated):
        await run(query("INSERT INTO t SELECT generate_series(1, 5)", nothing))
    assert observer.execute("SELECT a FROM t").fetchall() == []


async def test_a_connection_survives_failures_of_statement_and_reader(pools: Pools) -> None:
    run = pools(max_size=1, wait=2.0)

    def broken(found: list[Row]) -> None:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(DatabaseError):
            await run(query("SELECT 1 / 0"))
        with pytest.raises(ZeroDivisionError):
            await run(query("SELECT 1 AS n", broken))
    assert await run(query("SELECT 1 AS n", scalar)) == 1


# Errors, each provoked for real


async def failing(run: Run, asked: Query[Any]) -> EngramError:
    with pytest.raises(EngramError) as raised:
        await run(asked)
    assert isinstance(raised.value.__cause__, psycopg.Error), "the driver's error is kept"
    assert raised.value.message.startswith("test.statement: ")
    assert "\n" not in raised.value.message
    return raised.value


async def test_a_statement_that_takes_too_long(pools: Pools) -> None:
    error = await failing(pools("-c statement_timeout=30ms"), query("SELECT pg_sleep(30)"))
    assert type(error) is DatabaseTimeout
    assert error.retryable
    assert isinstance(error.__cause__, pg.QueryCanceled)


async def test_a_lock_that_takes_too_long(pools: Pools, observer: psycopg.Connection[Row]) -> None:
    observer.execute("CREATE TABLE t (a int)")
    with observer.transaction():
        observer.execute("LOCK TABLE t")
        error = await failing(pools("-c lock_timeout=30ms"), query("SELECT * FROM t"))
    assert type(error) is DatabaseTimeout
    assert isinstance(error.__cause__, pg.LockNotAvailable)


# Take a lock, wait until the other side's is seen, then ask for that.
HOLD_AND_ASK = """
DO $$ BEGIN
    PERFORM pg_advisory_xact_lock({hold});
    WHILE NOT EXISTS (SELECT FROM pg_locks JOIN pg_database d ON d.oid = database
                      WHERE d.datname = current_database() AND locktype = 'advisory' AND {seen})
    LOOP PERFORM pg_sleep(0.005); END LOOP;
    PERFORM pg_advisory_xact_lock({ask});
END $$
"""


async def test_a_deadlock(pools: Pools, scratch_dsn: str) -> None:
    """The other side waits for us first; then we close the circle, and are the one to notice."""
    theirs = HOLD_AND_ASK.format(hold=1, seen="objid = 2 AND granted", ask=2)
    ours = HOLD_AND_ASK.format(hold=2, seen="objid = 2 AND NOT granted", ask=1)
    patient = make_conninfo(scratch_dsn, options="-c deadlock_timeout=60s -c statement_timeout=20s")
    async with await psycopg.AsyncConnection.connect(patient, autocommit=True) as other:
        waiting = asyncio.create_task(other.execute(theirs.encode()))
        error = await failing(pools("-c deadlock_timeout=10ms"), query(ours))
        await waiting
    assert type(error) is DatabaseContention
    assert error.retryable
    assert isinstance(error.__cause__, pg.DeadlockDetected)


@pytest.mark.parametrize(
    ("statement", "constraint"),
    [
        ("INSERT INTO child VALUES (1, 1, 1)", "child_pkey"),
        ("INSERT INTO child VALUES (2, 1, -1)", "child_positive"),
        ("INSERT INTO child VALUES (2, 9, 1)", "child_has_parent"),
        ("UPDATE child SET n = -1", "child_positive"),
        ("DELETE FROM parent", "child_has_parent"),
    ],
)
async def test_a_violated_rule_is_named(
    run: Run, observer: psycopg.Connection[Row], statement: str, constraint: str
) -> None:
    observer.execute(
        """
        CREATE TABLE parent (id int PRIMARY KEY);
        CREATE TABLE child (id int PRIMARY KEY, parent int NOT NULL, n int,
                            CONSTRAINT child_has_parent FOREIGN KEY (parent) REFERENCES parent,
                            CONSTRAINT child_positive CHECK (n > 0));
        INSERT INTO parent VALUES (1);
        INSERT INTO child VALUES (1, 1, 1);
        """
    )
    error = await failing(run, query(statement))
    assert isinstance(error, ConstraintViolated)
    assert error.constraint == constraint
    assert not error.retryable


async def test_a_violated_not_null_is_a_violation(run: Run, observer: psycopg.Connection[Row]) -> None:
    observer.execute("CREATE TABLE t (a int NOT NULL)")
    assert isinstance(await failing(run, query("INSERT INTO t VALUES (NULL)")), ConstraintViolated)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM nowhere",
        "SELECT nothing FROM pg_class",
        "CREATE TABLE nowhere.t ()",
        "SELECT no_function()",
    ],
)
async def test_a_missing_object_says_what_to_do(run: Run, statement: str) -> None:
    error = await failing(run, query(statement))
    assert type(error) is SchemaError
    assert error.hint == "run `engram migrate`"
    assert not error.retryable


@pytest.mark.parametrize(
    "statement", ["SELECT 1 / 0", "SELECT 'x'::int", "SELEKT", "DO $$ BEGIN RAISE 'no'; END $$"]
)
async def test_anything_else_is_a_database_error(run: Run, statement: str) -> None:
    error = await failing(run, query(statement))
    assert type(error) is DatabaseError
    assert not error.retryable


async def test_a_message_does_not_repeat_the_data(run: Run, observer: psycopg.Connection[Row]) -> None:
    observer.execute("CREATE TABLE t (a text PRIMARY KEY)")
    observer.execute("INSERT INTO t VALUES ('a private thing')")
    error = await failing(run, query("INSERT INTO t VALUES (%(a)s)", a="a private thing"))
    assert "a private thing" not in str(error)


async def test_connections_that_broke_while_idle_are_replaced_and_nobody_notices(
    pools: Pools, observer: psycopg.Connection[Row]
) -> None:
    run = pools(max_size=4)
    asked = query("SELECT pg_backend_pid() AS pid FROM pg_sleep(0.05)", scalar)
    before = set(await asyncio.gather(*(run(asked) for _ in range(4))))
    assert len(before) > 1
    assert terminated(observer) >= len(before)

    after = await asyncio.gather(*(run(asked) for _ in range(8)))
    assert not before & set(after)


async def test_a_statement_whose_connection_is_cut_is_not_repeated(
    run: Run, observer: psycopg.Connection[Row]
) -> None:
    """Whether it was applied is not known: that is the caller's to find out."""
    observer.execute("CREATE SEQUENCE calls")
    error = await failing(
        run, query("SELECT nextval('calls'), pg_terminate_backend(pg_backend_pid()), pg_sleep(5)")
    )
    assert type(error) is DatabaseUnavailable
    assert observer.execute("SELECT last_value FROM calls").fetchall() == [{"last_value": 1}]


async def test_a_database_that_is_away_and_comes_back(
    pools: Pools, scratch_dsn: str, postgres_server: EmbeddedPostgres
) -> None:
    run = pools(max_size=2, wait=0.3)
    assert await run(query("SELECT 1 AS n", scalar)) == 1
    name = conninfo_to_dict(scratch_dsn)["dbname"]
    with connect(postgres_server.dsn("postgres")) as admin:
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
        terminated(admin, str(name))
        try:
            for _ in range(2):
                error = await failing(run, query("SELECT 1 AS n"))
                assert type(error) is DatabaseUnavailable
        finally:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())

    async with asyncio.timeout(15):
        while True:
            try:
                assert await run(query("SELECT 1 AS n", scalar)) == 1
                return
            except DatabaseUnavailable:
                continue


@pytest.mark.parametrize("make", [sync_pool, async_pool])
async def test_a_pool_does_not_stay_away_longer_than_the_database(make: Any) -> None:
    """After five minutes of attempts the pool gives up and starts anew; until then each pause is
    twice the last, so that after a long outage requests go on failing for about as long again."""
    pool = make("host=/nonexistent")
    try:
        assert pool.reconnect_timeout <= 2 * WAIT_FOR_CONNECTION_SECONDS
    finally:
        closing = pool.close()
        if closing is not None:
            await closing


async def test_no_connection_to_be_had_in_time(pools: Pools, observer: psycopg.Connection[Row]) -> None:
    run = pools(max_size=1, wait=0.1)
    assert await run(query("SELECT 1 AS n", scalar)) == 1
    observer.execute("SELECT pg_advisory_lock(1)")
    holding = asyncio.create_task(run(query("SELECT pg_advisory_xact_lock(1)", nothing)))
    async with asyncio.timeout(10):
        while not observer.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall():
            await asyncio.sleep(0.01)
    error = await failing(run, query("SELECT 1"))
    assert type(error) is DatabaseUnavailable
    assert isinstance(error.__cause__, PoolTimeout)
    observer.execute("SELECT pg_advisory_unlock(1)")
    await holding
    assert await run(query("SELECT 1 AS n", scalar)) == 1


def test_a_closed_pool_is_unavailable(scratch_dsn: str) -> None:
    pool = sync_pool(scratch_dsn)
    pool.close()
    with pytest.raises(DatabaseUnavailable):
        SyncExecutor(pool).run(query("SELECT 1"))


async def test_a_reply_to_a_caller_that_is_gone_leaves_the_pool_whole(scratch_dsn: str) -> None:
    async with async_pool(scratch_dsn, max_size=1) as pool:
        executor = AsyncExecutor(pool)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await executor.run(query("SELECT pg_sleep(30)"))
        assert await executor.run(query("SELECT 1 AS n", scalar)) == 1


# The table of the module, code by code


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("57014", DatabaseTimeout),
        ("55P03", DatabaseTimeout),
        ("40P01", DatabaseContention),
        ("40001", DatabaseContention),
        ("23001", ConstraintViolated),
        ("23502", ConstraintViolated),
        ("23503", ConstraintViolated),
        ("23505", ConstraintViolated),
        ("23514", ConstraintViolated),
        ("23P01", ConstraintViolated),
        ("42P01", SchemaError),
        ("42703", SchemaError),
        ("3F000", SchemaError),
        ("42883", SchemaError),
        ("08000", DatabaseUnavailable),
        ("08006", DatabaseUnavailable),
        ("53300", DatabaseUnavailable),
        ("57P01", DatabaseUnavailable),
        ("57P02", DatabaseUnavailable),
        ("57P03", DatabaseUnavailable),
        ("22P02", DatabaseError),
        ("42601", DatabaseError),
        ("42501", DatabaseError),
        ("XX000", DatabaseError),
    ],
)
def test_each_code_has_its_error(code: str, kind: type[EngramError]) -> None:
    error = translate(pg.lookup(code)("said so\nDETAIL: more"), "doing")
    assert type(error) is kind
    assert error.message == "doing: said so"


@pytest.mark.parametrize("code", ["54000", "54001", "54011", "54023"])
def test_a_statement_beyond_a_limit_is_not_an_outage(code: str) -> None:
    error = translate(pg.lookup(code)("string is too long for tsvector"), "doing")
    assert not error.retryable


def test_an_error_without_words_is_named() -> None:
    assert translate(psycopg.OperationalError(), "doing").message == "doing: OperationalError"


async def test_text_that_cannot_be_sent_is_an_engram_error(run: Run) -> None:
    with pytest.raises(EngramError):
        await run(query("SELECT %(v)s::text AS v", scalar, v="\ud800"))


def terminated(connection: psycopg.Connection[Row], name: str | None = None) -> int:
    """End every other connection to the database, and wait until they are gone."""
    ended = connection.execute(
        "SELECT count(pg_terminate_backend(pid, 5000)) AS n FROM pg_stat_activity"
        " WHERE datname = coalesce(%s, current_database()) AND pid <> pg_backend_pid()",
        [name],
    ).fetchone()
    assert ended
    return int(ended["n"])
