"""SIGKILL at every failpoint of storing and delivering, then recovery, judged by the ledger."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engram.assembly.gateway import build_app
from engram.kernel.failpoints import FAILPOINTS
from engram.kernel.settings import Settings
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.connection import close
from engram.postgres.pool import connect
from engram.web.sockets import free_port
from support.backend import Backend
from support.faults import Fault, FaultyServer, Order
from support.ledger import Ledger
from support.parts import used
from support.plain_server import PlainServer
from support.processes import answers, environment, eventually, run_engram, started
from support.serving import serving

pytestmark = pytest.mark.crash

OF_THE_GATEWAY = [name for name in FAILPOINTS if name.startswith("memory_store.")]
OF_IDEMPOTENCY = [name for name in FAILPOINTS if name.startswith("idempotency.")]
OF_FORGETTING = [name for name in FAILPOINTS if name.startswith(("memory_forget.", "erasing."))]
OF_RECONCILE = [name for name in FAILPOINTS if name.startswith("reconcile_outbox.")]
OF_THE_WORKER = [name for name in FAILPOINTS if name.startswith("outbox_worker.")]

SERVERS = ("embedded", "plain")
WHOLE = float(os.environ.get("ENGRAM_TEST_SCALE", "1")) > 1


def everywhere(names: list[str]) -> pytest.MarkDecorator:
    """Every failpoint, with the two memory servers in turn; `make soak` has every pair."""
    pairs = [
        (server, name)
        for at, name in enumerate(names)
        for turn, server in enumerate(SERVERS)
        if WHOLE or at % 2 == turn
    ]
    return pytest.mark.parametrize(("server", "name"), pairs, indirect=["server"])


def in_every_weather(names: list[str]) -> pytest.MarkDecorator:
    """The same, with a memory server that is well and one that is ill."""
    cases = [
        pytest.param(server, name, ill, id=f"{server}-{name}-server-{'ill' if ill else 'well'}")
        for at, name in enumerate(names)
        for turn, server in enumerate(SERVERS)
        for ill in (False, True)
        if WHOLE or (at + turn) % 2 == int(ill)
    ]
    return pytest.mark.parametrize(("server", "name", "backend_fails"), cases, indirect=["server"])


@pytest.fixture
def server(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Server]:
    """The embedded memory server; and a stand-in that would keep a doubled add twice."""
    if request.param == "embedded":
        yield Server(backend.url, backend.faults, backend.contents)
        return
    used("OpenMemory", "stand-in: a plain server without idempotency keys, besides the embedded one")
    plain = PlainServer()
    faults = FaultyServer(plain)
    with serving(faults) as url:
        yield Server(url, faults, plain.contents)


@dataclass
class Server:
    url: str
    faults: FaultyServer
    contents: Callable[[], list[str]]


@pytest.fixture
def served(settings: Settings, server: Server) -> Settings:
    return replace(
        settings,
        gateway_port=free_port(),
        openmemory_base_url=server.url,
        store_deadline_seconds=5,
        outbox_lease_seconds=30,
    )


@pytest.fixture
def url(served: Settings) -> str:
    return f"http://127.0.0.1:{served.gateway_port}"


def move_time(dsn: str) -> None:
    """An hour passes: intents are overdue, leases are over, retries are due."""
    with connect(dsn) as connection:
        connection.execute("UPDATE logbook.idempotency_keys SET locked_at = locked_at - interval '1 hour'")
        connection.execute(
            "UPDATE logbook.memories SET intent_at = intent_at - interval '1 hour',"
            " erase_due_at = erase_due_at - interval '1 hour',"
            " erase_locked_at = erase_locked_at - interval '1 hour'"
        )
        connection.execute(
            "UPDATE logbook.outbox_memory SET locked_at = locked_at - interval '1 hour',"
            " next_attempt_at = next_attempt_at - interval '1 hour',"
            " created_at = created_at - interval '1 hour', updated_at = updated_at - interval '1 hour'"
        )


def recover(served: Settings) -> None:
    """What `engram up` does by itself in time: reconcile, then deliver."""
    move_time(served.postgres_dsn or "")
    done = run_engram("worker", "outbox", "--once", env=environment(served))
    assert done.returncode == 0, done.stderr


@in_every_weather(OF_THE_GATEWAY)
def test_a_gateway_killed_anywhere_in_a_store_loses_and_doubles_nothing(
    served: Settings, url: str, server: Server, dsn: str, tmp_path: Path, name: str, backend_fails: bool
) -> None:
    reached = _is_reached(name, backend_fails)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    armed = environment(served, ENGRAM_FAILPOINT=f"{name}:2")
    with started("serve", env=armed, log=tmp_path / "gateway.log") as gateway:
        eventually(lambda: answers(f"{url}/health"), "the gateway")
        for n in range(2):
            if backend_fails:
                server.faults.fail(Order(Fault.AFTER_500))
            ledger.store(url, f"fact {n}")
        if reached:
            assert gateway.wait(10) == -signal.SIGKILL, "the failpoint was never reached"
        else:
            assert gateway.poll() is None, "the failpoint was not where it should be"
    server.faults.reset()
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{url}/health"), "the gateway again")
        move_time(dsn)
        ledger.store(url, "fact 1")
    recover(served)
    assert ledger.verdict(dsn, server.contents()) == []
    assert sorted(server.contents()) == ["fact 0", "fact 1"]


def _is_reached(name: str, backend_fails: bool) -> bool:
    """after_call is reached by a success only, before_park by a failure only."""
    return {"memory_store.after_call": not backend_fails, "memory_store.before_park": backend_fails}.get(
        name, True
    )


@everywhere(OF_IDEMPOTENCY)
def test_a_gateway_killed_anywhere_around_a_key_answers_its_repeat(
    served: Settings, url: str, server: Server, dsn: str, tmp_path: Path, name: str
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    armed = environment(served, ENGRAM_FAILPOINT=name)
    with started("serve", env=armed, log=tmp_path / "gateway.log") as gateway:
        eventually(lambda: answers(f"{url}/health"), "the gateway")
        assert ledger.store(url, "A fact.", idempotency_key="key-1") is None
        assert gateway.wait(10) == -signal.SIGKILL
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{url}/health"), "the gateway again")
        move_time(dsn)
        replies = [ledger.store(url, "A fact.", idempotency_key="key-1") for _ in range(2)]
    assert replies[0] is not None
    assert replies[0] == replies[1]
    assert replies[0]["action"] == "allow"
    recover(served)
    assert ledger.verdict(dsn, server.contents()) == []
    assert server.contents() == ["A fact."]


@everywhere(OF_THE_WORKER)
def test_a_worker_killed_anywhere_delivers_everything_once(
    served: Settings, url: str, server: Server, dsn: str, tmp_path: Path, name: str
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{url}/health"), "the gateway")
        for n in range(5):
            server.faults.fail(Order(Fault.STATUS, 503))
            reply = ledger.store(url, f"fact {n}")
            assert reply is not None
            assert reply["action"] == "deferred"
    move_time(dsn)
    killed = run_engram("worker", "outbox", "--once", env=environment(served, ENGRAM_FAILPOINT=name))
    assert killed.returncode == -signal.SIGKILL, "the failpoint was never reached"
    recover(served)
    assert ledger.verdict(dsn, server.contents()) == []
    assert sorted(server.contents()) == [f"fact {n}" for n in range(5)]


@pytest.mark.parametrize(
    ("server", "stored_anew", "name"),
    [
        pytest.param(server, anew, name, id=f"{server}-{name}-{'stored-anew' if anew else 'forgotten'}")
        for at, name in enumerate(OF_FORGETTING)
        for turn, (server, anew) in enumerate([("embedded", False), ("plain", True)])
        if WHOLE or at % 2 == turn
    ],
    indirect=["server"],
)
def test_a_gateway_killed_anywhere_in_a_forget_leaves_it_whole_or_gone(
    served: Settings, url: str, server: Server, dsn: str, tmp_path: Path, name: str, stored_anew: bool
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    armed = environment(served, ENGRAM_FAILPOINT=name)
    with started("serve", env=armed, log=tmp_path / "gateway.log") as gateway:
        eventually(lambda: answers(f"{url}/health"), "the gateway")
        ledger.store(url, "It stays.")
        stored = ledger.store(url, "It goes.")
        assert stored is not None
        assert ledger.forget(url, "It goes.", memory_id=stored["memory_id"]) is None
        assert gateway.wait(10) == -signal.SIGKILL, "the failpoint was never reached"
    move_time(dsn)
    with serving(build_app(served), served.gateway_port):
        eventually(lambda: answers(f"{url}/health"), "the gateway again")
        if stored_anew:
            reply = ledger.store(url, "It goes.")
            assert reply is not None
            assert reply["action"] == "allow"
    recover(served)
    stays = stored_anew or name == "memory_forget.before_forget"
    assert sorted(server.contents()) == (["It goes.", "It stays."] if stays else ["It stays."])
    assert ledger.verdict(dsn, server.contents()) == []
    with connect(dsn) as connection:
        left = connection.execute(
            "SELECT count(*) AS n FROM logbook.memories WHERE erase_due_at IS NOT NULL"
        ).fetchall()
    assert left == [{"n": 0}]


@everywhere(OF_RECONCILE)
def test_a_reconcile_killed_anywhere_is_gone_on_with(
    served: Settings, url: str, server: Server, dsn: str, tmp_path: Path, name: str
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    dying = environment(served, ENGRAM_FAILPOINT="memory_store.after_call")
    for n in range(2):
        with started("serve", env=dying, log=tmp_path / "gateway.log") as gateway:
            eventually(lambda: answers(f"{url}/health"), "the gateway")
            assert ledger.store(url, f"fact {n}") is None
            assert gateway.wait(10) == -signal.SIGKILL
    config = Config(postgres_dsn=dsn)
    outbox.enqueue_memory("fact 2", "team:a", config=config)
    ledger.sent("fact 2")
    outbox.claim_outbox("somebody who died", 1, 30, config)
    move_time(dsn)
    killed = run_engram("reconcile", env=environment(served, ENGRAM_FAILPOINT=name))
    assert killed.returncode == -signal.SIGKILL, "the failpoint was never reached"
    again = run_engram("reconcile", env=environment(served))
    assert again.returncode == 1, "it had something left to repair"
    assert run_engram("reconcile", env=environment(served)).returncode == 0
    recover(served)
    assert ledger.verdict(dsn, server.contents()) == []
    assert sorted(server.contents()) == [f"fact {n}" for n in range(3)]
    close(config)
