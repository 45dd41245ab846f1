"""From an upload to an answer, as people and agents ask: HTTP, MCP's bare form, the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest

from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from ingest import samples
from support.processes import environment, eventually, run_engram
from support.serving import serving

from .conftest import working

pytestmark = pytest.mark.xdist_group("knowledge_search")

LEASES = "Only the holder of a live lease may settle a row."


@pytest.fixture
def client(api_settings: Settings) -> Iterator[httpx2.Client]:
    with (
        serving(build_app(api_settings)) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=30) as client,
        working(api_settings),
    ):
        yield client


def upload(client: httpx2.Client, content: bytes, name: str) -> dict[str, str]:
    reply = client.post("/api/knowledge/documents/upload-async", files={"file": (name, content)})
    assert reply.status_code == 202, reply.text
    made: dict[str, str] = reply.json()
    return made


def settled(client: httpx2.Client, task: str) -> dict[str, object]:
    def look() -> dict[str, object] | None:
        found = client.get(f"/api/knowledge/tasks/{task}").json()
        return found if found["status"] in ("SUCCEEDED", "DEAD") else None

    return eventually(look, "the task to end", 30)


def test_an_uploaded_paragraph_is_found_wherever_it_is_asked_for(
    client: httpx2.Client, api_settings: Settings
) -> None:
    pages = [["Outages", "An outage is not an attempt."], ["Leases", LEASES]]
    made = upload(client, samples.pdf(pages), "rules.pdf")
    upload(client, "# 租约\n\n只有持有有效租约的工作者才能结算一行数据。".encode(), "手册.md")
    done = settled(client, made["taskId"])
    assert (done["status"], done["totalSegments"]) == ("SUCCEEDED", 2)

    reply = client.post("/api/knowledge/search", json={"query": "who may settle a row?", "topK": 1})
    assert reply.status_code == 200
    (hit,) = reply.json()["results"]
    score = hit.pop("score")
    assert 0.5 < score <= 1
    assert hit == {
        "documentId": made["documentId"],
        "title": "rules.pdf",
        "heading": "Leases",
        "page": 2,
        "ordinal": 1,
        "passage": LEASES,
    }
    assert reply.json()["wordsOnlyBecause"] is None

    arguments = {"query": "settle", "document_id": made["documentId"]}
    told = client.post("/mcp", json={"tool": "knowledge_search", "arguments": arguments}).json()
    assert told["results"][0]["passage"] == LEASES
    assert told["results"][0]["document_id"] == made["documentId"]

    env = environment(replace(api_settings, gateway_port=client.base_url.port or 0), COLUMNS="60")
    shown = run_engram("search", "who may settle a row?", "--top-k", "1", env=env).stdout
    assert "rules.pdf  Leases  p. 2" in shown
    assert "Only the holder of a live lease may settle a row." in " ".join(shown.split())
    whole = run_engram("search", "settle a row", "--json", env=env).stdout
    assert json.loads(whole)["results"][0]["page"] == 2

    assert client.delete(f"/api/knowledge/documents/{made['documentId']}").status_code == 200
    left = client.post("/api/knowledge/search", json={"query": "who may settle a row?"}).json()
    assert all(hit["documentId"] != made["documentId"] for hit in left["results"])


NOT_UNDERSTOOD: list[dict[str, object]] = [
    {},
    {"query": ""},
    {"query": "x", "topK": 0},
    {"query": "x", "topK": 51},
    {"query": "x" * 2001},
    {"query": "x", "documentId": "none"},
    {"query": "x", "more": 1},
    {"query": "a\u0000b"},
]


def test_a_search_that_cannot_be_understood_is_refused(http: httpx2.Client) -> None:
    for body in NOT_UNDERSTOOD:
        reply = http.post("/api/knowledge/search", json=body)
        assert reply.status_code == 400, body
        assert reply.json()["error_code"] == "INVALID_ARGUMENT"


def test_a_document_that_kills_its_parser_ends_and_one_that_is_damaged_ends_at_once(
    api_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.assembly.ingest.INGEST_UPKEEP_SECONDS", 0.2)
    # In so little memory no PDF can be read: the child dies without a word.
    small = replace(api_settings, parser_memory_mb=48)
    with (
        serving(build_app(small)) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=30) as client,
        working(small),
    ):
        killing = settled(client, upload(client, samples.pdf([["A", "b"]]), "a.pdf")["taskId"])
    assert (killing["status"], killing["attemptCount"]) == ("DEAD", small.ingest_max_attempts)
    assert "the parser died" in str(killing["lastError"])
    with (
        serving(build_app(api_settings)) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=30) as client,
        working(api_settings),
    ):
        damaged = settled(client, upload(client, b"%PDF-1.4 nonsense", "b.pdf")["taskId"])
    assert (damaged["status"], damaged["attemptCount"]) == ("DEAD", 1)
    assert "damaged" in str(damaged["errorMessage"])
