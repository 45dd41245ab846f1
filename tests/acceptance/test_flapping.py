"""Many writers while everything behind the gateway comes and goes, judged by the ledger."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engram.cli.memory import call_tool
from engram.embedded import running_postgres
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.supervisor import Stack
from support.ledger import Ledger
from support.processes import eventually, started

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

WRITERS = 16
STORES = 200
READ_BACK = 20


def _settings(data_dir: Path) -> Settings:
    return replace(
        Settings.load({}),
        data_dir=data_dir,
        gateway_port=0,
        store_deadline_seconds=2.0,
        openmemory_timeout_seconds=1.0,
        breaker_cooldown_seconds=0.2,
        outbox_poll_seconds=0.2,
        outbox_lease_seconds=6,
        outbox_base_backoff_seconds=1,
        outbox_max_backoff_seconds=2,
        outbox_max_retries=50,
    )


def test_nothing_is_lost_or_doubled_while_everything_comes_and_goes(
    tmp_path: Path, seed: int, scale: float
) -> None:
    chance = random.Random(seed)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    stores = int(STORES * scale)
    with Stack(_settings(tmp_path / "data"), alone=True) as stack:
        log = tmp_path / "second-worker.log"
        with (
            started("worker", "outbox", env=stack.environment, log=log) as second,
            ThreadPoolExecutor(WRITERS) as writers,
        ):
            writing = [
                writers.submit(ledger.store, stack.gateway_url, f"Fact {n} of {seed}.") for n in range(stores)
            ]
            done: Callable[[], float] = lambda: sum(w.done() for w in writing) / stores  # noqa: E731
            for share in (0.15, 0.45, 0.7):
                _until(done, share)
                _flap(stack, chance)
                if share == 0.15:
                    second.kill()
                if share == 0.45:
                    os.kill(_postmaster(stack.settings.data_dir), signal.SIGKILL)
            replies = [w.result(120) for w in writing]
        eventually(lambda: _settled(stack.settings.data_dir), "everything to be settled", 90)
        actions = Counter((reply or {}).get("action", "failed") for reply in replies)
        print(dict(actions))
        contents = _contents(stack.settings.data_dir)
        assert ledger.verdict(_dsn(stack.settings.data_dir), contents) == []
        assert actions["allow"], "some were stored directly"
        assert actions["deferred"], "some were parked"
        allowed = [r["memory_id"] for r in replies if r and r.get("action") == "allow"]
        _read_back(stack.gateway_url, chance, ledger, allowed)


def _until(done: Callable[[], float], share: float) -> None:
    eventually(lambda: done() >= share, f"{share:.0%} of the writes", 120)


def _flap(stack: Stack, chance: random.Random) -> None:
    stack.hold_down("memory server", signal.SIGKILL)
    time.sleep(chance.uniform(0.2, 0.8))
    stack.bring_up("memory server")


def _postmaster(data_dir: Path) -> int:
    (found,) = data_dir.glob("**/postmaster.pid")
    return int(found.read_text().splitlines()[0])


def _dsn(data_dir: Path, database: str | None = None) -> str:
    found = running_postgres(data_dir, database) if database else running_postgres(data_dir)
    assert found is not None
    return found


def _settled(data_dir: Path) -> bool:
    with connect(_dsn(data_dir)) as connection:
        (row,) = connection.execute(
            "SELECT (SELECT count(*) FROM governance.write_audit WHERE status = 'pending')"
            " + (SELECT count(*) FROM logbook.outbox_memory WHERE status = 'pending') AS left"
        ).fetchall()
    return row["left"] == 0


def _contents(data_dir: Path) -> list[str]:
    with connect(_dsn(data_dir, "engram_memory")) as connection:
        return [row["content"] for row in connection.execute("SELECT content FROM memories")]


def _read_back(url: str, chance: random.Random, ledger: Ledger, allowed: list[str]) -> None:
    """What was answered allow is found by whoever asks for it."""
    texts = {e["reply"]["memory_id"]: e["text"] for e in ledger.entries() if e.get("reply", {}).get("ok")}
    for memory_id in chance.sample(allowed, min(READ_BACK, len(allowed))):
        found = call_tool("memory_query", {"query": texts[memory_id], "top_k": 5}, url)
        assert memory_id in [result["memory_id"] for result in found["results"]], texts[memory_id]
