"""A repeated call has one effect and one answer, however it came in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from mcp import Client

from engram.postgres.pool import connect
from support.faults import Fault, Order

CALL = {"payload_md": "A fact.", "actor_user_id": "ada"}


def audits(dsn: str) -> int:
    with connect(dsn) as connection:
        row = connection.execute("SELECT count(*) AS n FROM governance.write_audit").fetchone()
    assert row is not None
    return row["n"]


def test_a_repeat_gets_the_first_answer_and_writes_nothing(http: httpx2.Client, dsn: str) -> None:
    headers = {"Idempotency-Key": "key-1"}
    first = http.post("/memory/store", json=CALL, headers=headers)
    again = http.post("/memory/store", json=CALL, headers=headers)
    assert first.json() == again.json()
    assert not first.json()["deduplicated"]
    assert "Idempotency-Replayed" not in first.headers
    assert again.headers["Idempotency-Replayed"] == "true"
    assert audits(dsn) == 1


@pytest.mark.anyio
async def test_the_same_key_means_the_same_call_by_rest_bare_form_and_mcp(
    gateway: str, http: httpx2.Client, dsn: str
) -> None:
    call = {**CALL, "idempotency_key": "key-1"}
    rest = http.post("/memory/store", json=call)
    bare = http.post("/mcp", json={"tool": "memory_store", "arguments": call})
    async with Client(f"{gateway}/mcp") as client:
        tool = await client.call_tool("memory_store", call)
    assert rest.json() == bare.json() == tool.structured_content
    assert bare.headers["Idempotency-Replayed"] == "true"
    assert audits(dsn) == 1


def test_a_key_stands_for_one_request(http: httpx2.Client) -> None:
    http.post("/memory/store", json=CALL, headers={"Idempotency-Key": "key-1"})
    other = http.post(
        "/memory/store", json={**CALL, "payload_md": "Another."}, headers={"Idempotency-Key": "key-1"}
    )
    assert (other.status_code, other.json()["error_code"]) == (409, "conflict")
    assert "A fact." not in other.text


def test_owners_do_not_share_keys(http: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "key-1"}
    ada = http.post("/memory/store", json=CALL, headers=headers).json()
    bob = http.post("/memory/store", json={**CALL, "actor_user_id": "bob"}, headers=headers).json()
    assert (ada["space_written"], bob["space_written"]) == ("private:ada", "private:bob")


@pytest.mark.parametrize("key", ["", "a b", "x" * 129, "é", "a/b"])
def test_a_malformed_key_is_refused_before_any_work(http: httpx2.Client, dsn: str, key: str) -> None:
    reply = http.post("/memory/store", json={**CALL, "idempotency_key": key})
    assert reply.status_code == 400
    assert audits(dsn) == 0


def test_header_and_body_must_agree(http: httpx2.Client) -> None:
    reply = http.post(
        "/memory/store", json={**CALL, "idempotency_key": "a"}, headers={"Idempotency-Key": "b"}
    )
    assert reply.status_code == 400
    assert "idempotency_key" in reply.json()["context"]["fields"]


def test_a_deferred_answer_is_an_answer(http: httpx2.Client, backend) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    headers = {"Idempotency-Key": "key-1"}
    first = http.post("/memory/store", json=CALL, headers=headers)
    again = http.post("/memory/store", json=CALL, headers=headers)
    assert first.json()["action"] == "deferred"
    assert again.json() == first.json()


def test_a_failure_is_not_kept(http: httpx2.Client, dsn: str) -> None:
    headers = {"Idempotency-Key": "key-1"}
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE governance.write_audit ADD CONSTRAINT broken CHECK (false) NOT VALID")
    failed = http.post("/memory/store", json=CALL, headers=headers)
    assert (failed.status_code, failed.json()["error_code"]) == (503, "AUDIT_WRITE_FAILED")
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE governance.write_audit DROP CONSTRAINT broken")
    assert http.post("/memory/store", json=CALL, headers=headers).json()["action"] == "allow"


def test_many_at_once_with_one_key_get_one_answer(http: httpx2.Client, backend, dsn: str) -> None:
    with ThreadPoolExecutor(16) as threads:
        replies = list(
            threads.map(
                lambda _: http.post("/memory/store", json=CALL, headers={"Idempotency-Key": "key-1"}),
                range(32),
            )
        )
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.text for reply in replies}) == 1
    assert sum("Idempotency-Replayed" not in reply.headers for reply in replies) == 1
    assert (backend.contents(), audits(dsn)) == (["A fact."], 1)
