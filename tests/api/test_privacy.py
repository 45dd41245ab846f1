"""B never sees private:A: by any tool, filter, fallback, repeat or error.

A secret of Ada's is put wherever a private thing can be put. Then Bob, with a
token of his own, asks every tool for it in every way that its arguments allow,
and the secret must be in none of the answers, nor may an answer differ from
the one about something that does not exist.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from engram.api import tokens, tokens_file
from engram.api.tools import TOOLS
from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from engram.logbook import recall
from engram.logbook.config import Config
from engram.postgres.pool import connect
from engram.search.tokens import tokenize, tsvector
from support.backend import Backend
from support.faults import Fault, Order
from support.serving import serving

SECRET = "zebrafish"
SANDBOX = "5a17d0b0-0000-4000-8000-000000000000"
TEXT = f"The {SECRET} password is kept in the vault."


@dataclass
class People:
    ada: httpx2.Client
    bob: httpx2.Client

    @staticmethod
    def call(client: httpx2.Client, tool: str, **arguments: Any) -> tuple[int, dict[str, Any]]:
        reply = client.post("/mcp", json={"tool": tool, "arguments": arguments})
        return reply.status_code, reply.json()


@pytest.fixture
def people(settings: Settings, tmp_path: Path) -> Iterator[People]:
    path = tmp_path / "tokens.toml"
    given = {owner: _token(path, owner) for owner in ("ada", "bob")}
    guarded = replace(settings, tokens_file=path, artifacts_dir=tmp_path / "artifacts")
    with serving(build_app(guarded)) as url:
        clients = [
            httpx2.Client(base_url=url, trust_env=False, headers={"Authorization": f"Bearer {given[owner]}"})
            for owner in ("ada", "bob")
        ]
        with clients[0], clients[1]:
            yield People(*clients)


def _token(path: Path, owner: str) -> str:
    secret = tokens.new_secret()
    entry = {"sha256": tokens.sha256_of(secret), "owner": owner, "scopes": ["read", "write"]}
    token = tokens.checked(entry, "entry")
    tokens_file.edit(path, lambda text: tokens.with_table(text, token))
    return secret


def _filled(people: People, backend: Backend, config: Config) -> dict[str, Any]:
    """Ada's secret, stored, parked, as evidence, as an event and as a candidate."""
    stored = people.call(people.ada, "memory_store", payload_md=TEXT)[1]
    assert stored["action"] == "allow"
    backend.faults.fail(Order(Fault.STATUS, 500))
    parked = people.call(people.ada, "memory_store", payload_md=f"{TEXT} Twice.")[1]
    assert parked["action"] == "deferred"
    evidence = people.call(people.ada, "evidence_upload", content=TEXT)[1]
    event = people.call(people.ada, "logbook_add_event", event_type="note", content_md=TEXT)[1]
    recall.add_candidate("private:ada", "FACT", SECRET, TEXT, config=config)
    return {
        "document_id": _document(config),
        "sandbox_id": _sandbox(config),
        "memory_id": stored["memory_id"],
        "outbox_id": parked["outbox_id"],
        "uri": evidence["uri"],
        **event,
    }


def _sandbox(config: Config) -> str:
    """A sandbox of hers."""
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "INSERT INTO sandboxes.sandboxes (id, owner, profile, env, host, status, ready_at, expires_at)"
            " VALUES (%(id)s, 'ada', 'default', jsonb_build_object('A', %(secret)s::text), 'here', 'ready', now(),"
            " now() + interval '1 hour') ON CONFLICT DO NOTHING",
            {"id": SANDBOX, "secret": SECRET},
        )
    return SANDBOX


def _document(config: Config) -> str:
    """A document of hers, as a worker leaves it."""
    document = str(uuid4())
    with connect(config.postgres_dsn) as connection:
        connection.execute(
            "INSERT INTO ingest.knowledge_document (id, owner, title, filename, media_type, sha256, bytes, artifact_key)"
            " VALUES (%(id)s, 'ada', %(title)s, 'a.md', 'text/markdown', repeat('a', 64), 1, 'k')"
            " ON CONFLICT DO NOTHING",
            {"id": document, "title": SECRET},
        )
        connection.execute(
            "INSERT INTO ingest.knowledge_segment (document_id, ordinal, tags, heading, content, words)"
            " VALUES (%(id)s, 0, ARRAY['owner:ada', 'document:' || %(id)s::uuid], '', %(text)s, %(words)s::tsvector)",
            {"id": document, "text": TEXT, "words": tsvector(tokenize(TEXT))},
        )
    return document


def test_ada_sees_her_own(people: People, backend: Backend, config: Config) -> None:
    """Otherwise what follows would prove nothing."""
    known = _filled(people, backend, config)
    assert SECRET in json.dumps(people.call(people.ada, "memory_query", query=SECRET))
    assert SECRET in json.dumps(people.call(people.ada, "evidence_read", uri=known["uri"]))
    assert SECRET in json.dumps(people.call(people.ada, "logbook_query", text=SECRET))
    assert SECRET in json.dumps(people.call(people.ada, "knowledge_search", query="vault"))


@pytest.mark.parametrize("degraded", [False, True], ids=["server-well", "server-ill"])
def test_bob_finds_nothing_however_he_asks(
    people: People, backend: Backend, config: Config, degraded: bool
) -> None:
    known = _filled(people, backend, config)
    asked = 0
    for tool, arguments in _questions(known):
        if degraded:
            backend.faults.fail(Order(Fault.STATUS, 500), path="/memory/query")
        status, reply = people.call(people.bob, tool, **arguments)
        told = json.dumps({k: v for k, v in reply.items() if k != "message"})
        assert SECRET not in told, (tool, arguments)
        assert TEXT not in reply.get("message", ""), (tool, arguments)
        assert status < 500, (tool, arguments, reply)
        asked += 1
    assert asked > 30
    assert {tool for tool, _ in _questions(known)} == {tool.name for tool in TOOLS.values()}


def _questions(known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every tool, in every way that could reach somebody else's."""
    spaces = [None, ["private:ada"], ["private:bob"], ["team:default", "private:ada"], ["org:all"]]
    filters = [
        None,
        {"actor_user_id": "ada"},
        {"meta": {}},
        {"kind": "FACT"},
        {"since": "2000-01-01T00:00:00Z"},
    ]
    for space, chosen in itertools.product(spaces, filters):
        yield (
            "memory_query",
            _given(query=f"{SECRET} password vault", spaces=space, filters=chosen, top_k=100),
        )
    for space in spaces:
        yield "logbook_query", _given(text="password", spaces=space)
        yield "logbook_query", _given(spaces=space, event_type="note")
    yield "memory_query", {"query": SECRET, "actor_user_id": "ada"}
    yield "memory_forget", {"memory_id": known["memory_id"]}
    yield "memory_forget", {"outbox_id": known["outbox_id"]}
    yield "evidence_read", {"uri": known["uri"]}
    yield "memory_store", {"payload_md": "Mine.", "target_space": "private:ada"}
    yield "memory_store", {"payload_md": TEXT, "actor_user_id": "ada"}
    yield "evidence_upload", {"content": "x", "target_space": "private:ada"}
    yield "logbook_add_event", {"event_type": "x", "content_md": "x", "target_space": "private:ada"}
    yield "logbook_create_item", {"item_type": "x", "title": "x"}
    for document in (None, known["document_id"]):
        yield "knowledge_search", _given(query=f"{SECRET} password vault", document_id=document, top_k=50)
    yield "knowledge_search", {"query": SECRET, "actor_user_id": "ada"}
    inside = {"sandbox_id": known["sandbox_id"], "argv": ["env"]}
    yield "sandbox_exec", inside
    yield "sandbox_exec", {**inside, "actor_user_id": "ada"}
    yield "sandbox_create", {"actor_user_id": "ada"}
    yield "reliability_report", {}
    yield "governance_update", {"team_write_enabled": True}


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def test_a_repeat_of_her_words_tells_bob_nothing(people: People, backend: Backend, config: Config) -> None:
    """The same text is a memory of his own: new, not a repeat."""
    known = _filled(people, backend, config)
    status, reply = people.call(people.bob, "memory_store", payload_md=TEXT)
    assert (status, reply["action"], reply["deduplicated"]) == (200, "allow", False)
    assert reply["memory_id"] != known["memory_id"]
    _, key = people.call(people.ada, "memory_store", payload_md="A note.", idempotency_key="k1")
    status, reply = people.call(people.bob, "memory_store", payload_md="Another.", idempotency_key="k1")
    assert (status, reply["action"]) == (200, "allow"), "keys of different owners do not meet"
    assert reply["memory_id"] != key["memory_id"]


@pytest.mark.parametrize(
    ("tool", "argument", "missing"),
    [
        ("memory_forget", "memory_id", "00000000-0000-0000-0000-000000000000"),
        ("memory_forget", "outbox_id", 4711),
        ("evidence_read", "uri", f"memory://attachments/4711/{'0' * 64}"),
    ],
)
def test_what_is_hers_and_what_does_not_exist_are_told_apart_by_nothing(
    people: People, backend: Backend, config: Config, tool: str, argument: str, missing: Any
) -> None:
    known = _filled(people, backend, config)
    hers = people.call(people.bob, tool, **{argument: known[argument]})
    nobodys = people.call(people.bob, tool, **{argument: missing})
    assert hers[0] == nobodys[0] == 404
    assert _shape(hers[1], known[argument]) == _shape(nobodys[1], missing)


def _shape(reply: dict[str, Any], named: Any) -> dict[str, Any]:
    text = json.dumps({k: v for k, v in reply.items() if k != "correlation_id"})
    return dict(json.loads(text.replace(str(named), "X")))
