"""Documents over HTTP: what an owner sees, and what nobody else does."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from redis import Redis

from engram.assembly.gateway import build_app
from engram.assembly.parts import artifacts
from engram.kernel.errors import DocumentRefused
from engram.kernel.settings import Settings
from engram.logbook.uri import build_content_key
from support.admission import admitted
from support.processes import eventually
from support.serving import serving

from .conftest import FakePipeline, working

UPLOAD = "/api/knowledge/documents/upload-async"


def send(http: httpx2.Client, content: bytes = b"# Leases\n\nText.", name: str = "a.md", **more) -> dict:
    reply = http.post(UPLOAD, files={"file": (name, content)}, **more)
    assert reply.status_code == 202, reply.text
    return reply.json()


def ended(http: httpx2.Client, task_id: str) -> dict:
    def look() -> dict | None:
        task = http.get(f"/api/knowledge/tasks/{task_id}").json()
        return task if task["status"] in ("SUCCEEDED", "DEAD") else None

    return eventually(look, "the task to end", 20)


def test_from_upload_to_success(http: httpx2.Client, api_settings: Settings, pipeline: FakePipeline) -> None:
    made = send(http, data={"title": "On leases"})
    assert set(made) == {"taskId", "documentId", "status"}
    assert made["status"] == "QUEUED"
    before = http.get(f"/api/knowledge/tasks/{made['taskId']}").json()
    assert (before["progress"], before["totalSegments"], before["attemptCount"]) == (0, None, 0)
    metrics = http.get("/metrics").text
    assert 'ingest_stream_length{stream="ingest:tasks"} 1.0' in metrics
    assert 'ingest_stream_pending{group="ingest-workers",stream="ingest:tasks"} 0.0' in metrics
    with (
        working(api_settings, pipeline),
        http.stream("GET", f"/api/knowledge/tasks/{made['taskId']}/events") as events,
    ):
        assert events.headers["content-type"].startswith("text/event-stream")
        said = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
    assert said[0]["status"] in ("QUEUED", "RUNNING")
    assert said[-1]["status"] == "SUCCEEDED"
    assert (said[-1]["progress"], said[-1]["processedSegments"], said[-1]["totalSegments"]) == (100, 3, 3)
    assert [t["toStatus"] for t in said[-1]["transitions"]] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    document = http.get(f"/api/knowledge/documents/{made['documentId']}").json()
    assert (document["title"], document["filename"], document["mediaType"]) == (
        "On leases",
        "a.md",
        "text/markdown",
    )
    assert (document["status"], document["segments"], document["bytes"]) == ("READY", 3, 15)
    with artifacts(api_settings).open(build_content_key(document["sha256"])) as kept:
        assert kept.read() == b"# Leases\n\nText."


def test_a_refused_document_is_dead_at_once_and_can_be_retried(
    http: httpx2.Client, api_settings: Settings, pipeline: FakePipeline
) -> None:
    async def refuse(work, lease):
        raise DocumentRefused("it is encrypted")

    pipeline.behave = refuse
    made = send(http)
    url = f"/api/knowledge/tasks/{made['taskId']}"
    early = http.post(f"{url}/retry", json={})
    assert early.status_code == 409
    assert early.json()["error_code"] == "STATE_CONFLICT"
    with working(api_settings, pipeline):
        dead = ended(http, made["taskId"])
        assert (dead["status"], dead["attemptCount"], dead["nextRetryAt"]) == ("DEAD", 1, None)
        assert dead["lastError"] == dead["errorMessage"] == "it is encrypted"
        with http.stream("GET", f"{url}/events") as events:
            assert '"DEAD"' in "".join(events.iter_text())
        pipeline.behave = None
        assert http.post(f"{url}/retry", json={}).status_code == 202
        assert ended(http, made["taskId"])["status"] == "SUCCEEDED"
    with Redis.from_url(api_settings.redis_url) as redis:
        assert redis.xlen("ingest:tasks:dlq") == 1


def test_the_same_bytes_are_one_document_and_a_key_makes_one_task(http: httpx2.Client) -> None:
    first, second = send(http), send(http, name="b.md")
    assert first["documentId"] == second["documentId"]
    assert first["taskId"] != second["taskId"]
    key = {"Idempotency-Key": "k-1"}
    once = http.post(UPLOAD, files={"file": ("c.md", b"# Another")}, headers=key)
    again = http.post(UPLOAD, files={"file": ("c.md", b"# Another")}, headers=key)
    assert once.json() == again.json()
    assert again.headers["Idempotency-Replayed"] == "true"
    other = http.post(UPLOAD, files={"file": ("c.md", b"# Something else")}, headers=key)
    assert other.status_code == 409
    bad = http.post(UPLOAD, files={"file": ("c.md", b"# Another")}, headers={"Idempotency-Key": "no spaces"})
    assert bad.status_code == 400
    tasks = http.get("/api/knowledge/tasks").json()["tasks"]
    assert len(tasks) == 3
    assert len(http.get("/api/knowledge/documents").json()["documents"]) == 2


def test_lists_are_filtered_and_paged(http: httpx2.Client) -> None:
    made = [send(http, f"# Number {n}".encode()) for n in range(5)]
    seen, cursor = [], None
    while True:
        page = http.get("/api/knowledge/tasks", params={"limit": 2, **({"cursor": cursor} if cursor else {})})
        seen += [task["taskId"] for task in page.json()["tasks"]]
        cursor = page.json()["nextCursor"]
        if cursor is None:
            break
    assert seen == [each["taskId"] for each in reversed(made)]
    of_one = {"documentId": made[0]["documentId"], "status": "QUEUED"}
    assert [t["taskId"] for t in http.get("/api/knowledge/tasks", params=of_one).json()["tasks"]] == [
        made[0]["taskId"]
    ]
    assert http.get("/api/knowledge/tasks", params={"status": "DEAD"}).json()["tasks"] == []
    for wrong in ({"status": "LOST"}, {"limit": 0}, {"cursor": "nonsense"}, {"documentId": "1"}):
        assert http.get("/api/knowledge/tasks", params=wrong).status_code == 400
    documents = http.get("/api/knowledge/documents", params={"limit": 2}).json()
    assert [d["documentId"] for d in documents["documents"]] == [m["documentId"] for m in made[:2:-1]]


@pytest.mark.parametrize(
    ("status", "given"),
    [
        (400, {"data": {"title": "no file"}, "files": {"other": ("a.md", b"x")}}),
        (400, {"json": {}}),
        (422, {"files": {"file": ("a.md", b"")}}),
        (422, {"files": {"file": ("a.md", b"\x7fELF\x00\x01\x02\x03" * 64)}}),
        (400, {"files": {"file": ("a.md", b"x")}, "data": {"title": "x" * 301}}),
        (413, {"files": {"file": ("a.md", b"x" * ((1 << 20) + 1))}}),
        (413, {"files": {"file": ("a.md", b"x" * (2 << 20))}}),
        (415, {"content": b"x", "headers": {"content-type": "text/plain"}}),
        (400, {"content": b"x", "headers": {"content-type": "multipart/form-data"}}),
        (
            400,
            {"content": b"--b\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        ),
    ],
)
def test_bad_uploads_are_refused_and_leave_nothing(
    http: httpx2.Client, api_settings: Settings, status: int, given: dict
) -> None:
    reply = http.post(UPLOAD, **given)
    assert reply.status_code == status, reply.text
    assert reply.json()["success"] is False
    assert http.get("/api/knowledge/documents").json()["documents"] == []
    left = [path for path in Path(api_settings.artifacts_dir or "").rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..\\..\\boot.ini", "a\x01b\n.md", "ü" * 300 + ".md", ""]
)
def test_a_file_name_is_only_ever_shown(http: httpx2.Client, api_settings: Settings, name: str) -> None:
    made = send(http, name=name or " ")
    shown = http.get(f"/api/knowledge/documents/{made['documentId']}").json()["filename"]
    assert shown
    assert len(shown) <= 255
    assert "/" not in shown
    assert "\\" not in shown
    assert shown.isprintable()


def test_deleting_takes_the_bytes_unless_somebody_else_needs_them(
    api_settings: Settings, tmp_path: Path, pipeline: FakePipeline
) -> None:
    file = tmp_path / "tokens.toml"
    secrets = {owner: admitted(file, owner, ["read", "write"]) for owner in ("ann", "bob")}
    reader = admitted(file, "ann", ["read"])
    with serving(build_app(replace(api_settings, tokens_file=file))) as url:
        clients = {
            owner: httpx2.Client(base_url=url, trust_env=False, headers={"Authorization": f"Bearer {secret}"})
            for owner, secret in {**secrets, "reader": reader}.items()
        }
        ann, bob = clients["ann"], clients["bob"]
        hers, his = send(ann), send(bob)
        assert hers["documentId"] != his["documentId"]
        # Another owner's is not there, whatever is asked of it.
        for path in (
            f"tasks/{hers['taskId']}",
            f"tasks/{hers['taskId']}/events",
            f"documents/{hers['documentId']}",
        ):
            assert bob.get(f"/api/knowledge/{path}").status_code == 404
        assert bob.post(f"/api/knowledge/tasks/{hers['taskId']}/retry", json={}).status_code == 404
        assert bob.delete(f"/api/knowledge/documents/{hers['documentId']}").status_code == 404
        assert [t["taskId"] for t in bob.get("/api/knowledge/tasks").json()["tasks"]] == [his["taskId"]]
        assert (
            bob.get("/api/knowledge/tasks", params={"documentId": hers["documentId"]}).json()["tasks"] == []
        )
        # A token that may only read writes nothing.
        assert clients["reader"].post(UPLOAD, files={"file": ("a.md", b"# x")}).status_code == 403
        assert clients["reader"].delete(f"/api/knowledge/documents/{hers['documentId']}").status_code == 403
        store = artifacts(api_settings)
        key = build_content_key(ann.get(f"/api/knowledge/documents/{hers['documentId']}").json()["sha256"])
        assert ann.delete(f"/api/knowledge/documents/{hers['documentId']}").json()["deleted"] is True
        assert ann.get(f"/api/knowledge/tasks/{hers['taskId']}").status_code == 404
        assert store.exists(key)
        assert bob.delete(f"/api/knowledge/documents/{his['documentId']}").status_code == 200
        assert not store.exists(key)
        for client in clients.values():
            client.close()


def test_an_upload_is_taken_while_redis_is_away_and_found_by_the_sweeper(
    api_settings: Settings, pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.ingest.sweeper.UPLOAD_SECONDS", 0.0)
    away = replace(api_settings, redis_url="redis://127.0.0.1:1/0")
    with (
        serving(build_app(away)) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=30) as http,
    ):
        made = send(http)
        assert made["status"] == "QUEUED"
        assert http.get("/metrics").status_code == 200
        with working(api_settings, pipeline):
            assert ended(http, made["taskId"])["status"] == "SUCCEEDED"


def test_an_upload_that_is_broken_off_is_one_line_and_no_failure(
    http: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    head = (
        f"POST {UPLOAD} HTTP/1.1\r\nHost: {http.base_url.host}\r\nContent-Length: 500000\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        'Content-Disposition: form-data; name="file"; filename="a.md"\r\n\r\nOnly the beginning'
    )
    with socket.create_connection((http.base_url.host, http.base_url.port)) as client:
        client.sendall(head.encode())
        client.shutdown(socket.SHUT_WR)
    eventually(lambda: "upload.broken_off" in caplog.messages, "a word of it", 20)
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []
    assert not [record for record in caplog.records if record.exc_info]
    assert http.get("/api/knowledge/tasks").json()["tasks"] == []


def test_bytes_that_an_upload_is_about_to_refer_to_are_not_deleted(
    http: httpx2.Client, api_settings: Settings
) -> None:
    """Ann deletes her document while Bob's upload of the same bytes has them and has no row yet."""
    content = b"# One\n\nThe same for both."
    hers = send(http, content)
    store = artifacts(api_settings)
    with store.keeping(content) as artifact:
        gone = http.delete(f"/api/knowledge/documents/{hers['documentId']}")
        assert gone.status_code in (200, 204), gone.text
        assert store.exists(artifact.key)
    again = send(http, content)
    assert again["documentId"] != hers["documentId"]
    with store.open(artifact.key) as kept:
        assert kept.read() == content
    http.delete(f"/api/knowledge/documents/{again['documentId']}")
    assert not store.exists(artifact.key)


def test_a_gateway_that_starts_sweeps_the_drafts_of_writers_that_died(api_settings: Settings) -> None:
    drafts = Path(api_settings.artifacts_dir or "") / ".drafts"
    drafts.mkdir(parents=True, exist_ok=True)
    for name, hours in (("old", 2), ("young", 0)):
        (drafts / name).write_bytes(b"half of a document")
        then = time.time() - 3600 * hours
        os.utime(drafts / name, (then, then))
    with serving(build_app(api_settings)) as url:
        assert httpx2.get(f"{url}/health", trust_env=False).status_code == 200
        assert [path.name for path in drafts.iterdir()] == ["young"]
