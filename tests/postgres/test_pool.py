"""Every connection is bounded, and what the DSN says is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from engram.kernel.errors import ConfigError, DatabaseUnavailable, EngramError
from engram.postgres import AsyncExecutor, Query, Statement
from engram.postgres.pool import WAIT_FOR_CONNECTION_SECONDS, async_pool, bounded, connect, sync_pool
from engram.postgres.query import scalar

SETTINGS = {
    "statement_timeout": "15s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "30s",
    "transaction_isolation": "read committed",
    "default_transaction_isolation": "read committed",
    "TimeZone": "UTC",
}
ASK = "SELECT name, current_setting(name) AS value FROM unnest(%s::text[]) AS name"
NAMES = [*SETTINGS, "application_name"]


@pytest.fixture(autouse=True)
def _other_defaults(observer: psycopg.Connection[dict[str, Any]]) -> None:
    """The database has ideas of its own, so that what is found was set by the connection."""
    name = observer.info.dbname
    for setting in (
        "TimeZone = 'Asia/Tokyo'",
        "default_transaction_isolation = 'serializable'",
        "lock_timeout = 0",
        "statement_timeout = 0",
    ):
        observer.execute(f'ALTER DATABASE "{name}" SET {setting}'.encode())


def read(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["name"]: row["value"] for row in rows}


def test_a_single_connection_is_bounded(scratch_dsn: str) -> None:
    with connect(scratch_dsn, application_name="mine") as connection:
        shown = read(connection.execute(ASK, [NAMES]).fetchall())
        assert connection.autocommit
    assert shown == {**SETTINGS, "application_name": "mine"}


def test_a_sync_pools_connections_are_bounded(scratch_dsn: str) -> None:
    with sync_pool(scratch_dsn, application_name="mine") as pool, pool.connection() as connection:
        shown = read(connection.execute(ASK, [NAMES]).fetchall())
        assert connection.autocommit
    assert shown == {**SETTINGS, "application_name": "mine"}


@pytest.mark.anyio
async def test_an_async_pools_connections_are_bounded(scratch_dsn: str) -> None:
    async with async_pool(scratch_dsn, application_name="mine") as pool, pool.connection() as connection:
        cursor = await connection.execute(ASK, [NAMES])
        shown = read(await cursor.fetchall())
        assert connection.autocommit
    assert shown == {**SETTINGS, "application_name": "mine"}


def test_what_the_dsn_says_wins_and_the_rest_stays(scratch_dsn: str) -> None:
    own = make_conninfo(
        scratch_dsn,
        options="-c statement_timeout=7s -c work_mem=8MB",
        application_name="from-the-dsn",
        connect_timeout=2,
    )
    with connect(own, application_name="mine") as connection:
        shown = read(connection.execute(ASK, [[*NAMES, "work_mem"]]).fetchall())
    assert shown == {
        **SETTINGS,
        "statement_timeout": "7s",
        "work_mem": "8MB",
        "application_name": "from-the-dsn",
    }
    assert conninfo_to_dict(bounded(own))["connect_timeout"] == "2"


def test_connecting_is_bounded_too() -> None:
    assert conninfo_to_dict(bounded("host=db"))["connect_timeout"] == "5"


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://user:p%40ss%20w%27rd@db.internal:6543/engram?sslmode=require",
        r"host=db user=user password='p@ss w\'rd' dbname=engram",
        "host=/run/with\\ space dbname=engram",
        "host=a,b port=1,2 target_session_attrs=read-write dbname=engram",
    ],
)
def test_nothing_of_the_dsn_is_lost(dsn: str) -> None:
    given, made = conninfo_to_dict(dsn), conninfo_to_dict(bounded(dsn))
    assert {key: made.get(key) for key in given} == given


def test_rows_are_dictionaries(scratch_dsn: str) -> None:
    with connect(scratch_dsn) as connection:
        assert connection.execute("SELECT 1 AS a, 2 AS b").fetchall() == [{"a": 1, "b": 2}]


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(DatabaseUnavailable) as raised:
        connect("host=127.0.0.1 port=1 dbname=engram user=me password=hunter2")
    assert raised.value.message.startswith("connect: ")
    assert "hunter2" not in str(raised.value)
    assert isinstance(raised.value.__cause__, psycopg.OperationalError)


def test_a_database_that_is_not_there_is_told_apart_by_its_message(scratch_dsn: str) -> None:
    with pytest.raises(DatabaseUnavailable, match='"no_such_database" does not exist'):
        connect(make_conninfo(scratch_dsn, dbname="no_such_database"))


def test_a_connection_string_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError):
        connect("nonsense")


@pytest.mark.parametrize("make", [sync_pool, async_pool])
def test_a_pool_refuses_it_in_the_same_way(make: Any) -> None:
    with pytest.raises(EngramError):
        make("nonsense")


def test_a_malformed_connection_string_does_not_show_its_password() -> None:
    with pytest.raises(EngramError) as raised:
        connect("host=db password=correct hunter2")
    assert "hunter2" not in str(raised.value)


def _end_the_others(observer: psycopg.Connection[dict[str, Any]], name: str) -> None:
    ended = observer.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s", [name]
    ).fetchall()
    assert ended


def test_a_connection_that_broke_while_idle_is_never_handed_out(
    scratch_dsn: str, observer: psycopg.Connection[dict[str, Any]]
) -> None:
    with sync_pool(scratch_dsn, application_name="idle-sync") as pool:
        pool.resize(8, 8)
        pool.wait()
        _end_the_others(observer, "idle-sync")
        for _ in range(6):
            with pool.connection() as connection:
                assert connection.execute("SELECT 1 AS one").fetchall() == [{"one": 1}]


@pytest.mark.anyio
async def test_nor_by_the_async_pool(scratch_dsn: str, observer: psycopg.Connection[dict[str, Any]]) -> None:
    async with async_pool(scratch_dsn, min_size=16, application_name="idle-async") as pool:
        await pool.wait()
        _end_the_others(observer, "idle-async")
        for _ in range(6):
            async with pool.connection() as connection:
                cursor = await connection.execute("SELECT 1 AS one")
                assert await cursor.fetchall() == [{"one": 1}]


@pytest.mark.anyio
async def test_after_an_outage_many_at_once_are_served_at_once(
    scratch_dsn: str, observer: psycopg.Connection[dict[str, Any]]
) -> None:
    """Trying sixteen dead connections one by one, with growing pauses, would take longer than anybody waits."""
    async with async_pool(scratch_dsn, min_size=16, application_name="outage") as pool:
        await pool.wait()
        _end_the_others(observer, "outage")
        executor = AsyncExecutor(pool)
        asked = Query(Statement("test.one", "SELECT 1 AS one"), scalar, {})
        async with asyncio.timeout(WAIT_FOR_CONNECTION_SECONDS / 2):
            assert await executor.run(asked) == 1
            assert await asyncio.gather(*(executor.run(asked) for _ in range(32))) == [1] * 32
