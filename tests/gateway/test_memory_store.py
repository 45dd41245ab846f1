"""memory_store: whatever the memory server does, the write is stored or parked, and accounted for."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from engram.assembly.gateway import open_services
from engram.assembly.outbox import outbox_wake_ups
from engram.gateway.memory_store import MemoryStore
from engram.gateway.store_reply import StoreRequest
from engram.kernel.content import payload_sha
from engram.kernel.errors import AuditWriteFailed, InputError, OutboxEnqueueFailed
from engram.kernel.settings import Settings
from engram.logbook import erasures, governance, memories, outbox
from engram.logbook.config import Config
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio


def asked(text: str = "Deploy on Tuesdays.", **kw) -> StoreRequest:
    given = {"actor_user_id": "ada", "correlation_id": "corr-0123456789abcdef", **kw}
    return StoreRequest(payload_md=text, **given)


def table(dsn: str, name: str) -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute(f"SELECT * FROM {name} ORDER BY 1".encode()).fetchall()


async def test_a_store_is_allowed_and_audited(store: MemoryStore, backend, dsn: str) -> None:
    reply = await store.store(asked(kind="FACT", evidence_refs=["mr://project/123"]))
    assert (reply.ok, reply.action, reply.space_written) == (True, "allow", "private:ada")
    assert reply.evidence_refs == ["mr://project/123"]
    assert backend.contents() == ["Deploy on Tuesdays."]
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["status"], audit["memory_id"]) == ("allow", "success", reply.memory_id)
    assert audit["evidence_refs_json"]["extra"] == {
        "correlation_id": "corr-0123456789abcdef",
        "external_refs": ["mr://project/123"],
    }


async def test_evidence_is_kept_by_its_kind(store: MemoryStore, dsn: str) -> None:
    patch = f"memory://patch_blobs/git/1:abc/{'a' * 64}"
    file = f"memory://attachments/12/{'b' * 64}"
    reply = await store.store(asked(evidence_refs=[patch, file, "mr://project/123"]))
    assert reply.evidence_refs == [patch, file, "mr://project/123"]
    (audit,) = table(dsn, "governance.write_audit")
    refs = audit["evidence_refs_json"]
    assert [p["artifact_uri"] for p in refs["patches"]] == [patch]
    assert [a["artifact_uri"] for a in refs["attachments"]] == [file]
    assert refs["extra"]["external_refs"] == ["mr://project/123"]


async def test_evidence_that_is_none_is_refused_by_field(store: MemoryStore, dsn: str) -> None:
    with pytest.raises(InputError) as refused:
        await store.store(asked(evidence_refs=["memory://patch_blobs/../etc/passwd"]))
    assert "evidence_refs" in refused.value.context["fields"]
    assert table(dsn, "governance.write_audit") == []


FAILURES = [
    (Order(Fault.STATUS, 500), "server_error", False),
    (Order(Fault.STATUS, 503), "unavailable", False),
    (Order(Fault.STATUS, 401), "unauthorized", False),
    (Order(Fault.STATUS, 403), "unauthorized", False),
    (Order(Fault.STATUS, 404), "wrong_url", False),
    (Order(Fault.STATUS, 422), "refused", False),
    (Order(Fault.STATUS, 409), "client_error", False),
    (Order(Fault.STATUS, 400, {"error": "nul \x00 inside"}), "refused", False),
    (Order(Fault.STATUS, 200, {"id": "nul \x00 inside"}), "bad_response", True),
    (Order(Fault.STATUS, 429, {"retry_after": 7}), "rate_limited", False),
    (Order(Fault.HTML), "bad_response", True),
    (Order(Fault.NONSENSE), "bad_response", True),
    (Order(Fault.HUGE), "bad_response", True),
    pytest.param(Order(Fault.HANG), "timeout", True, marks=pytest.mark.impatient),
    (Order(Fault.DROP), "connection_broken", True),
    pytest.param(Order(Fault.AFTER_HANG), "timeout", True, marks=pytest.mark.impatient),
    (Order(Fault.AFTER_DROP), "connection_broken", True),
    (Order(Fault.AFTER_500), "server_error", True),
]


@pytest.mark.parametrize(("order", "reason", "ambiguous"), FAILURES, ids=lambda v: getattr(v, "fault", v))
async def test_any_failure_parks_the_write(
    store: MemoryStore, backend, dsn: str, order: Order, reason: str, ambiguous: bool
) -> None:
    backend.faults.fail(order)
    reply = await store.store(asked())
    (row,) = table(dsn, "logbook.outbox_memory")
    (audit,) = table(dsn, "governance.write_audit")
    assert (reply.ok, reply.action, reply.space_written, reply.memory_id) == (False, "deferred", None, None)
    assert reply.outbox_id == row["outbox_id"] == audit["evidence_refs_json"]["outbox_id"]
    assert reply.correlation_id == row["correlation_id"] == audit["correlation_id"]
    assert (audit["action"], audit["reason"]) == ("redirect", f"openmemory_write_failed:{reason}")
    assert row["ambiguous"] or not ambiguous


@pytest.mark.impatient
async def test_the_worker_is_kept_away_from_a_write_that_may_still_be_applied(
    store: MemoryStore, backend, dsn: str
) -> None:
    backend.faults.fail(Fault.AFTER_HANG)
    await store.store(asked("ambiguous"))
    backend.faults.fail(Order(Fault.STATUS, 401))
    await store.store(asked("plain"))
    waits = {
        r["payload_md"]: (r["next_attempt_at"] - r["created_at"]).total_seconds()
        for r in table(dsn, "logbook.outbox_memory")
    }
    assert waits["plain"] == 0
    assert waits["ambiguous"] >= 2, "the deadline of the call"


async def test_another_database_on_the_same_memory_server_is_not_taken_for_this_one(
    store: MemoryStore, backend, postgres_server, template, settings, client
) -> None:
    """Keys come from the record, not from its number, which starts at one in every database."""
    from engram.postgres.pool import async_pool
    from support.databases import fresh

    await store.store(asked("first"))
    for other in fresh(postgres_server, template):
        async with async_pool(other) as pool:
            reply = await MemoryStore(AsyncExecutor(pool), client, settings).store(asked("second"))
    assert reply.action == "allow"
    assert sorted(backend.contents()) == ["first", "second"]


async def test_the_worker_is_told_of_a_parked_write_and_of_no_other(backend, settings: Settings) -> None:
    async with open_services(settings) as services, outbox_wake_ups(settings) as heard:
        async with asyncio.timeout(5):
            await heard.wait()
        heard.clear()
        await services.store.store(asked("stored"))
        await asyncio.sleep(0.2)
        assert not heard.is_set()
        backend.faults.fail(Order(Fault.STATUS, 401))
        assert (await services.store.store(asked("parked"))).action == "deferred"
        async with asyncio.timeout(5):
            await heard.wait()


async def test_a_dead_server_parks_the_write(store: MemoryStore, client, dsn: str) -> None:
    client._http.base_url = "http://127.0.0.1:9"
    reply = await store.store(asked())
    assert reply.action == "deferred"
    (row,) = table(dsn, "logbook.outbox_memory")
    assert not row["ambiguous"], "nothing was sent"


async def test_an_open_breaker_costs_no_call(store: MemoryStore, client, backend) -> None:
    client.breaker.failed(client.breaker.admit(), at_once=True)
    reply = await store.store(asked())
    assert reply.action == "deferred"
    assert backend.faults.calls == []


async def test_the_same_content_again_is_the_same_memory(store: MemoryStore, backend) -> None:
    first = await store.store(asked())
    again = await store.store(asked())
    assert (again.action, again.deduplicated, again.memory_id) == ("allow", True, first.memory_id)
    assert backend.contents() == ["Deploy on Tuesdays."]


async def test_content_that_waits_already_is_told_its_row(store: MemoryStore, backend, dsn: str) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    first = await store.store(asked())
    again = await store.store(asked())
    assert (again.action, again.outbox_id, again.error_code) == (
        "deferred",
        first.outbox_id,
        "OUTBOX_DEDUP_HIT",
    )
    assert Counter(a["action"] for a in table(dsn, "governance.write_audit")) == {"redirect": 1, "dedup": 1}


async def test_simultaneous_twins_make_one_memory_and_all_are_answered(
    store: MemoryStore, backend, dsn: str
) -> None:
    replies = await asyncio.gather(*(store.store(asked()) for _ in range(20)))
    assert {r.action for r in replies} == {"allow"}
    assert len({r.memory_id for r in replies}) == 1
    assert len(backend.contents()) == 1
    assert Counter(a["status"] for a in table(dsn, "governance.write_audit")) == {"success": 20}


@pytest.mark.impatient
async def test_twins_of_a_write_that_fails_are_told_its_row(store: MemoryStore, backend, dsn: str) -> None:
    backend.faults.fail(Fault.HANG)
    replies = await asyncio.gather(*(store.store(asked()) for _ in range(10)))
    assert {r.action for r in replies} == {"deferred"}
    (row,) = table(dsn, "logbook.outbox_memory")
    assert {r.outbox_id for r in replies} == {row["outbox_id"]}
    assert Counter(a["action"] for a in table(dsn, "governance.write_audit")) == {"redirect": 1, "dedup": 9}


@pytest.mark.impatient
async def test_a_twin_of_a_gateway_that_died_parks_the_intent(
    store: MemoryStore, db: AsyncExecutor, dsn: str
) -> None:
    from engram.gateway import policy
    from engram.gateway.memory_store import _write_of
    from engram.gateway.spaces import private_space
    from engram.logbook import writes

    write = _write_of(asked(), "private:ada", policy.Decision(private_space("ada")))
    await db.run(writes.begin(write, deadline_seconds=0.3))
    reply = await store.store(asked())
    assert (reply.action, reply.error_code) == ("deferred", "OUTBOX_DEDUP_HIT")
    (row,) = table(dsn, "logbook.outbox_memory")
    assert row["ambiguous"]
    assert Counter(a["action"] for a in table(dsn, "governance.write_audit")) == {"redirect": 1, "dedup": 1}


async def test_a_caller_that_hangs_up_does_not_leave_the_write_half_done(
    store: MemoryStore, backend, dsn: str
) -> None:
    task = asyncio.create_task(store.store(asked()))
    while not backend.faults.calls:
        await asyncio.sleep(0.001)
    task.cancel()
    await store.drain()
    (audit,) = table(dsn, "governance.write_audit")
    assert audit["action"] == "allow"


async def test_a_closed_team_space_diverts_to_the_private_one(store: MemoryStore, dsn: str) -> None:
    reply = await store.store(asked(target_space="team:payments"))
    assert (reply.ok, reply.action, reply.space_written) == (True, "redirect", "private:ada")
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["reason"]) == ("allow", "policy_redirect:team_write_disabled")
    assert (audit["requested_space"], audit["target_space"]) == ("team:payments", "private:ada")


async def test_an_open_team_space_takes_the_write(store: MemoryStore, config: Config) -> None:
    governance.upsert_settings("payments", True, None, "ada", config=config)
    reply = await store.store(asked(target_space="team:payments"))
    assert (reply.action, reply.space_written) == ("allow", "team:payments")


async def test_diverted_and_parked_keeps_the_rule(store: MemoryStore, backend, dsn: str) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    reply = await store.store(asked(target_space="team:payments"))
    assert reply.action == "deferred"
    (audit,) = table(dsn, "governance.write_audit")
    assert audit["reason"] == "openmemory_write_failed:server_error"
    assert audit["evidence_refs_json"]["extra"]["policy_rule"] == "team_write_disabled"


@pytest.mark.parametrize("space", ["public:all", "team:", "nonsense", "private:bob", "team:a b"])
async def test_a_space_that_is_none_or_not_yours_is_rejected_and_audited(
    store: MemoryStore, backend, dsn: str, space: str
) -> None:
    reply = await store.store(asked(target_space=space))
    assert (reply.ok, reply.action) == (False, "reject")
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["status"]) == ("reject", "success")
    assert table(dsn, "logbook.memories") == []
    assert backend.contents() == []


@pytest.mark.parametrize(
    ("text", "actor"), [("", "ada"), (" \n", "ada"), ("a\x00", "ada"), ("\ud800", "ada"), ("x" * 200_001, "ada"),
                        ("a", ""), ("a", "a b"), ("a", "x" * 200)],
)  # fmt: skip
async def test_what_cannot_be_a_memory_is_refused_by_field(
    store: MemoryStore, dsn: str, text: str, actor: str
) -> None:
    with pytest.raises(InputError) as refused:
        await store.store(asked(text, actor_user_id=actor))
    assert refused.value.context["fields"]
    assert table(dsn, "governance.write_audit") == []


async def test_no_audit_no_call(store: MemoryStore, backend, dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE governance.write_audit ADD CONSTRAINT broken CHECK (false) NOT VALID")
    with pytest.raises(AuditWriteFailed) as failed:
        await store.store(asked())
    assert backend.faults.calls == []
    assert set(failed.value.context) == {"target_space", "payload_sha", "timestamp"}
    assert failed.value.context["payload_sha"].startswith("sha256:")


async def test_a_write_that_cannot_be_finished_is_not_acknowledged(
    store: MemoryStore, backend, dsn: str
) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "ALTER TABLE governance.write_audit ADD CONSTRAINT broken CHECK (status = 'pending') NOT VALID"
        )
    with pytest.raises(AuditWriteFailed):
        await store.store(asked())
    assert backend.contents() == ["Deploy on Tuesdays."], "whatever the back end did"


async def test_a_write_that_cannot_be_parked_is_not_acknowledged(
    store: MemoryStore, backend, dsn: str
) -> None:
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE logbook.outbox_memory ADD CONSTRAINT broken CHECK (false) NOT VALID")
    backend.faults.fail(Order(Fault.STATUS, 500))
    with pytest.raises(OutboxEnqueueFailed) as failed:
        await store.store(asked())
    assert failed.value.context["target_space"] == "private:ada"
    (audit,) = table(dsn, "governance.write_audit")
    assert audit["status"] == "pending", "for reconcile to park"


async def test_an_answer_that_comes_after_the_write_was_parked_is_told_so(
    store: MemoryStore, db: AsyncExecutor, backend, dsn: str
) -> None:
    from engram.logbook import writes

    backend.faults.fail(Fault.WAIT)
    task = asyncio.create_task(store.store(asked()))
    while not backend.faults.calls:
        await asyncio.sleep(0.001)
    (memory,) = table(dsn, "logbook.memories")
    parked = await db.run(
        writes.park(
            memory["audit_id"], reason="openmemory_write_failed:outcome_unknown", error="?", ambiguous=True
        )
    )
    backend.faults.let_go.set()
    reply = await task
    assert parked is not None
    assert (reply.action, reply.outbox_id) == ("deferred", parked.outbox_id)
    assert len(table(dsn, "governance.write_audit")) == 1


POLICIES = [
    ("not_allowlisted", {"allowlist_users": ["bob"]}, {}),
    ("kind_not_allowed", {"allowed_kinds": ["DECISION"]}, {"kind": "FACT"}),
    ("evidence_required", {"require_evidence": True}, {"evidence_refs": ["trust me"]}),
    ("too_long", {"max_chars": 5}, {}),
    ("bulk_not_allowed", {"bulk_enabled": False}, {"is_bulk": True}),
    ("bulk_too_long", {"bulk_max_chars": 5}, {"is_bulk": True}),
]


@pytest.mark.parametrize(("rule", "policy", "given"), POLICIES, ids=lambda v: v if isinstance(v, str) else "")
async def test_each_rule_diverts_and_is_named(
    store: MemoryStore, config: Config, dsn: str, rule: str, policy: dict, given: dict
) -> None:
    governance.upsert_settings("payments", True, policy, "ada", config=config)
    reply = await store.store(asked(target_space="team:payments", **given))
    assert (reply.ok, reply.action, reply.space_written) == (True, "redirect", "private:ada")
    assert rule in reply.message
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["reason"]) == ("allow", f"policy_redirect:{rule}")
    assert (audit["requested_space"], audit["target_space"]) == ("team:payments", "private:ada")


@pytest.mark.parametrize(("rule", "policy", "given"), POLICIES, ids=lambda v: v if isinstance(v, str) else "")
async def test_each_rule_is_kept_when_the_diverted_write_is_parked(
    store: MemoryStore, config: Config, backend, dsn: str, rule: str, policy: dict, given: dict
) -> None:
    governance.upsert_settings("payments", True, policy, "ada", config=config)
    backend.faults.fail(Order(Fault.STATUS, 500))
    reply = await store.store(asked(target_space="team:payments", **given))
    assert (reply.ok, reply.action, reply.space_written) == (False, "deferred", None)
    (audit,) = table(dsn, "governance.write_audit")
    assert (audit["action"], audit["reason"]) == ("redirect", "openmemory_write_failed:server_error")
    assert (audit["requested_space"], audit["target_space"]) == ("team:payments", "private:ada")
    assert audit["evidence_refs_json"]["extra"]["policy_rule"] == rule
    (row,) = table(dsn, "logbook.outbox_memory")
    assert row["target_space"] == "private:ada"


async def test_an_org_space_is_governed_by_the_gateways_own_project(
    store: MemoryStore, config: Config, settings
) -> None:
    governance.upsert_settings(settings.project_key, True, {"allowed_kinds": ["FACT"]}, "ada", config=config)
    assert (await store.store(asked("one", target_space="org:acme", kind="fact"))).action == "allow"
    assert (await store.store(asked("two", target_space="org:acme"))).action == "redirect"


@pytest.mark.parametrize(
    "policy",
    [
        "null",
        "[]",
        '"open"',
        '{"max_chars": "many"}',
        '{"allowlist_users": "ada"}',
        '{"allow_user": ["bob"]}',
    ],
)
async def test_a_policy_edited_into_nonsense_diverts_and_is_reported(
    store: MemoryStore, dsn: str, caplog, policy: str
) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO governance.settings (project_key, team_write_enabled, policy_json)"
            " VALUES ('payments', true, %s::jsonb)",
            [policy],
        )
    reply = await store.store(asked(target_space="team:payments"))
    assert (reply.action, reply.space_written) == ("redirect", "private:ada")
    (audit,) = table(dsn, "governance.write_audit")
    assert audit["reason"] == "policy_redirect:policy_invalid"
    (line,) = [record for record in caplog.records if record.getMessage() == "policy.invalid"]
    assert line.levelname == "ERROR"
    assert line.fields["problems"]


async def test_a_diverted_repeat_is_the_same_memory(store: MemoryStore, dsn: str) -> None:
    first = await store.store(asked(target_space="team:payments"))
    again = await store.store(asked(target_space="team:payments"))
    assert (again.action, again.deduplicated, again.memory_id) == ("redirect", True, first.memory_id)
    assert again.space_written == "private:ada"
    actions = [
        (a["action"], a["evidence_refs_json"]["extra"]["policy_rule"])
        for a in table(dsn, "governance.write_audit")
    ]
    assert actions == [("allow", "team_write_disabled")] * 2


async def test_a_dedup_hit_says_which_write_it_is_about(store: MemoryStore, backend) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    first = await store.store(asked())
    assert (first.error_code, first.context, first.deduplicated) == (None, None, False)
    again = await store.store(asked())
    assert again.context is not None
    assert set(again.context) == {"target_space", "payload_sha", "timestamp", "outbox_id"}
    assert again.context["outbox_id"] == again.outbox_id == first.outbox_id
    assert again.context["payload_sha"] == f"sha256:{payload_sha('Deploy on Tuesdays.')}"
    assert (again.context["target_space"], again.deduplicated) == ("private:ada", True)


@pytest.mark.impatient
async def test_parking_that_meets_a_row_of_a_script_is_told_so(
    store: MemoryStore, backend, config: Config, dsn: str
) -> None:
    """The row came between the two commits, past the memory record that the write has."""
    backend.faults.fail(Fault.WAIT)
    task = asyncio.create_task(store.store(asked()))
    while not backend.faults.calls:
        await asyncio.sleep(0.001)
    outbox_id = outbox.enqueue_memory("Deploy on Tuesdays.", "private:ada", config=config)
    reply = await task  # the deadline passes first: the write is parked
    assert (reply.action, reply.error_code, reply.outbox_id) == ("deferred", "OUTBOX_DEDUP_HIT", outbox_id)
    assert [a["action"] for a in table(dsn, "governance.write_audit")] == ["dedup"]


@pytest.mark.impatient
async def test_parking_that_meets_a_row_that_was_sent_is_stored(
    store: MemoryStore, backend, config: Config, dsn: str
) -> None:
    backend.faults.fail(Fault.WAIT)
    task = asyncio.create_task(store.store(asked()))
    while not backend.faults.calls:
        await asyncio.sleep(0.001)
    outbox_id = outbox.enqueue_memory("Deploy on Tuesdays.", "private:ada", config=config)
    outbox.claim_outbox("w1", config=config)
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET status = 'sent', memory_id = 'mem-7', locked_by = NULL,"
            " locked_at = NULL, lease_seconds = NULL WHERE outbox_id = %s",
            [outbox_id],
        )
    reply = await task
    assert (reply.action, reply.memory_id, reply.deduplicated) == ("allow", "mem-7", True)
    (audit,) = table(dsn, "governance.write_audit")
    assert audit["action"] == "dedup"


async def test_a_memory_the_server_swapped_for_a_similar_one_is_parked(
    store: MemoryStore, backend, dsn: str
) -> None:
    other = await store.store(asked("first"))
    backend.faults.fail(Order(Fault.STATUS, 200, {"id": other.memory_id, "deduplicated": True}))
    reply = await store.store(asked("second"))
    assert (reply.action, reply.memory_id) == ("deferred", None)
    assert table(dsn, "governance.write_audit")[-1]["reason"] == "openmemory_write_failed:dropped_similar"


async def test_content_whose_row_is_dead_is_tried_anew(store: MemoryStore, backend, dsn: str) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    first = await store.store(asked())
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET status = 'dead'")
    backend.faults.fail(Order(Fault.STATUS, 500))
    again = await store.store(asked())
    assert (again.action, again.error_code) == ("deferred", None)
    assert again.outbox_id != first.outbox_id
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET status = 'dead' WHERE status = 'pending'")
    assert (await store.store(asked())).action == "allow"


@pytest.mark.impatient
async def test_content_that_is_being_erased_is_waited_for_only_so_long(
    store: MemoryStore, backend, config: Config, dsn: str
) -> None:
    await store.store(asked())
    (memory,) = table(dsn, "logbook.memories")
    assert memories.forget(memory["memory_record_id"], "ada", config=config)
    assert erasures.claim(memory["memory_record_id"], config)
    audits = len(table(dsn, "governance.write_audit"))
    backend.faults.calls.clear()
    with pytest.raises(AuditWriteFailed) as refused:
        await store.store(asked())
    assert refused.value.retryable
    assert "try again" in str(refused.value)
    assert set(refused.value.context) == {"target_space", "payload_sha", "timestamp"}
    assert backend.faults.calls == []
    assert len(table(dsn, "governance.write_audit")) == audits


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("target_space", {"target_space": "team:a\x00b"}),
        ("target_space", {"target_space": "team:\ud800"}),
        ("actor_user_id", {"actor_user_id": "a\ud800"}),
        ("kind", {"kind": "a\x00b"}),
        ("meta_json", {"meta_json": {"a": float("nan")}}),
        ("meta_json", {"meta_json": {"a": ["\x00"]}}),
    ],
)
async def test_what_no_database_can_hold_is_refused_by_field(
    store: MemoryStore, dsn: str, field: str, given: dict
) -> None:
    with pytest.raises(InputError) as refused:
        await store.store(asked(**given))
    assert field in refused.value.context["fields"]
    assert table(dsn, "governance.write_audit") == []


async def test_governance_that_cannot_be_read_opens_nothing(store: MemoryStore, backend, dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE governance.settings RENAME TO gone")
    with pytest.raises(AuditWriteFailed) as failed:
        await store.store(asked(target_space="team:payments"))
    assert failed.value.context["target_space"] == "team:payments"
    assert backend.faults.calls == []
    assert table(dsn, "governance.write_audit") == []
