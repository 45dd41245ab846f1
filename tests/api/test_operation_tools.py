"""The report, governance and evidence, as they are reached from outside."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client

from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from support.admission import admitted
from support.serving import serving

ERAS = ["legacy", "2026-07-28"]


def post(http: httpx2.Client, path: str, actor: str | None = None, **given: Any) -> dict[str, Any]:
    reply = http.post(path, json={**given, **({"actor_user_id": actor} if actor else {})})
    assert reply.status_code == 200, reply.text
    assert reply.json()["correlation_id"] == reply.headers["x-correlation-id"]
    return reply.json()


def history(dsn: str) -> int:
    with connect(dsn) as connection:
        found = connection.execute("SELECT count(*) AS n FROM governance.settings_history").fetchone()
    assert found is not None
    return found["n"]


@pytest.fixture
def token_of() -> dict[str, str]:
    return {}


@pytest.fixture
def gate(settings: Settings, tmp_path: Path, token_of: dict[str, str]) -> Iterator[httpx2.Client]:
    """A gateway that knows its callers by their tokens."""
    file = tmp_path / "tokens.toml"
    for name, owner, scopes, spaces in (
        ("reader", "carol", ["read"], None),
        ("writer", "carol", ["write"], None),
        ("ada", "ada", ["read", "write"], None),
        ("bob", "bob", ["read", "write"], None),
        ("outsider", "eve", ["read", "write", "admin"], ["team:other"]),
        ("root", "root", ["read", "write", "admin"], None),
    ):
        token_of[name] = admitted(file, owner, scopes, spaces)
    with (
        serving(build_app(replace(settings, tokens_file=file))) as url,
        httpx2.Client(base_url=url, trust_env=False) as client,
    ):
        yield client


def test_the_report_is_the_same_by_get_post_and_bare_form(http: httpx2.Client) -> None:
    post(http, "/memory/store", payload_md="A fact.", evidence_refs=["mr://project/1"])
    post(http, "/memory/store", payload_md="Elsewhere.", target_space="team:closed")
    by_post = post(http, "/reliability/report", since="24h")
    by_get = http.get("/reliability/report", params={"since": "24h"}).json()
    bare = http.post("/mcp", json={"tool": "reliability_report", "arguments": {"since": "24h"}}).json()
    for reply in (by_post, by_get, bare):
        del reply["correlation_id"], reply["since"]
    assert by_post == by_get == bare
    assert (by_post["ok"], by_post["total_writes"], by_post["success_rate"]) == (True, 2, 1.0)
    assert by_post["by_reason"] == {"(none)": 1, "policy_redirect:team_write_disabled": 1}
    assert (by_post["evidence"]["stores"], by_post["evidence"]["with_evidence"]) == (2, 1)
    assert all(invariant["ok"] for invariant in by_post["invariants"])


@pytest.mark.parametrize("since", ["soon", "", "x" * 100])
def test_a_bad_since_is_named_by_every_way_in(http: httpx2.Client, since: str) -> None:
    replies = [
        http.get("/reliability/report", params={"since": since}),
        http.post("/reliability/report", json={"since": since}),
        http.post("/mcp", json={"tool": "reliability_report", "arguments": {"since": since}}),
    ]
    for reply in replies:
        assert (reply.status_code, reply.json()["error_code"]) == (400, "INVALID_ARGUMENT")
        assert set(reply.json()["context"]["fields"]) == {"since"}


def test_the_report_shows_nothing_private(http: httpx2.Client) -> None:
    post(http, "/memory/store", "ada", payload_md="Ada's hidden fact.", kind="SECRETKIND")
    post(http, "/evidence/upload", "ada", content="Ada's hidden log.", name="hidden.log")
    post(http, "/logbook/events", "ada", event_type="hiddentype", content_md="Ada's hidden event.")
    shown = http.post("/reliability/report", json={"actor_user_id": "bob"}).text.lower()
    assert [word for word in ("ada", "hidden", "secretkind", "private:") if word in shown] == []


def test_governance_changes_what_is_given_and_shows_the_rest(http: httpx2.Client, dsn: str) -> None:
    before = post(http, "/governance/settings/update", project_key="payments")
    assert (before["team_write_enabled"], before["policy_json"], before["history"]) == (False, {}, [])
    assert history(dsn) == 0, "looking changes nothing"
    opened = post(http, "/governance/settings/update", "ada", project_key="payments", team_write_enabled=True)
    assert (opened["team_write_enabled"], opened["policy_json"], opened["updated_by"]) == (True, {}, "ada")
    policy = {"max_chars": 100, "allowed_kinds": ["FACT"]}
    limited = post(http, "/governance/settings/update", "bob", project_key="payments", policy_json=policy)
    assert (limited["team_write_enabled"], limited["policy_json"]) == (True, policy)
    assert [entry["changed_by"] for entry in limited["history"]] == ["bob", "ada"]
    assert limited["history"][0]["before"] == {"team_write_enabled": True, "policy_json": {}}
    with connect(dsn) as connection:
        assert connection.execute("SELECT FROM governance.write_audit").fetchall() == []


def test_a_change_takes_effect_at_once(http: httpx2.Client) -> None:
    call = {"payload_md": "A fact.", "target_space": "team:payments", "kind": "FACT", "actor_user_id": "ada"}
    assert http.post("/memory/store", json=call).json()["action"] == "redirect"
    post(
        http,
        "/governance/settings/update",
        project_key="payments",
        team_write_enabled=True,
        policy_json={"allowed_kinds": ["fact"]},
    )
    assert http.post("/memory/store", json=call).json()["space_written"] == "team:payments"
    other = {**call, "kind": "DECISION", "payload_md": "Another."}
    assert http.post("/memory/store", json=other).json()["space_written"] == "private:ada"


def test_by_default_it_is_the_gateways_own_project(http: httpx2.Client, settings: Settings) -> None:
    reply = post(http, "/governance/settings/update", team_write_enabled=True)
    assert reply["project_key"] == settings.project_key


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"max_char": 10}, "policy_json.max_char"),
        ({"max_chars": "many"}, "policy_json.max_chars"),
        ({"allowlist_users": "ada"}, "policy_json.allowlist_users"),
        ({"max_chars": 10, "bulk_max_chars": 20}, "policy_json.bulk_max_chars"),
    ],
)
def test_a_bad_policy_is_refused_and_changes_nothing(
    http: httpx2.Client, dsn: str, policy: dict, field: str
) -> None:
    reply = http.post("/governance/settings/update", json={"team_write_enabled": True, "policy_json": policy})
    assert reply.status_code == 400
    assert field in reply.json()["context"]["fields"]
    assert history(dsn) == 0


@pytest.mark.parametrize("project", ["", "a b", "x" * 129, ":x", "a\u0000b"])
def test_a_bad_project_is_refused_by_name(http: httpx2.Client, project: str) -> None:
    for path, more in (
        ("/governance/settings/update", {"team_write_enabled": True}),
        ("/logbook/items", {"item_type": "task", "title": "x"}),
    ):
        reply = http.post(path, json={"project_key": project, **more})
        assert reply.status_code == 400
        assert set(reply.json()["context"]["fields"]) == {"project_key"}


def test_changes_made_at_once_are_both_kept(http: httpx2.Client) -> None:
    for _ in range(5):
        post(http, "/governance/settings/update", team_write_enabled=False, policy_json={})
        changes = [{"team_write_enabled": True}, {"policy_json": {"max_chars": 10}}]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda c: post(http, "/governance/settings/update", **c), changes))
        now = post(http, "/governance/settings/update")
        assert (now["team_write_enabled"], now["policy_json"]) == (True, {"max_chars": 10})


def test_a_repeated_change_is_one_change(http: httpx2.Client, dsn: str) -> None:
    for _ in range(3):
        post(http, "/governance/settings/update", "ada", team_write_enabled=True)
    assert history(dsn) == 1


@pytest.mark.parametrize("name", ["reader", "writer", "ada"])
def test_only_an_administrator_governs(
    gate: httpx2.Client, token_of: dict[str, str], name: str, dsn: str
) -> None:
    for body in ({}, {"team_write_enabled": True}):
        reply = gate.post(
            "/governance/settings/update", json=body, headers={"Authorization": f"Bearer {token_of[name]}"}
        )
        assert (reply.status_code, reply.json()["error_code"]) == (403, "FORBIDDEN")
    assert history(dsn) == 0


def test_an_administrator_governs_only_what_its_token_lists(
    gate: httpx2.Client, token_of: dict[str, str], dsn: str
) -> None:
    eve = {"Authorization": f"Bearer {token_of['outsider']}"}
    change = {"project_key": "payments", "team_write_enabled": True}
    assert gate.post("/governance/settings/update", json=change, headers=eve).status_code == 403
    assert (
        gate.post("/governance/settings/update", json={"project_key": "payments"}, headers=eve).status_code
        == 403
    )
    assert history(dsn) == 0
    own = {**change, "project_key": "other"}
    assert gate.post("/governance/settings/update", json=own, headers=eve).json()["updated_by"] == "eve"


def test_scopes_say_what_a_token_may_do(gate: httpx2.Client, token_of: dict[str, str]) -> None:
    calls = {
        "/reliability/report": {},
        "/evidence/read": {"uri": f"memory://attachments/1/{'a' * 64}"},
        "/logbook/query": {},
        "/evidence/upload": {"content": "x"},
        "/logbook/items": {"item_type": "task", "title": "x"},
        "/logbook/events": {"event_type": "note", "content_md": "x"},
    }
    reading = {"/reliability/report", "/evidence/read", "/logbook/query"}
    for path, body in calls.items():
        for name, allowed in (("reader", path in reading), ("writer", path not in reading)):
            reply = gate.post(path, json=body, headers={"Authorization": f"Bearer {token_of[name]}"})
            assert (reply.status_code == 403) is not allowed, (path, name, reply.text)


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_an_agent_rests_a_memory_on_evidence(gateway: str, era: str) -> None:
    async with Client(f"{gateway}/mcp", mode=era) as client:
        kept = (
            await client.call_tool("evidence_upload", {"content": f"A {era} log.", "kind": "log"})
        ).structured_content
        stored = await client.call_tool(
            "memory_store", {"payload_md": f"The {era} job fails.", "evidence_refs": [kept["uri"]]}
        )
        assert stored.structured_content["evidence_refs"] == [kept["uri"]]
        found = (await client.call_tool("evidence_read", {"uri": kept["uri"]})).structured_content
        report = (await client.call_tool("reliability_report", {})).structured_content
    assert (found["content"], found["kind"]) == (f"A {era} log.", "log")
    assert report["evidence"]["with_evidence"] == 1
    assert all(invariant["ok"] for invariant in report["invariants"])


def test_bytes_travel_in_base64(http: httpx2.Client) -> None:
    content = bytes(range(256)) * 10
    kept = post(http, "/evidence/upload", content=base64.b64encode(content).decode(), encoding="base64")
    found = post(http, "/evidence/read", uri=kept["uri"])
    assert base64.b64decode(found["content"]) == content


def test_nobody_reads_anothers_evidence(gate: httpx2.Client, token_of: dict[str, str]) -> None:
    def call(name: str, path: str, body: dict) -> httpx2.Response:
        return gate.post(path, json=body, headers={"Authorization": f"Bearer {token_of[name]}"})

    uri = call("ada", "/evidence/upload", {"content": "Ada's secret."}).json()["uri"]
    assert call("ada", "/evidence/read", {"uri": uri}).json()["content"] == "Ada's secret."
    for name in ("bob", "root", "outsider"):
        reply = call(name, "/evidence/read", {"uri": uri})
        assert (reply.status_code, reply.json()["error_code"]) == (404, "NOT_FOUND")
        assert "secret" not in reply.text
    pretending = call("bob", "/evidence/read", {"uri": uri, "actor_user_id": "ada"})
    assert pretending.status_code == 403


def test_an_upload_that_is_too_large_is_refused_before_it_is_read(
    http: httpx2.Client, settings: Settings
) -> None:
    reply = http.post("/evidence/upload", json={"content": "x" * settings.max_body_bytes})
    assert (reply.status_code, reply.json()["error_code"]) == (413, "REQUEST_REFUSED")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "content"),
        ({"content": "x", "encoding": "utf-16"}, "encoding"),
        ({"content": "%%%", "encoding": "base64"}, "content"),
        ({"content": "a\u0000b"}, "content"),
        ({"content": "x", "item_id": 1 << 63}, "item_id"),
        ({"content": "x", "path": "/etc/passwd"}, "path"),
    ],
)
def test_a_bad_upload_names_the_field(http: httpx2.Client, body: dict, field: str) -> None:
    reply = http.post("/evidence/upload", json=body)
    assert reply.status_code == 400
    assert set(reply.json()["context"]["fields"]) == {field}
