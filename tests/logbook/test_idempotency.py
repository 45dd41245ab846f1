"""Idempotency keys: one effect per key, whoever repeats, stalls or dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from engram.kernel.errors import (
    ConstraintViolated,
    DatabaseError,
    DatabaseUnavailable,
    InputError,
    SchemaError,
)
from engram.logbook import idempotency
from engram.logbook.idempotency import (
    Answer,
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyOutcomeUnknown,
    IdempotencyService,
    Reservation,
    fingerprint,
)
from engram.logbook.lifecycle import IDEMPOTENCY
from engram.postgres.errors import translated
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import async_pool, connect
from engram.postgres.query import Query, Statement, any_row, both

pytestmark = pytest.mark.anyio

BODY = b'{"profile": "python"}'
LEASE = 30
TTL = 1000


@pytest.fixture
async def service(db: AsyncExecutor) -> AsyncIterator[IdempotencyService]:
    service = IdempotencyService(db, ttl_seconds=TTL, lease_seconds=LEASE, wait_seconds=0.05)
    yield service
    await service.drain()


async def check(service: IdempotencyService, body: bytes = BODY, **kw: Any) -> Reservation | Answer:
    return await service.check(
        **{"owner": "ann", "key": "k-1", "path": "/v1/x", "method": "POST", "body": body, **kw}
    )


async def reserve(service: IdempotencyService, **kw: Any) -> Reservation:
    held = await check(service, **kw)
    assert isinstance(held, Reservation)
    return held


def block(service: IdempotencyService, key: str | None = "k-1", **kw: Any) -> Any:
    return service.request("ann", key, path="/v1/x", method="POST", body=BODY, **kw)


def execute(dsn: str, sql: str, **params: Any) -> list[dict[str, Any]]:
    with connect(dsn) as connection:
        cursor = connection.execute(sql.encode(), params)
        return cursor.fetchall() if cursor.description else []


def rows(dsn: str) -> list[dict[str, Any]]:
    return execute(
        dsn,
        "SELECT *, ctid::text, xmin::text, xmax::text, extract(epoch FROM expires_at - now())::float8 AS left"
        " FROM logbook.idempotency_keys ORDER BY owner, key",
    )


def row(dsn: str) -> dict[str, Any]:
    (found,) = rows(dsn)
    return found


def later(dsn: str, seconds: float) -> None:
    """Move time: everything that is measured from happened `seconds` earlier."""
    execute(
        dsn,
        "UPDATE logbook.idempotency_keys SET created_at = created_at - make_interval(secs => %(s)s),"
        " locked_at = locked_at - make_interval(secs => %(s)s),"
        " expires_at = expires_at - make_interval(secs => %(s)s)",
        s=seconds,
    )


def kick_out(dsn: str) -> None:
    """Break every other connection to the database."""
    execute(
        dsn,
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


# The answer and the effect's last step, together.


def last_step(dsn: str, resource_id: str) -> Query[bool]:
    """A thing that is being made, and the query that says it is."""
    execute(dsn, "CREATE TABLE IF NOT EXISTS public.things (id text PRIMARY KEY, made boolean)")
    execute(
        dsn, "INSERT INTO public.things VALUES (%(id)s, false) ON CONFLICT (id) DO NOTHING", id=resource_id
    )
    finish = Statement(
        "things.finish",
        "UPDATE public.things SET made = true\nWHERE id = %(key)s AND NOT made\nRETURNING id;",
    )
    return Query(finish, any_row, {"key": resource_id})


def is_made(dsn: str) -> bool:
    return bool(execute(dsn, "SELECT made FROM public.things")[0]["made"])


async def test_the_last_step_and_the_answer_are_one_transaction(
    service: IdempotencyService, dsn: str
) -> None:
    async with block(service) as request:
        answer = await request.save_with(
            last_step(dsn, request.resource_id), status_code=201, body={"id": request.resource_id}
        )
        assert answer == Answer(201, {"id": request.resource_id})
    thing = execute(dsn, "SELECT made, xmin::text FROM public.things")[0]
    assert (thing["made"], thing["xmin"]) == (True, row(dsn)["xmin"])
    assert await check(service) == Answer(201, {"id": request.resource_id}, replayed=True)


async def test_a_last_step_that_comes_too_late_keeps_no_answer(service: IdempotencyService, dsn: str) -> None:
    async with block(service) as request:
        step = last_step(dsn, request.resource_id)
        execute(dsn, "DELETE FROM public.things")
        assert await request.save_with(step, status_code=201, body={"made": True}) is None
        assert row(dsn)["status_code"] is None
        assert request.saved is False
        await request.save(status_code=410, body={"made": False})
    assert await check(service) == Answer(410, {"made": False}, replayed=True)


async def test_a_last_step_too_late_and_nothing_saved_is_resumed_by_the_next(
    service: IdempotencyService, dsn: str
) -> None:
    async with block(service) as request:
        step = last_step(dsn, request.resource_id)
        execute(dsn, "DELETE FROM public.things")
        assert await request.save_with(step, status_code=201, body={}) is None
    again = await reserve(service)
    assert (again.resumed, again.resource_id) == (True, request.resource_id)


async def test_a_stalled_holder_takes_its_last_step_and_gives_its_successors_answer(
    service: IdempotencyService, dsn: str
) -> None:
    stalled = await reserve(service)
    step = last_step(dsn, stalled.resource_id)
    later(dsn, LEASE + 1)
    await service.save(await reserve(service), status_code=201, body={"by": "successor"})
    answer = await service.save_with(stalled, step, status_code=201, body={"by": "stalled"})
    assert answer == Answer(201, {"by": "successor"}, replayed=True)
    assert is_made(dsn)


async def test_a_late_holder_without_a_successor_keeps_both(service: IdempotencyService, dsn: str) -> None:
    held = await reserve(service)
    step = last_step(dsn, held.resource_id)
    later(dsn, LEASE + 1)
    assert await service.save_with(held, step, status_code=201, body={"n": 1}) == Answer(201, {"n": 1})
    assert is_made(dsn)
    assert await check(service) == Answer(201, {"n": 1}, replayed=True)


async def test_a_broken_connection_costs_neither_the_step_nor_the_answer(
    service: IdempotencyService, dsn: str
) -> None:
    async with block(service) as request:
        step = last_step(dsn, request.resource_id)
        kick_out(dsn)
        answer = await request.save_with(step, status_code=201, body={})
    assert answer == Answer(201, {})
    assert is_made(dsn)


async def test_a_step_whose_reply_was_lost_is_looked_at_and_answered_the_same(
    service: IdempotencyService, dsn: str
) -> None:
    async with block(service) as request:
        step = last_step(dsn, request.resource_id)
        saved = await request.save_with(step, status_code=201, body={"n": 1})
        assert await request.save_with(step, status_code=201, body={"n": 1}) is None, "as if told again"
        assert await request.save(status_code=201, body={"n": 1}) == saved
    assert await check(service) == Answer(201, {"n": 1}, replayed=True)


async def test_without_a_key_there_is_nothing_to_keep_a_step_with(
    service: IdempotencyService, dsn: str
) -> None:
    async with block(service, None) as request:
        with pytest.raises(ValueError, match="without a key"):
            await request.save_with(last_step(dsn, "x"), status_code=201, body={})


@pytest.mark.parametrize("text", ["SELECT 1;", "UPDATE t SET a = 1;", "DELETE FROM t\nRETURNING a;"])
async def test_only_updates_that_say_whether_they_applied_are_put_together(text: str) -> None:
    good = Query(Statement("t.good", "UPDATE t SET a = 1\nWHERE a = 0\nRETURNING a;"), any_row)
    for pair in [
        (Query(Statement("t.bad", text), any_row), good),
        (good, Query(Statement("t.bad", text), any_row)),
    ]:
        with pytest.raises(ValueError, match="two updates"):
            both(*pair)


# Two at once.


async def test_who_comes_while_the_first_is_reserving_does_not_take_its_lease(
    db: AsyncExecutor, dsn: str
) -> None:
    """It sees no row when it begins, and meets the first one's when that is committed."""
    asked = idempotency.Asked("ann", "k-1", fingerprint("POST", "/v1/x", BODY), resumable=True)
    first, second = (
        idempotency.reserve(asked, name, lease_seconds=LEASE, ttl_seconds=TTL) for name in ("first", "second")
    )
    with connect(dsn) as other:
        with other.transaction():
            other.execute(first.statement.text.encode(), first.params)
            waiting = asyncio.create_task(db.run(second))
            await eventually(
                lambda: execute(
                    dsn,
                    "SELECT pid FROM pg_stat_activity"
                    " WHERE datname = current_database() AND wait_event_type = 'Lock'",
                )
            )
        assert await waiting is None
    assert (row(dsn)["resource_id"], row(dsn)["attempts"]) == ("first", 1)


# Reserving and replaying.


async def test_the_first_request_reserves_before_anything_happens(
    service: IdempotencyService, dsn: str
) -> None:
    held = await reserve(service)
    found = row(dsn)
    assert not held.resumed
    assert (found["resource_id"], found["lease_token"]) == (held.resource_id, held.lease_token)
    assert (found["status_code"], found["response_snapshot"], found["lease_seconds"]) == (None, None, LEASE)
    assert LEASE + TTL - 10 < found["left"] <= LEASE + TTL


async def test_a_saved_answer_is_replayed_as_it_was(service: IdempotencyService, dsn: str) -> None:
    body = {"z": 1.0, "a": ["沙箱", "nul \x00", "lone \ud800", None, 12345678901234567890], "b": {}}
    own = await service.save(await reserve(service), status_code=201, body=body)
    assert own == Answer(201, body, replayed=False)
    assert own.headers == {}
    replay = await check(service)
    assert replay == Answer(201, body, replayed=True)
    assert list(replay.body) == ["z", "a", "b"]
    assert replay.headers == {"Idempotency-Replayed": "true"}
    found = row(dsn)
    assert (found["locked_at"], found["lease_seconds"]) == (None, None)
    assert TTL - 10 < found["left"] <= TTL


async def test_a_replay_writes_nothing(service: IdempotencyService, dsn: str) -> None:
    await service.save(await reserve(service), status_code=200, body={})
    before, token = row(dsn), _last_token(dsn)
    for _ in range(3):
        assert isinstance(await check(service), Answer)
    assert {**row(dsn), "left": 0} == {**before, "left": 0}
    assert _last_token(dsn) == token


async def test_waiting_for_a_running_twin_writes_nothing(service: IdempotencyService, dsn: str) -> None:
    await reserve(service)
    before = row(dsn)
    with pytest.raises(IdempotencyInProgress):
        await check(service)
    assert {**row(dsn), "left": 0} == {**before, "left": 0}


def _last_token(dsn: str) -> int:
    return execute(dsn, "SELECT last_value FROM logbook.lease_token_seq")[0]["last_value"]


async def test_client_errors_are_answers_too(service: IdempotencyService) -> None:
    await service.save(await reserve(service), status_code=404, body={"error": "no such profile"})
    assert await check(service) == Answer(404, {"error": "no such profile"}, replayed=True)


async def test_the_caller_may_draw_the_resource_id(service: IdempotencyService) -> None:
    ids = iter(["sbx-1", "sbx-2"])
    first = await reserve(service, new_id=lambda: next(ids))
    assert first.resource_id == "sbx-1"
    await service.release(first)
    assert (await reserve(service, new_id=lambda: next(ids))).resource_id == "sbx-1"


# What a key stands for.


@pytest.mark.parametrize("finished", [True, False])
async def test_another_request_with_the_key_is_a_conflict_without_the_answer(
    service: IdempotencyService, dsn: str, finished: bool
) -> None:
    held = await reserve(service)
    if finished:
        await service.save(held, status_code=200, body={"secret": "s3cr3t"})
    for other in ({"body": b"{}"}, {"path": "/v1/y"}, {"method": "PUT"}, {"body": BODY + b" "}):
        with pytest.raises(IdempotencyMismatch) as refused:
            await check(service, **other)
        assert (refused.value.code, refused.value.http_status) == ("conflict", 409)
        assert "s3cr3t" not in f"{refused.value} {refused.value.context}"
    assert row(dsn)["lease_token"] == held.lease_token


async def test_an_unfinished_key_is_not_taken_over_by_another_request(
    service: IdempotencyService, dsn: str
) -> None:
    await reserve(service)
    later(dsn, LEASE + 1)
    with pytest.raises(IdempotencyMismatch):
        await check(service, body=b"{}")


async def test_owners_have_keys_of_their_own(service: IdempotencyService, dsn: str) -> None:
    mine = await reserve(service)
    await service.save(mine, status_code=200, body="mine")
    theirs = await reserve(service, owner="bob", body=b"{}")
    assert theirs.resource_id != mine.resource_id
    assert await service.save(theirs, status_code=200, body="theirs") == Answer(200, "theirs")
    assert await check(service) == Answer(200, "mine", replayed=True)
    assert len(rows(dsn)) == 2


MALFORMED = ["", "a" * 129, "a b", "a\n", "k\x00", "é", "١", "../x", "a.b", "k;--", " k", "Ａ"]


async def test_a_malformed_key_is_refused_before_any_work(service: IdempotencyService, dsn: str) -> None:
    for key in MALFORMED:
        with pytest.raises(InputError) as refused:
            async with block(service, key):
                raise AssertionError("the block must not run")
        assert refused.value.http_status == 400
        assert "idempotency_key" in refused.value.context["fields"]
    assert rows(dsn) == []


async def test_well_formed_keys(service: IdempotencyService) -> None:
    for key in ("a", "-", "_", "Z9", "a" * 128):
        assert not (await reserve(service, key=key)).resumed


def test_no_two_requests_have_one_fingerprint() -> None:
    split = [("POST", "/a", b"b"), ("POST", "/ab", b""), ("POS", "T/a", b"b"), ("", "POST/a", b"b")]
    assert len({fingerprint(*request) for request in split}) == len(split)
    assert re.fullmatch("[0-9a-f]{64}", fingerprint(*split[0]))
    assert fingerprint("POST", "/a", "é") == fingerprint("POST", "/a", "é".encode())


# Time.


async def test_past_its_time_a_key_is_new_for_any_request(service: IdempotencyService, dsn: str) -> None:
    first = await reserve(service)
    await service.save(first, status_code=200, body="old")
    later(dsn, TTL + 1)
    again = await reserve(service, body=b"another")
    assert not again.resumed
    assert again.resource_id != first.resource_id
    found = row(dsn)
    assert (found["status_code"], found["response_snapshot"], found["attempts"]) == (None, None, 1)
    assert found["created_at"] == found["locked_at"]


async def test_the_time_runs_from_completion(service: IdempotencyService, dsn: str) -> None:
    held = await reserve(service)
    later(dsn, TTL)
    await service.renew(held)
    await service.save(held, status_code=200, body="late")
    later(dsn, TTL - 10)
    assert await check(service) == Answer(200, "late", replayed=True)


async def test_an_abandoned_reservation_expires_one_ttl_after_its_last_lease(
    service: IdempotencyService, dsn: str
) -> None:
    first = await reserve(service)
    later(dsn, 20)
    assert await service.renew(first)
    later(dsn, LEASE + TTL - 10)
    second = await reserve(service)
    assert (second.resumed, second.resource_id) == (True, first.resource_id)
    later(dsn, LEASE + TTL + 1)
    third = await reserve(service, body=b"another")
    assert not third.resumed
    assert third.resource_id != first.resource_id


async def test_a_released_reservation_expires_one_ttl_later(service: IdempotencyService, dsn: str) -> None:
    await service.release(await reserve(service))
    assert TTL - 10 < row(dsn)["left"] <= TTL


# Leases.


async def test_still_running_is_409_with_a_time_to_come_back(service: IdempotencyService) -> None:
    await reserve(service)
    with pytest.raises(IdempotencyInProgress) as refused:
        await check(service)
    assert (refused.value.code, refused.value.http_status) == ("idempotency_in_progress", 409)
    assert refused.value.retryable
    assert refused.value.retry_after == refused.value.context["retry_after"] == 5


async def test_the_time_to_come_back_is_at_least_a_second(db: AsyncExecutor) -> None:
    service = IdempotencyService(db, lease_seconds=0.9, wait_seconds=0)
    await reserve(service)
    with pytest.raises(IdempotencyInProgress) as refused:
        await check(service)
    assert refused.value.retry_after == 1


async def test_a_repeat_waits_for_the_running_one_without_a_connection(dsn: str) -> None:
    async with async_pool(dsn, max_size=1) as pool:
        service = IdempotencyService(AsyncExecutor(pool), wait_seconds=20)
        held = await reserve(service)
        waiting = asyncio.create_task(check(service))
        await asyncio.sleep(0)
        await service.save(held, status_code=200, body="done")
        assert await waiting == Answer(200, "done", replayed=True)


async def test_after_the_lease_the_same_request_resumes_with_the_same_resource(
    service: IdempotencyService, dsn: str
) -> None:
    first = await reserve(service)
    created = row(dsn)["created_at"]
    later(dsn, LEASE - 5)
    with pytest.raises(IdempotencyInProgress):
        await check(service)
    later(dsn, 6)
    second = await reserve(service)
    assert (second.resumed, second.resource_id) == (True, first.resource_id)
    assert second.lease_token > first.lease_token
    assert row(dsn)["attempts"] == 2
    assert row(dsn)["created_at"] < created


async def test_a_renewed_lease_is_not_taken(service: IdempotencyService, dsn: str) -> None:
    held = await reserve(service)
    later(dsn, LEASE - 5)
    assert await service.renew(held)
    later(dsn, LEASE - 5)
    with pytest.raises(IdempotencyInProgress):
        await check(service)


async def test_a_stalled_holder_neither_overwrites_nor_renews_nor_releases_and_gets_its_successors_answer(
    service: IdempotencyService, dsn: str
) -> None:
    stalled = await reserve(service)
    later(dsn, LEASE + 1)
    successor = await reserve(service)
    before = row(dsn)
    assert not await service.renew(stalled)
    assert not await service.release(stalled)
    with pytest.raises(IdempotencyInProgress):
        await service.save(stalled, status_code=200, body="stalled")
    with pytest.raises(IdempotencyInProgress):
        await service.save(stalled, status_code=503, body="stalled")
    assert {**row(dsn), "left": 0} == {**before, "left": 0}
    assert await service.save(successor, status_code=201, body="successor") == Answer(201, "successor")
    answer = Answer(201, "successor", replayed=True)
    assert await service.save(stalled, status_code=200, body="stalled") == answer
    assert await service.save(stalled, status_code=503, body="stalled") == answer
    assert await check(service) == answer


async def test_a_stalled_holder_waits_for_its_successor(db: AsyncExecutor, dsn: str) -> None:
    service = IdempotencyService(db, lease_seconds=LEASE, wait_seconds=20)
    stalled = await reserve(service)
    later(dsn, LEASE + 1)
    successor = await reserve(service)
    saving = asyncio.create_task(service.save(stalled, status_code=200, body="stalled"))
    await asyncio.sleep(0.05)
    await service.save(successor, status_code=200, body="successor")
    assert await saving == Answer(200, "successor", replayed=True)


async def test_a_lease_that_is_over_cannot_complete_by_itself(
    service: IdempotencyService, db: AsyncExecutor, dsn: str
) -> None:
    held = await reserve(service)
    later(dsn, LEASE + 1)
    assert not await db.run(idempotency.complete(held, Answer(200, {}), ttl_seconds=TTL))


async def test_a_late_holder_saves_if_nobody_has_taken_the_key(service: IdempotencyService, dsn: str) -> None:
    held = await reserve(service)
    later(dsn, LEASE + 1)
    assert await service.save(held, status_code=200, body="late") == Answer(200, "late")
    assert await check(service) == Answer(200, "late", replayed=True)


@pytest.mark.parametrize("body", [BODY, b"another"])
async def test_a_holder_whose_key_was_used_anew_keeps_its_own_answer(
    service: IdempotencyService, dsn: str, body: bytes
) -> None:
    late = await reserve(service)
    later(dsn, LEASE + TTL + 1)
    await service.save(await reserve(service, body=body), status_code=200, body="new")
    assert await service.save(late, status_code=200, body="late") == Answer(200, "late")
    assert await check(service, body=body) == Answer(200, "new", replayed=True)


async def test_past_its_time_a_key_is_not_brought_back_by_its_holder(
    service: IdempotencyService, dsn: str
) -> None:
    late = await reserve(service)
    later(dsn, LEASE + TTL + 1)
    before = row(dsn)
    assert not await service.renew(late)
    assert not await service.release(late)
    assert await service.save(late, status_code=200, body="late") == Answer(200, "late")
    assert {**row(dsn), "left": 0} == {**before, "left": 0}


async def test_a_holder_whose_key_was_swept_keeps_its_own_answer(
    service: IdempotencyService, db: AsyncExecutor, dsn: str
) -> None:
    late = await reserve(service)
    later(dsn, LEASE + TTL + 1)
    assert await db.run(idempotency.sweep()) == 1
    assert await service.save(late, status_code=200, body="late") == Answer(200, "late")
    assert rows(dsn) == []


# Answers that are not kept.


async def test_a_passing_failure_is_not_stored_but_the_resource_id_stays(
    service: IdempotencyService, dsn: str
) -> None:
    first = await reserve(service)
    for status in (408, 425, 429, 500, 502, 503, 504, 599):
        held = first if status == 408 else await reserve(service)
        assert held.resumed is (status != 408)
        assert held.resource_id == first.resource_id
        assert await service.save(held, status_code=status, body="later") == Answer(status, "later")
        assert (row(dsn)["status_code"], row(dsn)["locked_at"]) == (None, None)
    assert await service.save(await reserve(service), status_code=200, body="done") == Answer(200, "done")


async def test_a_released_lease_is_over_for_good(service: IdempotencyService, dsn: str) -> None:
    held = await reserve(service)
    assert await service.release(held)
    assert not await service.renew(held)
    assert not await service.release(held)
    await service.save(held, status_code=200, body="too late")
    assert row(dsn)["status_code"] is None


# What must not run twice.


@pytest.mark.parametrize("ended", ["crash", "release", "503"])
async def test_what_cannot_be_resumed_is_never_run_again(
    service: IdempotencyService, dsn: str, ended: str
) -> None:
    held = await reserve(service, resumable=False)
    if ended == "crash":
        with pytest.raises(IdempotencyInProgress):
            await check(service, resumable=False)
        later(dsn, LEASE + 1)
    elif ended == "release":
        await service.release(held)
    else:
        await service.save(held, status_code=503, body={})
    for _ in range(2):
        with pytest.raises(IdempotencyOutcomeUnknown) as refused:
            await check(service, resumable=False)
    assert (refused.value.code, refused.value.http_status) == ("idempotency_outcome_unknown", 409)
    assert not refused.value.retryable


async def test_the_statement_itself_does_not_resume_what_must_not_run_twice(
    service: IdempotencyService, db: AsyncExecutor, dsn: str
) -> None:
    await reserve(service, resumable=False)
    later(dsn, LEASE + 1)
    asked = idempotency.Asked("ann", "k-1", fingerprint("POST", "/v1/x", BODY), resumable=False)
    found = await db.run(idempotency.reserve(asked, "r", lease_seconds=LEASE, ttl_seconds=TTL))
    assert isinstance(found, idempotency.Found)
    assert found.status_code is None


async def test_what_cannot_be_resumed_still_replays_and_expires(
    service: IdempotencyService, dsn: str
) -> None:
    held = await reserve(service, resumable=False)
    later(dsn, LEASE + 1)
    await service.save(held, status_code=200, body={"exit_code": 0})
    assert await check(service, resumable=False) == Answer(200, {"exit_code": 0}, replayed=True)
    later(dsn, TTL + 1)
    assert not (await reserve(service, resumable=False)).resumed


# The block.


async def route(service: IdempotencyService, effect: Callable[[str], Awaitable[Any]], **kw: Any) -> Answer:
    async with block(service, **kw) as request:
        if request.replayed:
            return request.response
        return await request.save(status_code=201, body=await effect(request.resource_id))


class Effect:
    """Counts its runs."""

    def __init__(self) -> None:
        self.made: list[str] = []

    async def __call__(self, resource_id: str) -> dict[str, str]:
        self.made.append(resource_id)
        return {"id": resource_id}


async def test_a_route_has_its_effect_once(service: IdempotencyService) -> None:
    effect = Effect()
    first = await route(service, effect)
    again = await route(service, effect)
    assert len(effect.made) == 1
    assert (first.status_code, first.body, first.replayed) == (201, {"id": effect.made[0]}, False)
    assert (again.status_code, again.body, again.replayed) == (201, first.body, True)


async def test_without_a_key_the_block_just_runs(service: IdempotencyService, dsn: str) -> None:
    effect = Effect()
    answers = [await route(service, effect, key=None) for _ in range(2)]
    assert len(set(effect.made)) == 2
    assert [answer.replayed for answer in answers] == [False, False]
    assert rows(dsn) == []


async def test_an_exception_releases_and_the_next_try_resumes(service: IdempotencyService, dsn: str) -> None:
    effect = Effect()

    async def failing(resource_id: str) -> None:
        await effect(resource_id)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await route(service, failing)
    async with block(service) as request:
        assert (request.resumed, request.resource_id, request.replayed) == (True, effect.made[0], False)
    assert row(dsn)["locked_at"] is None, "a block that saves nothing releases too"


async def test_an_answer_that_is_not_json_is_not_half_saved(service: IdempotencyService, dsn: str) -> None:
    for body in (object(), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            async with block(service) as request:
                await request.save(status_code=200, body=body)
        assert (row(dsn)["status_code"], row(dsn)["locked_at"]) == (None, None)


async def test_the_lease_is_renewed_while_the_effect_runs(db: AsyncExecutor, dsn: str) -> None:
    service = IdempotencyService(db, lease_seconds=3.0, wait_seconds=0)
    seen: set[Any] = set()

    def renewed_thrice() -> bool:
        seen.add(row(dsn)["locked_at"])
        return len(seen) == 4

    async with block(service) as request:
        await eventually(renewed_thrice)
        with pytest.raises(IdempotencyInProgress):
            await check(service)
        await request.save(status_code=200, body={})
    assert row(dsn)["attempts"] == 1


async def test_renewal_survives_a_broken_connection(db: AsyncExecutor, dsn: str) -> None:
    service = IdempotencyService(db, lease_seconds=3.0)
    async with block(service):
        before = row(dsn)["locked_at"]
        kick_out(dsn)
        await eventually(lambda: row(dsn)["locked_at"] > before)
    assert row(dsn)["attempts"] == 1, "renewed, not taken anew"


async def test_a_cancelled_block_leaves_a_reservation_to_resume(
    service: IdempotencyService, dsn: str
) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with block(service):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    first = row(dsn)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    second = await reserve(service)
    assert (second.resumed, second.resource_id) == (True, first["resource_id"])


async def test_a_cancelled_scope_releases_too(dsn: str) -> None:
    """anyio cancels every await inside the scope, the release's too; it is finished all the same."""
    async with _meddled(dsn) as (service, meddler):
        meddler.hold = "idempotency_keys.release"
        with anyio.CancelScope() as scope:
            async with block(service):
                scope.cancel()
                await anyio.sleep_forever()
        meddler.let_go.set()
        await service.drain()
        assert (row(dsn)["status_code"], row(dsn)["locked_at"]) == (None, None)


async def test_a_save_goes_on_though_its_caller_is_cancelled(dsn: str) -> None:
    async with _meddled(dsn) as (service, meddler):
        meddler.hold = "idempotency_keys.complete"
        task = asyncio.create_task(route(service, Effect()))
        await meddler.held.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        meddler.let_go.set()
        await service.drain()
        assert row(dsn)["status_code"] == 201
        assert (await route(service, Effect())).replayed


# The database fails.


class Meddler(AsyncExecutor):
    """Real statements; the reply to one gets lost, or one is held back."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.lose: str | None = None
        self.hold: str | None = None
        self.held, self.let_go = asyncio.Event(), asyncio.Event()

    async def run(self, query: Query[Any]) -> Any:
        if query.statement.name == self.hold:
            self.held.set()
            await self.let_go.wait()
        result = await super().run(query)
        if query.statement.name == self.lose:
            self.lose = None
            raise DatabaseUnavailable("the reply was lost")
        return result


@asynccontextmanager
async def _meddled(dsn: str) -> AsyncIterator[tuple[IdempotencyService, Meddler]]:
    async with async_pool(dsn) as pool:
        meddler = Meddler(pool)
        yield IdempotencyService(meddler, lease_seconds=LEASE, wait_seconds=0.05), meddler


@pytest.mark.parametrize("status", [200, 503])
async def test_a_settle_whose_reply_was_lost_is_recognised(dsn: str, status: int) -> None:
    async with _meddled(dsn) as (service, meddler):
        held = await reserve(service)
        meddler.lose = "idempotency_keys.complete" if status == 200 else "idempotency_keys.release"
        assert await service.save(held, status_code=status, body="x") == Answer(status, "x")
        assert row(dsn)["status_code"] == (200 if status == 200 else None)


async def test_a_reservation_whose_reply_was_lost_is_resumed_after_its_lease(dsn: str) -> None:
    async with _meddled(dsn) as (service, meddler):
        meddler.lose = "idempotency_keys.reserve"
        with pytest.raises(DatabaseUnavailable):
            await check(service)
        first = row(dsn)["resource_id"]
        later(dsn, LEASE + 1)
        assert (await reserve(service)).resource_id == first


async def test_a_save_whose_connection_breaks_is_tried_once_more(db: AsyncExecutor) -> None:
    class Breaking(AsyncExecutor):
        broken = 0

        async def run(self, query: Query[Any]) -> Any:
            if query.statement.name == "idempotency_keys.complete" and not self.broken:
                self.broken += 1
                raise DatabaseUnavailable("the connection broke")
            return await super().run(query)

    breaking = Breaking(db.pool)
    service = IdempotencyService(breaking, ttl_seconds=TTL, lease_seconds=LEASE)
    async with block(service) as request:
        answer = await request.save(status_code=201, body={"n": 1})
    assert (breaking.broken, answer) == (1, Answer(201, {"n": 1}))
    assert await check(service) == Answer(201, {"n": 1}, replayed=True)


async def test_a_broken_connection_does_not_cost_the_answer(service: IdempotencyService, dsn: str) -> None:
    async def effect(resource_id: str) -> dict[str, str]:
        kick_out(dsn)
        return {"id": resource_id}

    first = await route(service, effect)
    assert await route(service, effect) == Answer(201, first.body, replayed=True)


async def test_a_database_that_refuses_is_an_error_of_ours_and_loses_nothing(
    service: IdempotencyService, dsn: str
) -> None:
    effect = Effect()

    async def breaking(resource_id: str) -> Any:
        execute(dsn, "ALTER TABLE logbook.idempotency_keys RENAME TO gone")
        return await effect(resource_id)

    with pytest.raises(SchemaError):
        await route(service, breaking)
    with pytest.raises(SchemaError):
        await route(service, effect)
    execute(dsn, "ALTER TABLE logbook.gone RENAME TO idempotency_keys")
    later(dsn, LEASE + 1)
    assert (await route(service, effect)).body == {"id": effect.made[0]}
    assert len(set(effect.made)) == 1


async def test_no_database_at_all_is_an_error_of_ours(db: AsyncExecutor) -> None:
    service = IdempotencyService(db)
    await db.pool.close()
    with pytest.raises(DatabaseUnavailable):
        await check(service)


# Many at once, and sudden death.

SCRIPT = """
import asyncio, json, os, signal, sys
from engram.logbook.idempotency import IdempotencyService
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import async_pool, connect

dsn, key, repeats, die = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def reached(place):
    if place == die:
        os.kill(os.getpid(), signal.SIGKILL)

async def effect(resource_id):
    with connect(dsn) as connection:
        connection.execute("INSERT INTO effects VALUES (%s) ON CONFLICT DO NOTHING", [resource_id])
        connection.execute("INSERT INTO runs VALUES (%s)", [resource_id])
    await asyncio.sleep(0.05)
    return {"id": resource_id}

async def route(service):
    reached("before_reserve")
    async with service.request("ann", key, path="/v1/x", method="POST", body=b"{}") as request:
        reached("after_reserve")
        if request.replayed:
            return request.response
        body = await effect(request.resource_id)
        reached("after_effect")
        answer = await request.save(status_code=201, body=body)
        reached("after_save")
        return answer

async def together():
    # Say that this process is here, and begin when all are.
    with connect(dsn) as connection:
        connection.execute("INSERT INTO present VALUES (%s)", [os.getpid()])
        while connection.execute("SELECT count(*) AS n FROM present").fetchone()["n"] < 3:
            await asyncio.sleep(0.005)

async def main():
    if repeats > 1:
        await together()
    async with async_pool(dsn, max_size=8) as pool:
        service = IdempotencyService(AsyncExecutor(pool), lease_seconds=30)
        answers = await asyncio.gather(*(route(service) for _ in range(repeats)))
        print(json.dumps([[a.status_code, a.body, a.replayed] for a in answers]))
        await service.drain()

asyncio.run(main())
"""


@pytest.fixture
def recorded(dsn: str) -> str:
    """A database that also keeps what the effect did, and how often it ran."""
    execute(dsn, "CREATE TABLE effects (resource_id text PRIMARY KEY)")
    execute(dsn, "CREATE TABLE runs (resource_id text)")
    execute(dsn, "CREATE TABLE present (pid int)")
    return dsn


def spawn(dsn: str, *, key: str = "k-1", repeats: int = 1, die: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, dsn, key, str(repeats), die],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], status: int = 0) -> list[Any]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    return json.loads(out) if out else []


async def one_of_many(service: IdempotencyService, dsn: str, key: str) -> list[Any]:
    async with service.request("ann", key, path="/v1/x", method="POST", body=b"{}") as request:
        answer = request.response
        if not request.replayed:
            execute(dsn, "INSERT INTO runs VALUES (%(id)s)", id=request.resource_id)
            await asyncio.sleep(0.05)
            answer = await request.save(status_code=201, body={"id": request.resource_id})
        return [answer.status_code, answer.body, answer.replayed]


async def test_a_hundred_requests_and_two_processes_on_one_key_have_one_effect(
    recorded: str, db: AsyncExecutor, scale: float
) -> None:
    service = IdempotencyService(db, wait_seconds=30)
    for n in range(max(1, int(scale))):
        execute(recorded, "TRUNCATE runs, present")
        others = [spawn(recorded, key=f"k-{n}", repeats=20) for _ in range(2)]
        await eventually(lambda: len(execute(recorded, "SELECT pid FROM present")) == 2)
        execute(recorded, "INSERT INTO present VALUES (0)")
        answers = await asyncio.gather(*(one_of_many(service, recorded, f"k-{n}") for _ in range(100)))
        answers += [answer for other in others for answer in await asyncio.to_thread(ended, other)]
        (run,) = execute(recorded, "SELECT resource_id FROM runs")
        assert all(answer[:2] == [201, {"id": run["resource_id"]}] for answer in answers)
        assert sorted(replayed for *_, replayed in answers) == [False] + [True] * 139


@pytest.mark.crash
@pytest.mark.parametrize(
    ("place", "runs", "resumed", "replayed"),
    [
        ("before_reserve", 1, False, False),
        ("after_reserve", 1, True, False),
        ("after_effect", 2, True, False),
        ("after_save", 1, False, True),
    ],
)
def test_killed_anywhere_the_next_try_makes_one_resource(
    recorded: str, place: str, runs: int, resumed: bool, replayed: bool
) -> None:
    ended(spawn(recorded, die=place), -signal.SIGKILL)
    left = rows(recorded)
    later(recorded, LEASE + 1)
    ((status, body, was_replayed),) = ended(spawn(recorded))
    assert (status, was_replayed) == (201, replayed)
    assert body == {"id": row(recorded)["resource_id"]}
    assert (row(recorded)["attempts"] > 1) is resumed
    assert [found["resource_id"] for found in left] in ([], [body["id"]])
    assert execute(recorded, "SELECT resource_id FROM effects") == [{"resource_id": body["id"]}]
    assert len(execute(recorded, "SELECT resource_id FROM runs")) == runs


# Cleaning up.


async def test_a_sweep_deletes_what_is_over_and_nothing_else(
    service: IdempotencyService, db: AsyncExecutor, dsn: str
) -> None:
    for n in range(5):
        await service.save(await reserve(service, key=f"done-{n}"), status_code=200, body={})
    await reserve(service, key="abandoned")
    later(dsn, TTL + 1)
    await service.save(await reserve(service, key="fresh"), status_code=200, body={})
    await reserve(service, key="running")
    assert await db.run(idempotency.sweep(limit=3)) == 3
    assert await db.run(idempotency.sweep(limit=3)) == 2
    assert await db.run(idempotency.sweep(limit=3)) == 0
    assert [found["key"] for found in rows(dsn)] == ["abandoned", "fresh", "running"]


async def test_a_sweep_passes_by_what_is_being_taken(
    service: IdempotencyService, db: AsyncExecutor, dsn: str
) -> None:
    await service.save(await reserve(service), status_code=200, body={})
    later(dsn, TTL + 1)
    with connect(dsn) as connection, connection.transaction():
        connection.execute("SELECT FROM logbook.idempotency_keys FOR UPDATE")
        assert await db.run(idempotency.sweep()) == 0
    assert await db.run(idempotency.sweep()) == 1


async def test_expired_keys_are_swept_on_the_way(
    service: IdempotencyService, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "SWEEP_EVERY", 3)
    await service.save(await reserve(service, key="old"), status_code=200, body={})
    later(dsn, TTL + 1)
    await reserve(service, key="second")
    await service.drain()
    assert "old" in [found["key"] for found in rows(dsn)]
    await reserve(service, key="third")
    await service.drain()
    assert [found["key"] for found in rows(dsn)] == ["second", "third"]


async def test_a_sweep_that_fails_harms_nobody(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "SWEEP_EVERY", 1)
    async with _meddled(dsn) as (service, meddler):
        meddler.lose = "idempotency_keys.sweep"
        await reserve(service)
        await service.drain()
        assert meddler.lose is None


# The schema and the documentation.


UNLOCKED = "locked_at = NULL, lease_seconds = NULL"
IMPOSSIBLE = {
    "key = 'a b'": "idempotency_key_well_formed",
    "request_fingerprint = 'x'": "idempotency_fingerprint_is_hex",
    "attempts = 0": "idempotency_attempts_counted",
    "lease_seconds = NULL": "idempotency_lease_is_whole",
    "lease_seconds = 0": "idempotency_lease_is_whole",
    "locked_at = NULL": "idempotency_lease_is_whole",
    f"{UNLOCKED}, status_code = 200": "idempotency_completed_has_answer",
    "response_snapshot = '{}'": "idempotency_completed_has_answer",
    "status_code = 200, response_snapshot = '{}'": "idempotency_completed_is_unlocked",
    f"{UNLOCKED}, response_snapshot = '{{}}', status_code = 0": "idempotency_answer_is_final",
    f"{UNLOCKED}, response_snapshot = '{{}}', status_code = 408": "idempotency_answer_is_final",
    f"{UNLOCKED}, response_snapshot = '{{}}', status_code = 425": "idempotency_answer_is_final",
    f"{UNLOCKED}, response_snapshot = '{{}}', status_code = 429": "idempotency_answer_is_final",
    f"{UNLOCKED}, response_snapshot = '{{}}', status_code = 500": "idempotency_answer_is_final",
}


async def test_the_schema_refuses_what_no_state_has(service: IdempotencyService, dsn: str) -> None:
    await reserve(service)
    refused = {}
    for wrong in IMPOSSIBLE:
        with pytest.raises(ConstraintViolated) as violated, translated("update"):
            execute(dsn, f"UPDATE logbook.idempotency_keys SET {wrong}")
        refused[wrong] = violated.value.constraint
    assert refused == IMPOSSIBLE


async def test_an_owner_that_cannot_be_kept_is_an_error_of_ours(service: IdempotencyService) -> None:
    with pytest.raises(DatabaseError):
        await check(service, owner="a\x00b")


def test_the_documents_diagram_is_the_state_machines_own() -> None:
    document = Path(__file__).parents[2] / "docs/idempotency.md"
    assert f"```mermaid\n{IDEMPOTENCY.mermaid()}```" in document.read_text("utf-8")
