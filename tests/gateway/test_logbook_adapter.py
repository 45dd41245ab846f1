"""The adapter: the logbook's primitives with the database filled in, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from engram.gateway import logbook_adapter
from engram.gateway.logbook_adapter import LogbookAdapter, get_adapter
from engram.kernel.content import payload_sha
from engram.kernel.errors import ConfigError, OutboxInvalid
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.primitive import Primitive
from support.processes import environment

VERBS = sorted(
    name for name, value in vars(LogbookAdapter).items() if isinstance(value, logbook_adapter._Verb)
)


@pytest.fixture
def adapter(config: Config) -> LogbookAdapter:
    return LogbookAdapter(config)


def test_the_documents_example(adapter: LogbookAdapter) -> None:
    settings = adapter.get_or_create_settings("payments")
    assert (settings["project_key"], settings["team_write_enabled"]) == ("payments", False)
    outbox_id = adapter.enqueue_outbox("a fact", "private:ada", None, "openmemory is down")
    audit_id = adapter.insert_audit(
        "ada", "private:ada", "redirect", "openmemory_write_failed:connection", payload_sha("a fact"),
        {"outbox_id": outbox_id}, correlation_id="corr-0123456789abcdef",
    )  # fmt: skip
    (audit,) = adapter.query_audit(action="redirect")
    assert (audit["audit_id"], audit["evidence_refs_json"]) == (audit_id, {"outbox_id": outbox_id})
    assert all(sum_["ok"] for sum_ in adapter.invariants())


def test_a_row_from_claim_to_each_end(adapter: LogbookAdapter) -> None:
    sent, dead, again = (adapter.enqueue_outbox(text, "private:ada") for text in ("one", "two", "three"))
    leases = {row["outbox_id"]: row["lease_token"] for row in adapter.claim("w1", limit=10, lease_seconds=60)}
    assert set(leases) == {sent, dead, again}
    assert adapter.renew_lease(sent, "w1", lease_token=leases[sent])
    assert adapter.ack_sent(sent, "w1", "mem-1", lease_token=leases[sent])
    assert adapter.mark_dead(dead, "w1", "refused", lease_token=leases[dead])
    later = datetime.now(UTC) + timedelta(hours=1)
    assert adapter.fail_retry(again, "w1", "timeout", later, lease_token=leases[again])
    assert not adapter.ack_sent(again, "w1", "mem-2"), "the lease went with the failure"
    assert {row["outbox_id"]: row["status"] for row in adapter.list_outbox()} == {
        sent: "sent", dead: "dead", again: "pending",
    }  # fmt: skip
    hit = adapter.check_dedup("private:ada", payload_sha("one"))
    assert hit is not None
    assert hit["memory_id"] == "mem-1"
    assert adapter.check_dedup("private:ada", payload_sha("two")) is None
    requeued = adapter.requeue(dead, "ada")
    assert requeued is not None
    assert requeued.fresh


def test_errors_are_the_primitives_own(adapter: LogbookAdapter) -> None:
    with pytest.raises(OutboxInvalid) as refused:
        adapter.enqueue_outbox(" ", "team:a")
    context = refused.value.context
    assert set(context) == {"fields", "target_space", "payload_sha", "timestamp"}
    assert context["fields"] == {"payload_md": "must not be empty"}
    assert context["payload_sha"] == f"sha256:{payload_sha(' ')}"
    assert context["target_space"] == "team:a"


@pytest.mark.parametrize(
    ("payload", "space"), [("\ud800", "team:a"), ("a", "team:\ud800"), ("a\x00", "team:a\x00")]
)
def test_the_context_of_a_refusal_can_be_shown_whatever_was_sent(
    adapter: LogbookAdapter, payload: str, space: str
) -> None:
    with pytest.raises(OutboxInvalid) as refused:
        adapter.enqueue_outbox(payload, space)
    assert str(refused.value.context).encode()
    assert "\x00" not in refused.value.context["target_space"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_primitive_with_its_own_words(adapter: LogbookAdapter, verb: str) -> None:
    primitive = getattr(LogbookAdapter, verb)
    assert isinstance(primitive, Primitive)
    bound = getattr(adapter, verb)
    assert bound.__wrapped__ is primitive
    assert bound.__doc__ == primitive.__doc__
    assert bound.keywords == {"config": adapter.config}


def test_two_adapters_are_two_databases(adapter: LogbookAdapter, postgres_server, template) -> None:
    from support.databases import fresh

    for dsn in fresh(postgres_server, template):
        other = LogbookAdapter(Config(postgres_dsn=dsn))
        other.enqueue_outbox("a fact", "private:ada")
        assert len(other.list_outbox()) == 1
        assert adapter.list_outbox() == []
        other.close()


def test_one_adapter_per_configuration(config: Config) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: get_adapter(Config(config.postgres_dsn)), range(64)))
    assert len(found) == 1
    assert get_adapter(Config("postgresql://elsewhere/db")) not in found


def test_the_environment_says_where(config: Config, monkeypatch) -> None:
    monkeypatch.setenv("POSTGRES_DSN", config.postgres_dsn)
    assert get_adapter() is get_adapter(config)
    outbox_id = LogbookAdapter().enqueue_outbox("a fact", "private:ada")
    assert outbox.get(outbox_id, config)


def test_an_adapter_without_a_database_says_so_when_it_is_used(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("POSTGRES_DSN", raising=False)
    monkeypatch.chdir(tmp_path)
    adapter = LogbookAdapter()
    with pytest.raises(ConfigError, match="POSTGRES_DSN"):
        adapter.outbox_stats()


def test_a_closed_adapter_opens_again(adapter: LogbookAdapter) -> None:
    adapter.enqueue_outbox("a fact", "private:ada")
    adapter.close()
    assert len(adapter.list_outbox()) == 1


def test_a_plain_script_with_nothing_but_a_dsn(config: Config) -> None:
    """It brings no web server, and leaves nothing running behind."""
    script = (
        "import sys\n"
        "from engram.gateway.logbook_adapter import LogbookAdapter, get_adapter\n"
        "adapter = get_adapter()\n"
        "print(adapter.get_or_create_settings('payments')['team_write_enabled'])\n"
        "print(adapter.enqueue_outbox('a fact', 'private:ada'))\n"
        "heavy = {'fastapi', 'starlette', 'uvicorn', 'mcp', 'httpx2', 'pydantic', 'redis', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(POSTGRES_DSN=config.postgres_dsn),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split("\n")[:3] == ["False", "1", "[]"]
    assert done.stderr == ""
