"""What policy and the outbox say about a store reaches the caller as it was said."""

from __future__ import annotations

import httpx2
import pytest

from engram.logbook import governance
from engram.logbook.config import Config
from support.faults import Fault, Order

FACT = {"payload_md": "Deploy on Tuesdays.", "actor_user_id": "ada"}


@pytest.mark.parametrize(("is_bulk", "action"), [(True, "redirect"), (False, "allow")])
def test_a_bulk_write_is_told_apart(http: httpx2.Client, config: Config, is_bulk: bool, action: str) -> None:
    governance.upsert_settings("payments", True, {"bulk_enabled": False}, "ada", config=config)
    asked = {**FACT, "target_space": "team:payments", "is_bulk": is_bulk}
    reply = http.post("/memory/store", json=asked).json()
    assert (reply["action"], "bulk_not_allowed" in reply["message"]) == (action, is_bulk)


def test_is_bulk_is_a_flag(http: httpx2.Client) -> None:
    refused = http.post("/memory/store", json={**FACT, "is_bulk": [1]})
    assert refused.status_code == 400
    assert list(refused.json()["context"]["fields"]) == ["is_bulk"]


def test_a_dedup_hit_has_its_context(http: httpx2.Client, backend) -> None:
    backend.faults.fail(Order(Fault.STATUS, 500))
    first, again = (
        http.post("/mcp", json={"tool": "memory_store", "arguments": FACT}).json() for _ in range(2)
    )
    assert (first["action"], first["error_code"], first["context"]) == ("deferred", None, None)
    assert (again["action"], again["error_code"]) == ("deferred", "OUTBOX_DEDUP_HIT")
    assert again["context"]["outbox_id"] == first["outbox_id"]
    assert again["context"]["payload_sha"].startswith("sha256:")
    assert set(again["context"]) == {"target_space", "payload_sha", "timestamp", "outbox_id"}
