"""What others rely on: the shape of an audit, of its evidence, and of a project's settings."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engram.gateway.memory_store import MemoryStore
from engram.gateway.outbox_worker import OutboxWorker
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel.content import payload_sha
from engram.kernel.correlation import new_correlation_id
from engram.logbook import governance
from engram.logbook.config import Config
from engram.logbook.uri import validate_evidence_ref
from engram.postgres.pool import connect
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio

PATCH = f"memory://patch_blobs/git/1:abc123/{'a' * 64}"
FILE = f"memory://attachments/12345/{'b' * 64}"
MERGE_REQUEST = "mr://project/123"
REFS = [PATCH, FILE, MERGE_REQUEST]

COLUMNS = {
    "audit_id", "created_at", "actor_user_id", "requested_space", "target_space", "action", "reason", "status",
    "payload_sha", "memory_id", "correlation_id", "evidence_refs_json", "finalized_at",
}  # fmt: skip
REPLY = {
    "ok", "action", "space_written", "memory_id", "outbox_id", "correlation_id", "evidence_refs", "deduplicated",
    "message",
}  # fmt: skip


def asked(text: str = "Deploy on Tuesdays.", **kw: Any) -> StoreRequest:
    given = {"actor_user_id": "ada", "correlation_id": new_correlation_id(), **kw}
    return StoreRequest(payload_md=text, **given)


def audits(dsn: str) -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute("SELECT * FROM governance.write_audit ORDER BY audit_id").fetchall()


def one(dsn: str, sql: str) -> Any:
    with connect(dsn) as connection:
        found = connection.execute(sql.encode()).fetchone()
    assert found is not None
    return next(iter(found.values()))


async def test_the_columns_of_an_audit(store: MemoryStore, dsn: str) -> None:
    request = asked(kind="FACT", target_space="private:ada")
    reply = await store.store(request)
    (audit,) = audits(dsn)
    assert set(audit) >= COLUMNS
    assert audit["payload_sha"] == payload_sha("Deploy on Tuesdays.")
    assert re.fullmatch(r"corr-[0-9a-f]{16}", audit["correlation_id"])
    assert audit["correlation_id"] == request.correlation_id == reply.correlation_id


@pytest.mark.parametrize("down", [False, True])
async def test_the_evidence_of_an_audit(store: MemoryStore, backend, dsn: str, down: bool) -> None:
    if down:
        backend.faults.fail(Order(Fault.STATUS, 503))
    request = asked(evidence_refs=REFS)
    reply = await store.store(request)
    (audit,) = audits(dsn)
    refs = audit["evidence_refs_json"]
    assert set(refs) == {"patches", "attachments", "extra"} | ({"outbox_id"} if down else set())
    assert [entry["artifact_uri"] for entry in refs["patches"]] == [PATCH]
    assert [entry["artifact_uri"] for entry in refs["attachments"]] == [FILE]
    assert all(
        validate_evidence_ref(entry) == (True, None) for entry in refs["patches"] + refs["attachments"]
    )
    assert refs["extra"] == {"correlation_id": request.correlation_id, "external_refs": [MERGE_REQUEST]}
    assert reply.evidence_refs == REFS


async def test_a_redirect_is_joined_to_its_row_by_the_documents_query(
    store: MemoryStore, backend, dsn: str
) -> None:
    backend.faults.fail(*[Order(Fault.STATUS, 503)] * 3)
    replies = [await store.store(asked(f"fact {n}")) for n in range(3)]
    with connect(dsn) as connection:
        joined = connection.execute(
            "SELECT o.outbox_id, a.correlation_id, o.correlation_id AS parked_under"
            " FROM governance.write_audit a JOIN logbook.outbox_memory o"
            " ON (a.evidence_refs_json->>'outbox_id')::bigint = o.outbox_id"
            " WHERE a.action = 'redirect' ORDER BY 1"
        ).fetchall()
    assert [(row["outbox_id"], row["correlation_id"]) for row in joined] == [
        (reply.outbox_id, reply.correlation_id) for reply in replies
    ]
    assert all(row["correlation_id"] == row["parked_under"] for row in joined)
    assert all(isinstance(audit["evidence_refs_json"]["outbox_id"], int) for audit in audits(dsn))


async def test_an_audit_without_a_row_names_none(store: MemoryStore, dsn: str) -> None:
    await store.store(asked())
    await store.store(asked(target_space="public:all"))
    assert all("outbox_id" not in audit["evidence_refs_json"] for audit in audits(dsn))


async def test_the_rule_of_a_diversion_is_in_the_evidence(store: MemoryStore, backend, dsn: str) -> None:
    await store.store(asked("stored", target_space="team:a"))
    backend.faults.fail(Order(Fault.STATUS, 503))
    await store.store(asked("parked", target_space="team:a"))
    await store.store(asked("parked", target_space="team:a"))
    await store.store(asked("rejected", target_space="public:all"))
    await store.store(asked("own"))
    assert [audit["evidence_refs_json"]["extra"].get("policy_rule") for audit in audits(dsn)] == [
        "team_write_disabled",
        "team_write_disabled",
        "team_write_disabled",
        "unknown_space",
        None,
    ]
    assert [audit["requested_space"] for audit in audits(dsn)] == [
        "team:a", "team:a", "team:a", "public:all", "private:ada",
    ]  # fmt: skip


async def test_a_project_nobody_configured_is_closed(store: MemoryStore, config: Config, dsn: str) -> None:
    settings = governance.get_or_create_settings("payments", config=config)
    assert (settings["team_write_enabled"], settings["policy_json"]) == (False, {})
    reply = await store.store(asked(target_space="team:payments"))
    assert (reply.action, reply.space_written) == ("redirect", "private:ada")
    other = await store.store(asked("else", target_space="team:unheard-of"))
    assert (other.action, other.space_written) == ("redirect", "private:ada")
    assert one(dsn, "SELECT count(*) FROM governance.settings") == 1, "a write configures nothing"


async def test_a_settings_change_is_no_write(config: Config, dsn: str) -> None:
    governance.upsert_settings("payments", True, {"max_chars": 10}, "ada", config=config)
    assert audits(dsn) == []
    (change,) = governance.settings_history("payments", config=config)
    assert (change["changed_by"], change["after"]["team_write_enabled"]) == ("ada", True)


async def test_totals_and_success_are_counted_from_the_trail(
    store: MemoryStore, worker: OutboxWorker, backend, dsn: str
) -> None:
    await store.store(asked("one"))
    backend.faults.fail(Order(Fault.STATUS, 503))
    await store.store(asked("two"))
    await store.store(asked("three", target_space="public:all"))
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET next_attempt_at = now()")
    await worker.run_once()
    assert [audit["action"] for audit in audits(dsn)] == ["allow", "redirect", "reject", "allow"]
    assert one(dsn, "SELECT count(*) FILTER (WHERE action = 'allow')::float8 / count(*)"
                    " FROM governance.write_audit") == 0.5  # fmt: skip
    assert one(dsn, "SELECT count(*) FROM governance.write_audit WHERE action = 'redirect'") == one(
        dsn, "SELECT count(*) FROM logbook.outbox_memory WHERE status IN ('pending', 'sent', 'dead')"
    )


def _fields(reply: StoreReply) -> dict[str, Any]:
    return {name: getattr(reply, name) for name in StoreReply.__dataclass_fields__}


@pytest.mark.parametrize("outcome", ["allow", "redirect", "deferred", "reject"])
async def test_the_fields_of_every_reply(store: MemoryStore, backend, outcome: str) -> None:
    spaces = {"redirect": "team:a", "reject": "public:all"}
    if outcome == "deferred":
        backend.faults.fail(Order(Fault.STATUS, 503))
    reply = _fields(await store.store(asked(target_space=spaces.get(outcome), evidence_refs=[MERGE_REQUEST])))
    assert set(reply) == REPLY | {"error_code", "context"}
    assert reply["action"] == outcome
    assert reply["ok"] is (outcome in ("allow", "redirect"))
    assert isinstance(reply["outbox_id"], int) == (outcome == "deferred")
    assert (reply["memory_id"] is not None) == reply["ok"]
    assert reply["space_written"] == ("private:ada" if reply["ok"] else None)
    assert reply["evidence_refs"] == [MERGE_REQUEST]
    assert reply["message"]
    assert (reply["error_code"], reply["context"]) == (None, None)
