"""Eight processes drain the outbox while they, and PostgreSQL itself, are killed with -9."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram.assembly.addresses import migrate_all
from engram.embedded import EmbeddedPostgres
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.connection import close
from engram.postgres.pool import connect
from support.processes import eventually

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]

PROCESSES = 8
LEASE_SECONDS = 3


class Crew:
    """Eight workers; whoever is killed is replaced."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn, self.folder = dsn, folder
        self.members: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count()
        for _ in range(PROCESSES):
            self.members.append(self._new())

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(PROCESSES)
        self.members[place].kill()
        self.members[place].wait()
        self.members[place] = self._new()

    def disband(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()

    def told(self) -> list[list]:
        lines = [line for file in self.folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines if line.endswith("]")]

    def _new(self) -> subprocess.Popen[bytes]:
        ledger = self.folder / f"worker-{next(self._numbers)}.jsonl"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
        command = [sys.executable, "-m", "support.drain_worker", self.dsn, str(ledger), str(LEASE_SECONDS)]
        with (self.folder / "workers.log").open("ab") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path / "data") as server:
        migrate_all(server.dsn())
        yield server


@pytest.mark.parametrize("kill_database", [False, True], ids=["workers-killed", "database-killed-too"])
def test_every_row_is_settled_exactly_once_whoever_is_killed(
    server: EmbeddedPostgres, tmp_path: Path, scale: float, seed: int, kill_database: bool
) -> None:
    chance = random.Random(seed)
    config = Config(postgres_dsn=server.dsn())
    total = int(800 * scale)
    for start in range(0, total, 500):
        outbox.enqueue_many([(f"fact {n}", "team:a") for n in range(start, min(start + 500, total))], config)
    ledgers = tmp_path / "ledgers"
    ledgers.mkdir()
    crew = Crew(server.dsn(), ledgers)
    try:
        _wreak(crew, server, chance, total, kill_database)
        eventually(lambda: _pending(server.dsn()) == 0, "the last row to be settled", 300)
    finally:
        crew.disband()
        close(config)
    _judge(crew, server.dsn(), total)


def _wreak(
    crew: Crew, server: EmbeddedPostgres, chance: random.Random, total: int, kill_database: bool
) -> None:
    """Kill at random until most is settled; the database once, somewhere in the middle."""
    database_at = chance.uniform(0.3, 0.6) if kill_database else 2.0
    for _ in range(400):
        pending = _pending(server.dsn())
        if pending is not None and pending <= total * 0.1:
            return
        if pending is not None and pending <= total * (1 - database_at):
            database_at = 2.0
            os.kill(server.pid or 0, signal.SIGKILL)
            server.start()
        crew.kill_one(chance)
        # A new one takes most of a second to begin: killed faster, nobody would get to do anything.
        time.sleep(chance.uniform(0.3, 1.0))


def _pending(dsn: str) -> int | None:
    try:
        with connect(dsn) as connection:
            row = connection.execute(
                "SELECT count(*) AS n FROM logbook.outbox_memory WHERE status = 'pending'"
            )
            return row.fetchone()["n"]
    except Exception:  # noqa: BLE001 - the database may be coming back
        return None


def _judge(crew: Crew, dsn: str, total: int) -> None:
    with connect(dsn) as connection:
        rows = connection.execute(
            "SELECT outbox_id, status, lease_token, memory_id FROM logbook.outbox_memory"
        ).fetchall()
        audits = connection.execute(
            "SELECT (evidence_refs_json ->> 'outbox_id')::bigint AS outbox_id, action, memory_id FROM governance.write_audit"
        ).fetchall()
    assert Counter(r["status"] for r in rows) == {"sent": total}
    assert Counter(a["action"] for a in audits) == {"allow": total}
    assert Counter(a["outbox_id"] for a in audits) == Counter(r["outbox_id"] for r in rows), (
        "one audit for each"
    )
    final = {r["outbox_id"]: r["lease_token"] for r in rows}
    assert all(r["memory_id"] == f"mem-{r['lease_token']}" for r in rows), (
        "settled by the holder of the last lease"
    )
    told = crew.told()
    settled = [(outbox_id, token) for what, outbox_id, token in told if what == "settled"]
    assert max(Counter(outbox_id for outbox_id, _ in settled).values()) == 1, "told to two"
    assert all(final[outbox_id] == token for outbox_id, token in settled)
    leases = Counter((outbox_id, token) for what, outbox_id, token in told if what == "claimed")
    assert max(leases.values()) == 1, "one lease given to two"
    print(
        f"{len(leases) - total} leases were taken over; {total - len(settled)} answers were lost with their worker"
    )
