"""The worker as a real process: asked to stop it hands everything back; a hint wakes it up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engram.kernel.settings import Settings
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.postgres.pool import connect
from support.backend import Backend
from support.faults import Fault, FaultyServer
from support.parts import used
from support.plain_server import PlainServer
from support.processes import environment, eventually, run_engram, started
from support.serving import serving

SPACE = "private:ada"
TEXTS = [f"word{n}" for n in range(15)]


@dataclass
class Server:
    url: str
    faults: FaultyServer
    contents: Callable[[], list[str]]

    @property
    def adds(self) -> int:
        return self.faults.calls.count("POST /memory/add")


@pytest.fixture(params=["embedded", "plain"])
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


@pytest.fixture
def patient(settings: Settings, server: Server) -> Settings:
    """A call may take longer than any stop."""
    return replace(settings, openmemory_base_url=server.url, openmemory_timeout_seconds=30)


def rows(dsn: str) -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute("SELECT * FROM logbook.outbox_memory ORDER BY outbox_id").fetchall()


def an_hour_passes(dsn: str) -> None:
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET next_attempt_at = next_attempt_at - interval '1 hour'"
        )


@pytest.mark.parametrize("mode", ["--loop", "--once"])
def test_a_stopped_worker_hands_its_leases_back_and_the_next_delivers_each_once(
    patient: Settings, server: Server, config: Config, dsn: str, tmp_path: Path, mode: str
) -> None:
    """The server hangs, having kept half of what it was sent: the worker cannot know which."""
    outbox.enqueue_many([(text, SPACE) for text in TEXTS], config)
    server.faults.fail(*[Fault.AFTER_HANG, Fault.HANG] * 5)
    log = tmp_path / "worker.log"
    with started("worker", "outbox", mode, env=environment(patient), log=log) as worker:
        eventually(lambda: server.adds == 10 and len(server.contents()) == 5, "a batch of calls")
        worker.send_signal(signal.SIGTERM)
        worker.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert worker.wait(20) == 0, log.read_text("utf-8")
        assert time.monotonic() - asked < 8
    found = rows(dsn)
    assert {(r["status"], r["retry_count"], r["locked_by"]) for r in found} == {("pending", 0, None)}
    assert sum(r["ambiguous"] for r in found) == 10, "those that were being sent"
    assert server.adds == 10
    server.faults.reset()
    an_hour_passes(dsn)
    done = run_engram("worker", "outbox", "--once", env=environment(patient))
    assert done.returncode == 0, done.stderr
    assert sorted(server.contents()) == sorted(TEXTS)
    assert {r["status"] for r in rows(dsn)} == {"sent"}
    assert server.adds == 10, "five were found"


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_an_idle_worker_stops_at_once_and_leaves_a_heartbeat(
    patient: Settings, server: Server, dsn: str, tmp_path: Path
) -> None:
    def heartbeat() -> dict | None:
        with connect(dsn) as connection:
            return connection.execute(
                "SELECT key, value_json FROM logbook.kv"
                " WHERE namespace = 'worker.heartbeat' AND starts_with(key, 'outbox:')"
            ).fetchone()

    with started("worker", "outbox", env=environment(patient), log=tmp_path / "worker.log") as worker:
        found = eventually(heartbeat, "a heartbeat")
        assert found["key"].startswith("outbox:")
        assert found["value_json"]["pid"] == worker.pid
        worker.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert worker.wait(20) == 0
        assert time.monotonic() - asked < 5


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_a_hint_wakes_an_idle_worker_and_a_lost_connection_does_not_deafen_it(
    patient: Settings, server: Server, config: Config, dsn: str, tmp_path: Path
) -> None:
    """It polls once an hour: only the hint can be what woke it."""
    rarely = replace(patient, outbox_poll_seconds=3600)
    log = tmp_path / "worker.log"
    with started("worker", "outbox", env=environment(rarely), log=log), connect(dsn) as connection:

        def listeners() -> set[int]:
            found = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'engram-worker-listen' AND query LIKE 'LISTEN%' AND state = 'idle'"
            ).fetchall()
            return {row["pid"] for row in found}

        def park(text: str) -> None:
            outbox.enqueue_memory(text, SPACE, config=config)
            connection.execute("SELECT pg_notify(%s, '')", [outbox.CHANNEL])
            eventually(lambda: text in server.contents(), f"memory {text}")

        (first,) = eventually(listeners, "the worker to listen")
        park("one")  # perhaps found because it had just begun to listen
        park("two")
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [first])
        eventually(lambda: listeners() - {first}, "the worker to listen again")
        park("three")
        park("four")


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_without_a_hint_it_looks_by_itself(
    patient: Settings, server: Server, config: Config, tmp_path: Path
) -> None:
    often = replace(patient, outbox_poll_seconds=0.1)
    with started("worker", "outbox", env=environment(often), log=tmp_path / "worker.log"):
        outbox.enqueue_memory("one", SPACE, config=config)
        eventually(lambda: server.contents() == ["one"], "the first memory")
        outbox.enqueue_memory("two", SPACE, config=config)
        eventually(lambda: sorted(server.contents()) == ["one", "two"], "the second memory")
