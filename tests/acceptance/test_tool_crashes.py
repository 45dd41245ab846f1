"""A gateway killed in the middle of a tool: what it made is made once, and nothing points to nothing."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.web.sockets import free_port
from support.processes import answers, environment, eventually, started
from support.serving import serving

pytestmark = pytest.mark.crash

MAKING = {
    "logbook_create_item": {"item_type": "task", "title": "Once"},
    "logbook_add_event": {"event_type": "note", "content_md": "Once."},
    "evidence_upload": {"content": "Once."},
    "governance_update": {"team_write_enabled": True},
}
TABLES = {
    "logbook_create_item": "logbook.items",
    "logbook_add_event": "logbook.events",
    "evidence_upload": "logbook.attachments",
    "governance_update": "governance.settings_history",
}


@pytest.fixture
def served(settings: Settings) -> Settings:
    return replace(settings, gateway_port=free_port())


def count(dsn: str, tool: str) -> int:
    with connect(dsn) as connection:
        found = connection.execute(f"SELECT count(*) AS n FROM {TABLES[tool]}".encode()).fetchone()
    assert found is not None
    return found["n"]


def call(url: str, tool: str, **more: Any) -> dict[str, Any] | None:
    """None when no reply came."""
    try:
        body = {"tool": tool, "arguments": {**MAKING[tool], **more}}
        return httpx2.post(f"{url}/mcp", json=body, trust_env=False, timeout=30).json()
    except httpx2.HTTPError:
        return None


def killed_at(failpoint: str, served: Settings, log: Path, tool: str, **more: Any) -> None:
    armed = environment(served, ENGRAM_FAILPOINT=failpoint)
    with started("serve", env=armed, log=log) as gateway:
        eventually(lambda: answers(f"{served.gateway_url}/health"), "the gateway")
        assert call(served.gateway_url, tool, **more) is None
        assert gateway.wait(10) == -signal.SIGKILL, "the failpoint was never reached"


@pytest.mark.parametrize("tool", MAKING)
def test_what_was_made_before_the_crash_is_what_the_repeat_answers(
    served: Settings, dsn: str, tmp_path: Path, tool: str
) -> None:
    log = tmp_path / "gateway.log"
    killed_at("idempotency.before_save", served, log, tool, idempotency_key="key-1")
    assert count(dsn, tool) == 1
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.idempotency_keys SET locked_at = locked_at - interval '1 hour'")
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{served.gateway_url}/health"), "the gateway again")
        replies = [call(served.gateway_url, tool, idempotency_key="key-1") for _ in range(2)]
    assert replies[0] is not None
    assert replies[0]["ok"]
    assert replies[0] == replies[1]
    assert count(dsn, tool) == 1


def test_a_crash_between_bytes_and_row_leaves_bytes_that_nothing_refers_to(
    served: Settings, dsn: str, tmp_path: Path
) -> None:
    log = tmp_path / "gateway.log"
    killed_at("evidence.after_bytes", served, log, "evidence_upload")
    assert count(dsn, "evidence_upload") == 0
    assert served.artifacts_dir is not None
    assert [p.read_text() for p in served.artifacts_dir.rglob("*") if p.is_file()] == ["Once."]
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{served.gateway_url}/health"), "the gateway again")
        kept = call(served.gateway_url, "evidence_upload")
        assert kept is not None
        read = {"tool": "evidence_read", "arguments": {"uri": kept["uri"]}}
        found = httpx2.post(f"{served.gateway_url}/mcp", json=read, trust_env=False).json()
    assert (found["content"], kept["deduplicated"]) == ("Once.", False)
