"""Items and events: recorded once, read by those who may, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client

from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from engram.logbook import governance
from engram.logbook.config import Config
from engram.postgres.pool import connect
from support.admission import admitted
from support.serving import serving


class As:
    """A caller, told by `actor_user_id` or by a token."""

    def __init__(self, http: httpx2.Client, actor: str | None = None, token: str | None = None) -> None:
        self.http = http
        self.actor = {"actor_user_id": actor} if actor else {}
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, path: str, /, **given: Any) -> httpx2.Response:
        return self.http.post(f"/logbook/{path}", json={**given, **self.actor}, headers=self.headers)

    def call(self, path: str, /, **given: Any) -> dict[str, Any]:
        reply = self.ask(path, **given)
        assert reply.status_code == 200, reply.text
        assert reply.json()["ok"]
        return reply.json()

    def item(self, title: str = "Mend the webhook", **more: Any) -> int:
        return self.call("items", item_type="task", title=title, **more)["item_id"]

    def event(self, content: str = "It timed out.", **more: Any) -> int:
        return self.call("events", event_type="note", content_md=content, **more)["event_id"]

    def events(self, **given: Any) -> list[int]:
        return [event["event_id"] for event in self.call("query", **given)["events"]]

    def items(self, **given: Any) -> list[int]:
        return [item["item_id"] for item in self.call("query", **given)["items"]]


@pytest.fixture
def ada(http: httpx2.Client) -> As:
    return As(http, "ada")


@pytest.fixture
def bob(http: httpx2.Client) -> As:
    return As(http, "bob")


@pytest.fixture
def opened(config: Config) -> None:
    governance.upsert_settings("default", True, config=config)


@pytest.fixture
def limited(settings: Settings, tmp_path: Path) -> Iterator[dict[str, As]]:
    """Callers whose tokens list some shared spaces."""
    file = tmp_path / "tokens.toml"
    held = {}
    for owner, spaces in (("ada", None), ("bob", ["team:default"]), ("eve", ["team:other"]), ("mallory", [])):
        held[owner] = admitted(file, owner, ["read", "write"], spaces)
    with (
        serving(build_app(replace(settings, tokens_file=file))) as url,
        httpx2.Client(base_url=url, trust_env=False) as client,
    ):
        yield {owner: As(client, token=secret) for owner, secret in held.items()}


def count(dsn: str, table: str) -> int:
    with connect(dsn) as connection:
        found = connection.execute(f"SELECT count(*) AS n FROM logbook.{table}".encode()).fetchone()
    assert found is not None
    return found["n"]


def test_an_item_with_its_events_is_found(ada: As) -> None:
    item = ada.item(meta_json={"ticket": 7})
    event = ada.event("The webhook times out.", item_id=item, payload_json={"code": 504})
    ada.event("Something else.")
    found = ada.call("query", item_id=item)
    assert [(i["item_id"], i["status"], i["owner_user_id"], i["meta_json"]) for i in found["items"]] == [
        (item, "open", "ada", {"ticket": 7})
    ]
    (shown,) = found["events"]
    assert (shown["event_id"], shown["content_md"], shown["payload_json"]) == (
        event, "The webhook times out.", {"code": 504},
    )  # fmt: skip
    assert found["spaces_searched"] == ["team:default", "private:ada"]
    assert "request_id" not in found["items"][0]
    assert "words" not in shown


def test_what_is_private_is_never_seen_by_another(ada: As, bob: As, opened: None) -> None:
    item = ada.item("Shared work")
    secret = ada.event("Ada's secret.", item_id=item)
    shared = ada.event("For all.", item_id=item, target_space="team:default")
    assert ada.events() == [shared, secret]
    assert bob.events() == bob.events(item_id=item) == bob.events(text="secret all") == [shared]
    assert bob.events(spaces=["team:default", "private:bob", "org:x"]) == [shared]
    reply = bob.ask("query", spaces=["team:default", "private:ada"])
    assert (reply.status_code, reply.json()["error_code"]) == (403, "FORBIDDEN")
    assert "secret" not in reply.text


def test_a_token_sees_the_shared_spaces_it_lists(limited: dict[str, As], opened: None) -> None:
    item = limited["ada"].item("Shared work")
    shared = limited["ada"].event("For all.", item_id=item, target_space="team:default")
    assert (limited["bob"].items(), limited["bob"].events()) == ([item], [shared])
    for name in ("eve", "mallory"):
        outside = limited[name]
        assert outside.call("query")["spaces_searched"] == [f"private:{name}"]
        assert (outside.items(), outside.events(), outside.events(item_id=item)) == ([], [], [])
        assert outside.ask("query", spaces=["team:default"]).status_code == 403


def test_an_item_that_cannot_be_seen_cannot_be_written_to(
    limited: dict[str, As], opened: None, dsn: str
) -> None:
    item = limited["ada"].item("Shared work")
    told = []
    for item_id in (item, item + 1):
        reply = limited["eve"].ask("events", event_type="note", content_md="x", item_id=item_id)
        assert (reply.status_code, reply.json()["error_code"]) == (404, "NOT_FOUND")
        told.append(reply.json()["message"].replace(str(item_id), "<id>"))
    assert told[0] == told[1], "what is not yours and what is not there are told alike"
    assert count(dsn, "events") == 0
    assert limited["bob"].event(item_id=item)


def test_an_item_is_made_only_where_it_can_be_seen(limited: dict[str, As], dsn: str) -> None:
    for project in (None, "payments"):
        reply = limited["eve"].ask("items", item_type="task", title="x", project_key=project)
        assert (reply.status_code, reply.json()["error_code"]) == (403, "FORBIDDEN")
    assert count(dsn, "items") == 0
    item = limited["eve"].item(project_key="other")
    assert limited["eve"].items(spaces=["team:other"]) == [item]
    assert limited["bob"].items() == []
    assert limited["bob"].items(item_id=item) == []


def test_items_of_other_projects_are_not_shown_unless_asked_for(ada: As) -> None:
    own, other = ada.item("Own"), ada.item("Other", project_key="payments")
    assert ada.items() == [own]
    assert ada.items(spaces=["team:payments"]) == [other]
    assert ada.items(spaces=["team:payments", "team:default"]) == [other, own]
    assert ada.items(spaces=["private:ada", "org:default"]) == []


@pytest.mark.parametrize(
    ("enabled", "policy", "rule"),
    [
        (False, {}, "team_write_disabled"),
        (True, {"allowlist_users": ["bob"]}, "not_allowlisted"),
    ],
)
def test_a_closed_space_diverts_an_event(
    ada: As, bob: As, config: Config, enabled: bool, policy: dict, rule: str
) -> None:
    governance.upsert_settings("default", enabled, policy, config=config)
    reply = ada.call("events", event_type="note", content_md="It timed out.", target_space="team:default")
    assert (reply["space_written"], reply["diverted"]) == ("private:ada", True)
    assert rule in reply["message"]
    assert (ada.events(), bob.events()) == ([reply["event_id"]], [])


def test_the_rules_about_memories_do_not_concern_events(ada: As, config: Config) -> None:
    rules = {"require_evidence": True, "max_chars": 5, "allowed_kinds": ["FACT"]}
    governance.upsert_settings("default", True, rules, config=config)
    reply = ada.call("events", event_type="note", content_md="It timed out.", target_space="team:default")
    assert (reply["space_written"], reply["diverted"]) == ("team:default", False)


def test_an_open_space_takes_it_as_it_is(ada: As, opened: None) -> None:
    reply = ada.call("events", event_type="note", content_md="x", target_space="team:default")
    assert (reply["space_written"], reply["diverted"]) == ("team:default", False)
    own = ada.call("events", event_type="note", content_md="x")
    assert (own["space_written"], own["diverted"]) == ("private:ada", False)


@pytest.mark.parametrize(("space", "status"), [("private:bob", 403), ("public:x", 400), ("team:", 400)])
def test_a_space_that_is_not_ones_own_to_write_is_refused(ada: As, dsn: str, space: str, status: int) -> None:
    reply = ada.ask("events", event_type="note", content_md="x", target_space=space)
    assert reply.status_code == status
    assert count(dsn, "events") == 0


def test_pages_follow_each_other(ada: As, opened: None) -> None:
    items = [ada.item(f"item {n}") for n in range(5)]
    spaces = ["team:default", "private:ada"]
    events = [ada.event(f"event {n}", target_space=spaces[n % 2]) for n in range(7)]

    def walked(kind: str, cursor: str) -> list[int]:
        page = ada.call("query", limit=2)
        seen = [row[f"{kind}_id"] for row in page[f"{kind}s"]]
        while (before := page[f"next_{cursor}"]) is not None:
            page = ada.call("query", limit=2, **{cursor: before})
            assert page["items" if kind == "event" else "events"] == [], "only what is continued"
            seen += [row[f"{kind}_id"] for row in page[f"{kind}s"]]
        return seen

    assert walked("item", "before_item_id") == items[::-1]
    assert walked("event", "before_id") == events[::-1]
    both = ada.call("query", limit=2, before_id=events[2], before_item_id=items[2])
    assert [e["event_id"] for e in both["events"]] == [events[1], events[0]]
    assert [i["item_id"] for i in both["items"]] == [items[1], items[0]]
    assert (both["next_before_id"], both["next_before_item_id"]) == (None, None)


def test_filters_choose_what_is_listed(ada: As, dsn: str) -> None:
    first, second = ada.item("Rotate the key"), ada.item("Mend the webhook")
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.items SET status = 'closed' WHERE item_id = %s", [first])
    note = ada.event("The key is old.")
    deploy = ada.call("events", event_type="deploy", content_md="v2 租约")["event_id"]

    def listed(**given: Any) -> tuple[list[int], list[int]]:
        return ada.items(**given), ada.events(**given)

    assert listed() == ([second, first], [deploy, note])
    assert listed(event_type="deploy") == ([], [deploy])
    assert listed(status="open") == ([second], [])
    assert listed(status="closed", event_type="note") == ([first], [note])
    assert listed(text="key") == ([first], [note])
    assert listed(text="租约") == ([], [deploy])
    assert listed(text="!!!") == ([], [])


@pytest.mark.parametrize("tool", ["logbook_create_item", "logbook_add_event"])
def test_a_key_makes_it_once_and_without_one_it_is_made_again(
    http: httpx2.Client, dsn: str, tool: str
) -> None:
    given = {
        "logbook_create_item": ("items", {"item_type": "task", "title": "Once"}),
        "logbook_add_event": ("events", {"event_type": "note", "content_md": "Once."}),
    }
    path, body = given[tool]
    replies = [
        http.post(f"/logbook/{path}", json=body, headers={"Idempotency-Key": "key-1"}).json(),
        http.post("/mcp", json={"tool": tool, "arguments": {**body, "idempotency_key": "key-1"}}).json(),
    ]
    assert replies[0] == replies[1]
    assert count(dsn, path) == 1
    for _ in range(2):
        assert http.post(f"/logbook/{path}", json=body).status_code == 200
    assert count(dsn, path) == 3


@pytest.mark.parametrize("path", ["items", "events"])
def test_a_try_that_ended_without_an_answer_is_resumed_not_repeated(
    http: httpx2.Client, dsn: str, path: str
) -> None:
    """As after a crash: what was made is there, the key's answer is not."""
    body = {"items": {"item_type": "task", "title": "x"}, "events": {"event_type": "note", "content_md": "x"}}
    headers = {"Idempotency-Key": "key-1"}
    first = http.post(f"/logbook/{path}", json=body[path], headers=headers).json()
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.idempotency_keys SET status_code = NULL, response_snapshot = NULL")
    again = http.post(f"/logbook/{path}", json=body[path], headers=headers)
    assert "Idempotency-Replayed" not in again.headers
    assert {k: v for k, v in again.json().items() if k != "correlation_id"} == {
        k: v for k, v in first.items() if k != "correlation_id"
    }
    assert count(dsn, path) == 1


def test_a_resumed_event_is_told_where_its_first_try_put_it(
    http: httpx2.Client, dsn: str, config: Config, opened: None
) -> None:
    body = {"event_type": "note", "content_md": "x", "target_space": "team:default", "actor_user_id": "ada"}
    headers = {"Idempotency-Key": "key-1"}
    http.post("/logbook/events", json=body, headers=headers)
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.idempotency_keys SET status_code = NULL, response_snapshot = NULL")
    governance.upsert_settings("default", False, config=config)
    again = http.post("/logbook/events", json=body, headers=headers).json()
    assert (again["space_written"], again["diverted"]) == ("team:default", False)


BIG = {"a": "x" * 40_000}
DEEP: dict = {}
for _ in range(100):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        ("items", {"title": " "}, "title"),
        ("items", {"title": "x" * 301}, "title"),
        ("items", {"item_type": ""}, "item_type"),
        ("items", {"item_type": "x" * 65}, "item_type"),
        ("items", {"meta_json": BIG}, "meta_json"),
        ("items", {"meta_json": DEEP}, "meta_json"),
        ("items", {"meta_json": {"a\u0000": 1}}, "meta_json"),
        ("items", {"actor_user_id": "a b"}, "actor_user_id"),
        ("events", {"content_md": ""}, "content_md"),
        ("events", {"content_md": "x" * 20_001}, "content_md"),
        ("events", {"content_md": "a\u0000"}, "content_md"),
        ("events", {"event_type": "x" * 65}, "event_type"),
        ("events", {"payload_json": BIG}, "payload_json"),
        ("events", {"item_id": 0}, "item_id"),
        ("events", {"item_id": 1 << 63}, "item_id"),
        ("events", {"actor_user_id": "a b"}, "actor_user_id"),
        ("query", {"text": " "}, "text"),
        ("query", {"text": "x" * 1001}, "text"),
        ("query", {"limit": 0}, "limit"),
        ("query", {"limit": 101}, "limit"),
        ("query", {"status": "gone"}, "status"),
        ("query", {"spaces": ["nowhere"]}, "spaces"),
        ("query", {"spaces": ["org:x"] * 51}, "spaces"),
        ("query", {"before_id": 1 << 63}, "before_id"),
        ("query", {"actor_user_id": "a b"}, "actor_user_id"),
    ],
    ids=range(25),
)
def test_what_cannot_be_kept_or_asked_is_refused_by_name(
    http: httpx2.Client, dsn: str, path: str, given: dict, field: str
) -> None:
    usual: dict[str, dict] = {
        "items": {"item_type": "task", "title": "x"},
        "events": {"event_type": "note", "content_md": "x"},
        "query": {},
    }
    reply = http.post(f"/logbook/{path}", json={**usual[path], **given})
    assert reply.status_code == 400, reply.text
    assert set(reply.json()["context"]["fields"]) == {field}
    assert (count(dsn, "items"), count(dsn, "events")) == (0, 0)


@pytest.mark.anyio
async def test_an_agent_keeps_a_logbook(gateway: str) -> None:
    async with Client(f"{gateway}/mcp") as client:
        item = (
            await client.call_tool("logbook_create_item", {"item_type": "task", "title": "T"})
        ).structured_content
        await client.call_tool(
            "logbook_add_event", {"event_type": "note", "content_md": "Begun.", "item_id": item["item_id"]}
        )
        found = (await client.call_tool("logbook_query", {"text": "begun"})).structured_content
    assert [event["item_id"] for event in found["events"]] == [item["item_id"]]
