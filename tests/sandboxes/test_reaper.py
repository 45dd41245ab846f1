"""What is over ends, what is half-made is finished or failed, what nobody knows is removed; and the table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from engram.api.tools import call
from engram.assembly.gateway import open_services
from engram.gateway.callers import LOCAL
from engram.kernel.errors import LimitReached, SandboxUnavailable, StateConflict
from engram.kernel.settings import Settings
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from engram.sandboxes import making, reaper, rows
from engram.sandboxes.driver import Command
from engram.sandboxes.lifecycle import ALIVE, SANDBOX
from engram.sandboxes.reaper import Reaped, reap
from engram.sandboxes.rows import Wanted
from engram.sandboxes.sandlock_driver import SandlockDriver
from engram.sandboxes.service import Sandboxes
from sandboxes.driver_contract import a_marker, is_running, until

pytestmark = pytest.mark.anyio

WANTED = Wanted("ada", "default", {}, 600)


@pytest.fixture
async def boxes(db: AsyncExecutor, driver: SandlockDriver, settings: Settings) -> AsyncIterator[Sandboxes]:
    boxes = Sandboxes(db, lambda database: driver, settings)
    yield boxes
    await boxes.close()


def changed(dsn: str, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement.encode())


async def status(boxes: Sandboxes, sandbox_id: str) -> str:
    return (await boxes.get("ada", sandbox_id)).status


async def test_what_is_past_its_time_ends_with_what_runs_in_it(
    boxes: Sandboxes, db: AsyncExecutor, driver: SandlockDriver, dsn: str
) -> None:
    over, still, stopped = str(uuid4()), str(uuid4()), str(uuid4())
    for sandbox_id in (over, still, stopped):
        await boxes.create("ada", sandbox_id, "default", None, {})
    await boxes.stop("ada", stopped)
    marker = a_marker()
    running = asyncio.create_task(boxes.run("ada", over, Command(["sleep", marker], 60)))
    await until(marker, running=True)
    changed(dsn, f"UPDATE sandboxes.sandboxes SET expires_at = now() WHERE id IN ('{over}', '{stopped}')")
    assert await reap(db, driver) == Reaped(expired=2, removed=2)
    assert (await running).ended_by == "stop"
    assert not is_running(marker)
    assert [await status(boxes, one) for one in (over, still, stopped)] == ["expired", "ready", "expired"]
    assert await driver.known() == [still]
    assert await reap(db, driver) == Reaped()


async def test_many_reapers_at_once_do_each_thing_once(
    boxes: Sandboxes, db: AsyncExecutor, driver: SandlockDriver, dsn: str
) -> None:
    ids = [str(uuid4()) for _ in range(6)]
    for sandbox_id in ids:
        await boxes.create("ada", sandbox_id, "default", None, {})
    changed(dsn, "UPDATE sandboxes.sandboxes SET expires_at = now()")
    done = await asyncio.gather(*(reap(db, driver) for _ in range(5)))
    assert sum(one.expired for one in done) == 6
    assert await driver.known() == []


async def test_half_made_ones_are_finished_if_they_are_whole_and_failed_if_not(
    boxes: Sandboxes, db: AsyncExecutor, driver: SandlockDriver, dsn: str
) -> None:
    whole, bare, young, elsewhere = (str(uuid4()) for _ in range(4))
    host = making.this_host()
    for sandbox_id in (whole, bare, young, elsewhere):
        where = "another-host" if sandbox_id == elsewhere else host
        await db.run(rows.begin(sandbox_id, WANTED, host=where, at_most=50))
    await driver.create(whole)
    changed(
        dsn,
        f"UPDATE sandboxes.sandboxes SET begun_at = begun_at - interval '2 minutes' WHERE id <> '{young}'",
    )
    assert await reap(db, driver) == Reaped(finished=1, failed=1)
    found = [await status(boxes, one) for one in (whole, bare, young, elsewhere)]
    assert found == ["ready", "failed", "creating", "creating"]
    assert (await boxes.get("ada", bare)).reason == "left half-made"
    changed(dsn, "UPDATE sandboxes.sandboxes SET begun_at = begun_at - interval '1 hour'")
    await reap(db, driver)
    assert await status(boxes, elsewhere) == "failed", "nobody looks after it"
    again = await boxes.create("ada", bare, "default", None, {})
    assert (again.status, again.reason) == ("ready", None), "the same request makes it anew"


async def test_a_folder_is_removed_only_if_no_living_row_has_its_id(
    boxes: Sandboxes, db: AsyncExecutor, driver: SandlockDriver, sandbox_dir: Path
) -> None:
    unknown, living = str(uuid4()), str(uuid4())
    await driver.create(unknown)
    await boxes.create("ada", living, "default", None, {})
    leftover = sandbox_dir / "db" / f".gone-{uuid4()}-abcd"
    leftover.mkdir()
    stranger = sandbox_dir / "db" / "notes"
    stranger.mkdir()
    assert await reap(db, driver) == Reaped(removed=1)
    assert await driver.known() == [living]
    assert not leftover.exists()
    assert stranger.exists(), "what is not named like a sandbox is none of ours"


async def test_rows_that_ended_long_ago_are_forgotten(
    boxes: Sandboxes, db: AsyncExecutor, driver: SandlockDriver, dsn: str
) -> None:
    old, new = str(uuid4()), str(uuid4())
    for sandbox_id in (old, new):
        await boxes.create("ada", sandbox_id, "default", None, {})
        await boxes.delete("ada", sandbox_id)
    changed(dsn, f"UPDATE sandboxes.sandboxes SET ended_at = now() - interval '8 days' WHERE id = '{old}'")
    assert await reap(db, driver) == Reaped(forgotten=1)
    assert [row.id for row in await boxes.page("ada")] == [new]


async def test_a_hundred_at_once_are_let_in_up_to_the_limit(
    db: AsyncExecutor, driver: SandlockDriver, settings: Settings
) -> None:
    """A count that did not wait for its rivals would let them all in."""
    begun = await asyncio.gather(
        *(db.run(rows.begin(str(uuid4()), WANTED, host="h", at_most=7)) for _ in range(100))
    )
    assert sum(row is not None for row in begun) == 7
    twins = str(uuid4())
    both = await asyncio.gather(
        *(db.run(rows.begin(twins, replace(WANTED, owner="bob"), host="h", at_most=1)) for _ in range(10))
    )
    assert {row.id for row in both if row} == {twins}
    assert None not in both, "nobody is refused because of its own twin"
    with pytest.raises(LimitReached):
        await making.make(db, driver, str(uuid4()), WANTED, at_most=7)


async def test_what_cannot_be_made_is_failed_and_can_be_made_later(
    boxes: Sandboxes, driver: SandlockDriver, sandbox_dir: Path
) -> None:
    await driver.why_not()
    sandbox_id = str(uuid4())
    in_the_way = sandbox_dir / "db" / sandbox_id
    in_the_way.write_text("a file where the folder should be")
    with pytest.raises(SandboxUnavailable):
        await boxes.create("ada", sandbox_id, "default", None, {})
    assert await status(boxes, sandbox_id) == "failed"
    in_the_way.unlink()
    assert (await boxes.create("ada", sandbox_id, "default", None, {})).status == "ready"


async def test_one_that_was_failed_meanwhile_is_not_called_ready(
    db: AsyncExecutor, driver: SandlockDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reaper was quicker than a very slow making."""
    sandbox_id = str(uuid4())
    create = driver.create

    async def slow(one: str) -> None:
        await create(one)
        await db.run(rows.fail(one, "left half-made"))

    monkeypatch.setattr(driver, "create", slow)
    with pytest.raises(SandboxUnavailable, match="took too long"):
        await making.make(db, driver, sandbox_id, WANTED, at_most=50)
    assert await reap(db, driver) == Reaped(removed=1)


@pytest.mark.parametrize(("ended", "answered"), [("failed", None), ("deleted", "deleted")])
async def test_with_a_key_too_one_that_was_ended_meanwhile_is_not_called_ready(
    settings: Settings, db: AsyncExecutor, monkeypatch: pytest.MonkeyPatch, ended: str, answered: str | None
) -> None:
    """The last step comes too late: nothing is stored with it, and what became of it is told."""
    async with open_services(settings) as services:
        driver = await services.sandboxes._working_driver()
        create = driver.create

        async def slow(one: str) -> None:
            await create(one)
            await db.run(rows.fail(one, "left half-made") if ended == "failed" else rows.delete(one, "local"))

        arguments = {"idempotency_key": "key-1"}
        with monkeypatch.context() as patched:
            patched.setattr(driver, "create", slow)
            if answered is None:
                with pytest.raises(SandboxUnavailable, match="took too long"):
                    await call(services, "sandbox_create", arguments, LOCAL)
            else:
                assert (await call(services, "sandbox_create", arguments, LOCAL)).body["status"] == answered
        again = await call(services, "sandbox_create", arguments, LOCAL)
        assert (again.replayed, again.body["status"]) == (answered is not None, answered or "ready")


async def test_every_change_is_in_the_table_and_no_other_is_possible(
    boxes: Sandboxes, db: AsyncExecutor, dsn: str
) -> None:
    """Each statement, in each state: what it does is what the table allows."""
    changes = {
        "finish": lambda one: rows.finish(one),
        "fail": lambda one: rows.fail(one, "x"),
        "stop": lambda one: rows.stop(one, "ada"),
        "delete": lambda one: rows.delete(one, "ada"),
        "extend": lambda one: rows.extend(one, "ada", 60),
    }
    for state in SANDBOX.states:
        for event, change in changes.items():
            sandbox_id = str(uuid4())
            await db.run(rows.begin(sandbox_id, WANTED, host="h", at_most=1000))
            ended = "now()" if state not in ALIVE else "NULL"
            changed(
                dsn,
                f"UPDATE sandboxes.sandboxes SET status = '{state}', ready_at = now(), reason = 'x',"
                f" ended_at = {ended} WHERE id = '{sandbox_id}'",
            )
            done = await db.run(change(sandbox_id))
            after = await status(boxes, sandbox_id)
            assert done is (state in SANDBOX.sources(event)), (event, state)
            assert SANDBOX.allows(state, after) or after == state, (event, state, after)
            assert not await db.run(rows.delete(sandbox_id, "bob")), "somebody else's"


async def test_the_database_knows_the_same_states(dsn: str) -> None:
    with connect(dsn) as connection:
        found = connection.execute(
            "SELECT pg_get_constraintdef(oid) AS d FROM pg_constraint WHERE conname = 'sandbox_status_known'"
        ).fetchone()
    assert found is not None
    assert set(re.findall(r"'(\w+)'", found["d"])) == set(SANDBOX.states)


async def test_a_diagram_is_in_the_documentation() -> None:
    document = (Path(__file__).parents[2] / "docs" / "sandboxes.md").read_text("utf-8")
    assert f"```mermaid\n{SANDBOX.mermaid()}```" in document
    for state, meaning in SANDBOX.meanings.items():
        assert f"| `{state}` | {meaning} |" in document


async def test_a_reaper_that_fails_goes_on_later(
    boxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> Reaped:
        raise StateConflict("no")

    monkeypatch.setattr(reaper, "reap", broken)
    assert await boxes.reap_quietly() == 0
    assert "sandboxes.reaper_failed" in caplog.text
