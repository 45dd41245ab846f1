"""SIGKILL at every failpoint of storing and delivering, then recovery, judged by the ledger."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from engram.kernel.failpoints import FAILPOINTS
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.web.sockets import free_port
from support.backend import Backend
from support.faults import Fault, Order
from support.ledger import Ledger
from support.processes import answers, environment, eventually, run_engram, started

pytestmark = pytest.mark.crash

OF_THE_GATEWAY = [name for name in FAILPOINTS if name.startswith("memory_store.")]
OF_THE_WORKER = [name for name in FAILPOINTS if name.startswith("outbox_worker.")]


@pytest.fixture
def served(settings: Settings) -> Settings:
    return replace(settings, gateway_port=free_port(), store_deadline_seconds=5, outbox_lease_seconds=30)


@pytest.fixture
def url(served: Settings) -> str:
    return f"http://127.0.0.1:{served.gateway_port}"


def move_time(dsn: str) -> None:
    """An hour passes: intents are overdue, leases are over, retries are due."""
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.memories SET intent_at = intent_at - interval '1 hour'")
        connection.execute(
            "UPDATE logbook.outbox_memory SET locked_at = locked_at - interval '1 hour',"
            " next_attempt_at = next_attempt_at - interval '1 hour'"
        )


def recover(served: Settings) -> None:
    """What `engram up` does by itself in time: reconcile, then deliver."""
    move_time(served.postgres_dsn or "")
    done = run_engram("worker", "outbox", "--once", env=environment(served))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend_fails", [False, True], ids=["server-well", "server-ill"])
@pytest.mark.parametrize("name", OF_THE_GATEWAY)
def test_a_gateway_killed_anywhere_in_a_store_loses_and_doubles_nothing(
    served: Settings, url: str, backend: Backend, dsn: str, tmp_path: Path, name: str, backend_fails: bool
) -> None:
    reached = _is_reached(name, backend_fails)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    armed = environment(served, ENGRAM_FAILPOINT=f"{name}:2")
    with started("serve", env=armed, log=tmp_path / "gateway.log") as gateway:
        eventually(lambda: answers(f"{url}/health"), "the gateway")
        for n in range(2):
            if backend_fails:
                backend.faults.fail(Order(Fault.AFTER_500))
            ledger.store(url, f"fact {n}")
        assert (gateway.poll() == -signal.SIGKILL) is reached, "the failpoint was not where it should be"
    backend.faults.reset()
    with started("serve", env=environment(served), log=tmp_path / "gateway.log"):
        eventually(lambda: answers(f"{url}/health"), "the gateway again")
        move_time(dsn)
        ledger.store(url, "fact 1")
    recover(served)
    assert ledger.verdict(dsn, backend.contents()) == []
    assert sorted(backend.contents()) == ["fact 0", "fact 1"]


def _is_reached(name: str, backend_fails: bool) -> bool:
    """after_call is reached by a success only, before_park by a failure only."""
    return {"memory_store.after_call": not backend_fails, "memory_store.before_park": backend_fails}.get(
        name, True
    )


@pytest.mark.parametrize("name", OF_THE_WORKER)
def test_a_worker_killed_anywhere_delivers_everything_once(
    served: Settings, url: str, backend: Backend, dsn: str, tmp_path: Path, name: str
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with started("serve", env=environment(served), log=tmp_path / "gateway.log"):
        eventually(lambda: answers(f"{url}/health"), "the gateway")
        for n in range(5):
            backend.faults.fail(Order(Fault.STATUS, 503))
            reply = ledger.store(url, f"fact {n}")
            assert reply is not None
            assert reply["action"] == "deferred"
    killed = run_engram("worker", "outbox", "--once", env=environment(served, ENGRAM_FAILPOINT=name))
    assert killed.returncode == -signal.SIGKILL, "the failpoint was never reached"
    recover(served)
    assert ledger.verdict(dsn, backend.contents()) == []
    assert sorted(backend.contents()) == [f"fact {n}" for n in range(5)]
