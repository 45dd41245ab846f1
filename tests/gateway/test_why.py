"""`engram why`: every state a write can be in is told as it is, with a next command that can be typed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from engram.cli import app
from engram.gateway.callers import Caller
from engram.gateway.erasing import Eraser
from engram.gateway.memory_forget import ForgetRequest, MemoryForget
from engram.gateway.memory_store import MemoryStore
from engram.gateway.openmemory_client import OpenMemoryClient
from engram.gateway.outbox_worker import HEARTBEATS, OutboxWorker
from engram.gateway.reconcile_outbox import DEADLINES_BEFORE_PARKING, Reconciler
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.gateway.why import Explanation, explain
from engram.kernel.content import payload_sha
from engram.kernel.errors import InputError
from engram.kernel.settings import Settings
from engram.logbook import governance, outbox, trace, writes
from engram.logbook.config import Config
from engram.logbook.trace import Wanted
from engram.logbook.writes import Write
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect
from support.backend import Backend
from support.faults import Fault, Order

pytestmark = pytest.mark.anyio

CORR = "corr-0123456789abcdef"
TEXT = "We deploy on Tuesdays, never on Fridays."
WORKER = "engram worker outbox --once"

Why = Callable[..., Explanation]


@pytest.fixture
def why(config: Config, settings: Settings) -> Why:
    """Explain the one thing that has this id; every command that it names is one of engram's."""

    def explained(wanted: str | int) -> Explanation:
        found = trace.find(Wanted.parse(str(wanted)), config=config)
        found = [one for one in found if one.kind == found[0].kind]
        (one,) = found
        story = trace.story(one, heartbeats=HEARTBEATS, parked_after=DEADLINES_BEFORE_PARKING, config=config)
        told = explain(one, story, max_retries=settings.outbox_max_retries)
        for step in told.next:
            assert runnable(step.command), step.command
        return told

    return explained


def runnable(command: str) -> bool:
    program, *arguments = shlex.split(command)
    return program == "engram" and CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0


def commands(told: Explanation) -> list[str]:
    return [step.command for step in told.next]


def happened(told: Explanation) -> list[str]:
    return [event.said for event in told.timeline]


def request(text: str = TEXT, space: str | None = None, correlation_id: str = CORR) -> StoreRequest:
    return StoreRequest(
        payload_md=text, actor_user_id="ada", correlation_id=correlation_id, target_space=space
    )


async def parked(store: MemoryStore, backend: Backend, *orders: Order | Fault, **kw: Any) -> int:
    """A write that the memory server would not take."""
    backend.faults.fail(*(orders or [Order(Fault.STATUS, 429)]))
    reply = await store.store(request(**kw))
    assert reply.outbox_id is not None
    return reply.outbox_id


def move(dsn: str, table: str, **moved: str) -> None:
    """Set times of the only row of a table, as SQL expressions."""
    setting = ", ".join(f"{column} = {expression}" for column, expression in moved.items())
    with connect(dsn) as connection:
        connection.execute(f"UPDATE {table} SET {setting}".encode())


def make_due(dsn: str, ago: str = "1 minute") -> None:
    move(dsn, "logbook.outbox_memory", next_attempt_at=f"now() - interval '{ago}'")


def write(text: str = TEXT) -> Write:
    return Write(
        payload_md=text,
        payload_sha=payload_sha(text),
        requested_space="private:ada",
        target_space="private:ada",
        actor_user_id="ada",
        correlation_id=CORR,
        evidence_refs_json={},
    )


# The outbox.


async def test_a_due_row_without_a_worker_asks_for_one(
    store: MemoryStore, backend: Backend, why: Why, dsn: str, config: Config
) -> None:
    row = await parked(store, backend)
    make_due(dsn)
    told = why(row)
    assert (told.subject, told.space, told.state) == (f"outbox:{row}", "private:ada", "due")
    assert told.said == "last: POST /memory/add answered 429; no worker runs"
    assert told.since == (outbox.get(row, config) or {})["next_attempt_at"]
    assert commands(told) == [WORKER]
    assert "no worker was ever seen" in told.next[0].why
    assert told.excerpt == TEXT
    assert happened(told) == [f"parked as outbox:{row} (openmemory_write_failed:rate_limited), asked by ada"]


async def test_a_due_row_is_taken_in_a_moment_or_the_memory_server_is_down(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, why: Why, dsn: str
) -> None:
    row = await parked(store, backend)
    make_due(dsn, "1 second")
    await worker.beat()
    assert commands(why(row)) == []
    assert why(row).said.endswith("a worker takes it in a moment")
    make_due(dsn, "1 minute")
    assert commands(why(row)) == ["engram doctor"]
    assert "take nothing while the memory server is down" in why(row).said
    move(dsn, "logbook.kv", updated_at="now() - interval '1 hour'")
    assert commands(why(row)) == [WORKER]
    assert "(60 min ago)" in why(row).next[0].why


async def test_a_row_that_is_not_due_says_when_and_why(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, why: Why, dsn: str
) -> None:
    row = await parked(store, backend)
    make_due(dsn)
    backend.faults.fail(Order(Fault.STATUS, 500))
    assert (await worker.run_once()).retried == 1
    told = why(row)
    assert told.state == "waiting"
    assert told.said.startswith("not due before ")
    assert "(in " in told.said
    assert "; 1 try failed; last: POST /memory/add answered 500" in told.said
    assert "it is looked for first" in told.said, "a 500 may have applied it"
    assert happened(told)[-1] == "a delivery failed, to be tried again"
    assert commands(told) == ["engram worker outbox"], "nobody would deliver it then"
    await worker.beat()
    assert commands(why(row)) == []


async def test_a_leased_row_names_its_holder(store: MemoryStore, backend: Backend, why: Why, dsn: str,
    config: Config,
) -> None:  # fmt: skip
    row = await parked(store, backend)
    make_due(dsn)
    outbox.claim_outbox("host:7:ab", 1, 60, config)
    told = why(row)
    assert (told.state, commands(told)) == ("leased", [])
    assert told.said.startswith("by host:7:ab until ")
    assert happened(told)[-1] == "leased by host:7:ab"


async def test_a_lease_that_is_over_waits_for_the_next_worker(
    store: MemoryStore, backend: Backend, why: Why, dsn: str, config: Config
) -> None:
    row = await parked(store, backend)
    make_due(dsn, "1 hour")
    outbox.claim_outbox("host:7:ab", 1, 60, config)
    move(dsn, "logbook.outbox_memory", locked_at="now() - interval '61 seconds'")
    told = why(row)
    assert (told.state, commands(told)) == ("lease over", [WORKER])
    assert told.said.startswith("the lease of host:7:ab ran out; ")


async def test_a_sent_row_is_done(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, why: Why, dsn: str, config: Config
) -> None:
    row = await parked(store, backend)
    make_due(dsn)
    assert (await worker.run_once()).sent == 1
    told = why(f"outbox:{row}")
    sent = outbox.get(row, config) or {}
    assert (told.state, told.said) == ("sent", f"the memory server has it as {sent['memory_id']}")
    assert commands(told) == []
    assert happened(told)[-1] == f"delivered as {sent['memory_id']}"
    move(dsn, "logbook.outbox_memory", updated_at="now() + interval '1 day'")
    assert why(row).since == told.since, "a row's own time moves when reconcile touches it"
    # The same write by every other of its ids.
    by_id, by_request = why(sent["memory_id"]), why(CORR)
    assert (by_id.state, by_id.said) == ("stored", told.said)
    assert (by_request.state, by_request.said) == ("sent", told.said)
    assert by_request.asked is not None
    assert by_request.asked.startswith(f"parked as outbox:{row} ")
    assert happened(by_id) == happened(by_request) == happened(told)


async def test_a_row_whose_tries_are_used_up_can_be_requeued(
    store: MemoryStore,
    worker: OutboxWorker,
    backend: Backend,
    why: Why,
    dsn: str,
    config: Config,
    settings: Settings,
) -> None:
    row = await parked(store, backend)
    for _ in range(settings.outbox_max_retries):
        make_due(dsn)
        backend.faults.fail(Order(Fault.STATUS, 500))
        await worker.run_once()
    told = why(row)
    assert told.state == "dead"
    assert told.said == "given up after 5 tries; last: POST /memory/add answered 500"
    assert commands(told) == [f"engram outbox requeue {row}", "engram doctor"]
    assert happened(told)[-2:] == ["a delivery failed, to be tried again", "given up by a worker"]
    assert told.timeline[-2].times == settings.outbox_max_retries - 1, "told once, with how often"
    again = outbox.requeue(row, "bob", config)
    assert again is not None
    told = why(row)
    assert told.said == f"tried anew as outbox:{again.outbox_id}, which is pending"
    assert commands(told) == [f"engram why outbox:{again.outbox_id}"]
    assert f"tried anew, as outbox:{again.outbox_id}, asked by bob" in happened(told)
    fresh = why(again.outbox_id)
    assert (fresh.state, happened(fresh)) == ("due", happened(told))
    assert (await worker.run_once()).sent == 1
    assert why(row).said.startswith("another write stored its content: the memory server has it as ")
    assert commands(why(row)) == []


async def test_a_refused_row_is_not_told_to_try_the_same_again(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, why: Why, dsn: str
) -> None:
    row = await parked(store, backend)
    make_due(dsn)
    backend.faults.fail(Order(Fault.STATUS, 422, {"error": "too long"}))
    assert (await worker.run_once()).dead == 1
    told = why(row)
    assert told.state == "dead"
    assert told.said.startswith("refused for good at try 1: POST /memory/add answered 422: ")
    assert commands(told) == [
        f"engram outbox show {row}", f"engram outbox requeue {row}", f"engram forget --outbox-id {row}",
    ]  # fmt: skip


async def test_a_dead_row_whose_content_is_being_written_again_waits_for_that(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, why: Why, dsn: str, db: AsyncExecutor
) -> None:
    row = await parked(store, backend)
    make_due(dsn)
    backend.faults.fail(Order(Fault.STATUS, 422))
    await worker.run_once()
    await db.run(writes.begin(write(), deadline_seconds=8))
    assert why(row).state == "intent"


async def test_a_bare_row_says_that_it_has_no_audit(config: Config, why: Why) -> None:
    row = outbox.enqueue_memory("A fact.", "team:a", config=config)
    told = why(row)
    assert told.state == "due"
    assert happened(told) == ["put in the outbox, without the audit that a gateway writes"]


async def test_a_row_whose_content_another_write_stored_is_settled_unsent(
    config: Config, why: Why, dsn: str, store: MemoryStore
) -> None:
    row = outbox.enqueue_memory(TEXT, "private:ada", config=config)
    move(dsn, "logbook.memories", state="'stored'", memory_id="'m-1'")
    assert "another write stored its content as memory:" in why(row).said


async def test_a_conflict_and_a_stale_lock_name_the_workers(
    store: MemoryStore, backend: Backend, why: Why, dsn: str, config: Config, db: AsyncExecutor
) -> None:
    row = await parked(store, backend)
    make_due(dsn)
    (claimed,) = outbox.claim_outbox("w-late", 1, 60, config)
    move(dsn, "logbook.outbox_memory", locked_at="now() - interval '1 hour'")
    await Reconciler(db).run_once()
    outbox.claim_outbox("w-new", 1, 60, config)
    outbox.record_conflicts("w-late", [(row, claimed["lease_token"])], config)
    assert happened(why(row))[-3:] == [
        "the lock of w-late was cleared: it had been gone for a second lease",
        "leased by w-new",
        "w-late came to settle what it did not hold any more; then held by w-new",
    ]


# Writes that did not need the outbox.


async def test_a_memory_that_was_stored_at_once_is_done(store: MemoryStore, why: Why, config: Config) -> None:
    reply = await store.store(request())
    told = why(str(reply.memory_id))
    assert (told.state, told.said) == ("stored", f"the memory server has it as {reply.memory_id}")
    assert commands(told) == []
    assert happened(told) == [f"stored as {reply.memory_id}, asked by ada"]
    (audit,) = governance.query_write_audit(config=config)
    assert told.since == audit["finalized_at"]
    by_record = why(told.subject)
    assert by_record == replace(told, now=by_record.now)
    assert why(f"audit:{audit['audit_id']}").state == "stored"


async def test_an_intent_has_its_time(db: AsyncExecutor, why: Why) -> None:
    begun = await db.run(writes.begin(write(), deadline_seconds=60))
    for wanted in (f"memory:{begun.memory_record_id}", f"audit:{begun.audit_id}", CORR):
        told = why(wanted)
        assert (told.state, commands(told)) == ("intent", [])
        assert told.said.startswith("being written; its gateway has until ")
    assert happened(told) == ["begun; the outcome is not known yet, asked by ada"]


async def test_an_overdue_intent_is_reconciles(db: AsyncExecutor, why: Why, dsn: str) -> None:
    begun = await db.run(writes.begin(write(), deadline_seconds=60))
    wanted = f"memory:{begun.memory_record_id}"
    move(dsn, "logbook.memories", intent_at="now() - interval '72 seconds'")
    told = why(wanted)
    assert (told.state, commands(told)) == ("overdue", []), "reconcile would leave it alone yet"
    assert told.said.startswith("the intent of a gateway that is 12 s late; reconcile parks it ")
    assert "(in 48 s)" in told.said
    move(dsn, "logbook.memories", intent_at="now() - interval '2 hours'")
    told = why(wanted)
    assert (told.state, commands(told)) == ("overdue", ["engram reconcile"])
    assert await Reconciler(db).run_once() == 1
    told = why(wanted)
    assert (told.state, commands(told)) == ("due", [WORKER])
    assert "it is looked for first" in told.said


async def test_a_diverted_memory_shows_the_policy_that_decided(
    store: MemoryStore, worker: OutboxWorker, backend: Backend, why: Why, dsn: str
) -> None:
    reply = await store.store(request(space="team:payments"))
    told = why(str(reply.memory_id))
    assert (told.space, told.state) == ("private:ada", "stored")
    assert told.said.endswith(
        "; asked for team:payments, and policy put it in private:ada (team_write_disabled)"
    )
    assert commands(told) == ["engram governance show payments"]
    row = await parked(store, backend, text="Another.", space="org:acme")
    told = why(row)
    assert told.said.endswith("; asked for org:acme, and policy put it in private:ada (team_write_disabled)")
    assert commands(told)[-1] == "engram governance show"


async def test_a_rejected_write_can_go_to_the_writers_own_space(
    store: MemoryStore, why: Why, config: Config
) -> None:
    reply = await store.store(request(space="public:everybody"))
    assert reply.action == "reject"
    told = why(CORR)
    assert told.state == "rejected"
    assert told.said.startswith("refused by policy and not kept: public:everybody (policy_reject:")
    assert commands(told) == ["engram store --space private:ada -"]
    assert told.excerpt == "", "nothing was kept"


async def test_a_repeat_says_what_it_met(
    store: MemoryStore, backend: Backend, why: Why, dsn: str, worker: OutboxWorker
) -> None:
    row = await parked(store, backend)
    again = await store.store(request(correlation_id="corr-again-parked"))
    assert again.outbox_id == row
    told = why("corr-again-parked")
    assert told.asked == f"asked again: waits already, as outbox:{row}, asked by ada"
    assert told.state in ("due", "waiting")
    make_due(dsn)
    await worker.run_once()
    stored = await store.store(request(correlation_id="corr-again-stored"))
    told = why("corr-again-stored")
    assert told.asked == f"asked again: stored already, as {stored.memory_id}, asked by ada"
    assert (told.state, commands(told)) == ("stored", [])


# Forgetting.


@pytest.fixture
def forget(db: AsyncExecutor, client: OpenMemoryClient, settings: Settings) -> Callable[[StoreReply], Any]:
    service = MemoryForget(db, Eraser(db, client), settings)

    async def forgotten(reply: StoreReply) -> None:
        by = {"memory_id": reply.memory_id} if reply.memory_id else {"outbox_id": reply.outbox_id}
        await service.forget(
            ForgetRequest(caller=Caller("ada"), correlation_id="corr-forget", reason="it was wrong", **by)
        )

    return forgotten


async def test_a_forgotten_memory_says_what_becomes_of_its_copy(
    store: MemoryStore,
    forget: Callable[[StoreReply], Any],
    backend: Backend,
    why: Why,
    dsn: str,
    client: OpenMemoryClient,
    db: AsyncExecutor,
) -> None:
    reply = await store.store(request())
    memory_id = str(reply.memory_id)
    backend.faults.fail(Order(Fault.STATUS, 503), path=f"/memory/{memory_id}")
    await forget(reply)
    told = why(memory_id)
    assert (told.state, commands(told)) == ("forgotten", [])
    assert told.said.startswith(
        "nobody can read it, and its copy is being deleted, and not tried again before "
    )
    assert happened(told)[-1] == "forgotten (because: it was wrong), asked by ada"
    assert why("corr-forget").state == "forgotten"
    move(dsn, "logbook.memories", erase_locked_at="NULL", erase_due_at="now() + interval '30 seconds'")
    told = why(memory_id)
    assert told.said.startswith("nobody can read it, and its copy is deleted ")
    assert told.said.endswith("(in 30 s) (1 try so far)")
    assert commands(told) == []
    move(dsn, "logbook.memories", erase_due_at="now() - interval '1 second'")
    told = why(memory_id)
    assert "its copy is to be deleted by the next reconcile" in told.said
    assert commands(told) == ["engram reconcile"]
    assert await Eraser(db, client).run_once() == 1
    told = why(memory_id)
    assert told.said == "nobody can read it, and the memory server has no copy of it"
    anew = await store.store(request())
    assert anew.memory_id != memory_id
    assert "; the same content was stored anew as memory:" in why(memory_id).said
    assert told.excerpt == "", "what was forgotten is shown to nobody"
    assert why(memory_id).excerpt == TEXT, "but its twin may be"


async def test_a_forgotten_row_is_never_sent(
    store: MemoryStore, forget: Callable[[StoreReply], Any], backend: Backend, why: Why
) -> None:
    row = await parked(store, backend)
    await forget(replace(await store.store(request()), memory_id=None))
    told = why(row)
    assert (told.state, commands(told)) == ("forgotten", [])
    assert told.said == "nobody can read it, and the memory server has no copy of it"


# What only scripts and accidents make.


async def test_a_redirect_whose_row_was_removed_is_said_to_be_gone(
    store: MemoryStore, backend: Backend, why: Why, dsn: str
) -> None:
    row = await parked(store, backend)
    with connect(dsn) as connection:
        connection.execute("DELETE FROM logbook.outbox_memory")
    for wanted in (CORR, f"memory:{why(CORR).timeline and 1}"):
        told = why(wanted)
        assert (told.state, commands(told)) == ("gone", ["engram reconcile --report"])
        assert told.said == f"parked as outbox:{row}, and that row is gone: somebody removed it"


async def test_audits_of_scripts_are_told_as_they_are(config: Config, why: Why) -> None:
    begun = governance.insert_write_audit("ada", "team:a", "pending", config=config)
    told = why(f"audit:{begun}")
    assert told.state == "pending"
    assert "only that script can finish it" in told.said
    odd = {"outbox_id": "no number", "extra": ["no", "object"]}
    failed = governance.insert_write_audit("ada", "team:a", "error", "it broke", None, odd, config)
    told = why(f"audit:{failed}")
    assert (told.state, told.said) == ("error", "an attempt failed (it broke), asked by ada")


@pytest.mark.parametrize("never", ["infinity", "-infinity"])
async def test_a_time_that_no_calendar_has_is_told_all_the_same(
    config: Config, why: Why, dsn: str, never: str
) -> None:
    """The primitives refuse it; somebody's own SQL may have written it."""
    row = outbox.enqueue_memory("A fact.", "team:a", config=config)
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.outbox_memory SET next_attempt_at = %s", [never])
    assert why(row).state == ("waiting" if never == "infinity" else "due")


async def test_what_is_shown_is_short_and_harmless(store: MemoryStore, backend: Backend, why: Why) -> None:
    row = await parked(store, backend, text="\x1b]0;gotcha\x07" + "password: hunter2 " + "日本語" * 5000)
    told = why(row)
    assert len(told.excerpt) < 130
    assert told.excerpt.isprintable()
    assert "hunter2" not in told.excerpt
    assert "日本語" in told.excerpt


async def test_very_many_audits_are_cut_and_counted(config: Config, why: Why, dsn: str) -> None:
    row = outbox.enqueue_memory("A fact.", "team:a", config=config)
    first = governance.insert_write_audit(
        "ada", "team:a", "redirect", "outbox_enqueued", payload_sha("A fact."), {"outbox_id": row}, config
    )
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO governance.write_audit (target_space, action, reason, status, finalized_at,"
            " payload_sha, evidence_refs_json) SELECT 'team:a', 'retry', 'outbox_flush_retry', 'success', now(),"
            " %s, jsonb_build_object('outbox_id', %s::bigint) FROM generate_series(1, 500)",
            [payload_sha("A fact."), row],
        )
    for wanted in (row, f"audit:{first}", f"audit:{first + 1}"):
        told = why(wanted)
        assert told.audits_left_out == 501 - trace.MOST_AUDITS
        assert happened(told)[0] == f"put in the outbox by a script, as outbox:{row}, asked by ada"
        assert told.timeline[-1].times >= trace.MOST_AUDITS - 2


# Ids.


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("42", Wanted(outbox_id=42, memory_id="42", correlation_id="42")),
        (" outbox:42 ", Wanted(outbox_id=42)),
        ("audit:7", Wanted(audit_id=7)),
        ("memory:9", Wanted(memory_record_id=9)),
        ("memory:mem-9", Wanted(memory_id="mem-9")),
        ("corr-0123", Wanted(correlation_id="corr-0123")),
        ("corr:42", Wanted(correlation_id="42")),
        ("corr:outbox:42", Wanted(correlation_id="outbox:42")),
        ("mem-9", Wanted(memory_id="mem-9", correlation_id="mem-9")),
        ("a:b", Wanted(memory_id="a:b", correlation_id="a:b")),
        ("9" * 19, Wanted(memory_id="9" * 19, correlation_id="9" * 19)),
    ],
)
def test_what_an_id_may_mean(text: str, wanted: Wanted) -> None:
    assert Wanted.parse(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "  ", "outbox:", "outbox:x", "outbox:0", "outbox:-1", "audit:9" + "9" * 18, "a\x00b", "x" * 513],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no id"):
        Wanted.parse(text)


async def test_a_number_is_an_outbox_row_before_it_is_a_memory(
    config: Config, dsn: str, store: MemoryStore
) -> None:
    await store.store(request())
    row = outbox.enqueue_memory("A fact.", "team:a", config=config)
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.memories SET memory_id = %s WHERE state = 'stored'", [str(row)])
    assert [one.kind for one in trace.find(Wanted.parse(str(row)), config=config)] == ["outbox", "memory_id"]
    assert [one.kind for one in trace.find(Wanted.parse(f"memory:{row}"), config=config)] == ["memory"]


async def test_one_request_that_wrote_much_stands_for_each_content(
    store: MemoryStore, config: Config
) -> None:
    for number in range(5):
        await store.store(request(f"fact {number}"))
    found = trace.find(Wanted.parse(CORR), 3, config)
    assert [one.kind for one in found] == ["correlation"] * 3
    assert len({one.payload_sha for one in found}) == 3


async def test_another_content_of_the_same_request_is_another_story(
    store: MemoryStore, backend: Backend, why: Why
) -> None:
    one = await parked(store, backend, text="One.")
    two = await parked(store, backend, text="Two.")
    assert [f"outbox:{one}" in said for said in happened(why(one))] == [True]
    assert [f"outbox:{two}" in said for said in happened(why(two))] == [True]


async def test_two_spaces_that_share_a_copy_are_two_stories(
    store: MemoryStore, config: Config, dsn: str
) -> None:
    await store.store(request())
    await store.store(replace(request(), actor_user_id="bob"))
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.memories SET memory_id = 'shared'")
    found = trace.find(Wanted.parse("shared"), config=config)
    assert [one.target_space for one in found] == ["private:ada", "private:bob"]


# The size of it.


FILL = """
WITH audits AS (
    INSERT INTO governance.write_audit (target_space, action, reason, status, finalized_at, payload_sha,
                                        correlation_id, evidence_refs_json, memory_id)
    SELECT 'team:a', 'redirect', 'x', 'redirected', now(), encode(sha256(n::text::bytea), 'hex'),
           'corr-' || n, jsonb_build_object('outbox_id', n), 'm' || n
    FROM generate_series(1, 20000) n
), rows AS (
    INSERT INTO logbook.outbox_memory (outbox_id, target_space, payload_sha, payload_md, status)
    SELECT n, 'team:a', encode(sha256(n::text::bytea), 'hex'), 'fact', 'dead' FROM generate_series(1, 20000) n
)
INSERT INTO logbook.memories (target_space, payload_sha, payload_md, state, outbox_id, memory_id)
SELECT 'team:a', encode(sha256(n::text::bytea), 'hex'), 'fact', 'parked', n, 'm' || n
FROM generate_series(1, 20000) n
"""


def scanned(plan: dict[str, Any]) -> set[str]:
    """The tables that are read from end to end."""
    below = [scanned(child) for child in plan.get("Plans", [])]
    return ({plan["Relation Name"]} if plan["Node Type"] == "Seq Scan" else set()).union(*below)


async def test_only_indexes_are_walked(dsn: str, config: Config) -> None:
    with connect(dsn) as connection:
        connection.execute(FILL)
        connection.execute("ANALYZE")
        for wanted in ("77", "memory:77", "audit:77", "corr-77", "m77"):
            asked = Wanted.parse(wanted)
            (one,) = trace.find(asked, config=config)
            story = trace.story.query(one, heartbeats=HEARTBEATS, parked_after=2)
            for query in (trace.find.query(asked), story):
                plan = connection.execute(
                    f"EXPLAIN (FORMAT JSON) {query.statement.text}".encode(), query.params
                ).fetchone()
                assert plan is not None
                read = scanned(plan["QUERY PLAN"][0]["Plan"])
                assert read & {"write_audit", "outbox_memory", "memories"} == set(), (wanted, query.statement)
