"""`engram demo --kafka`: an upload while the broker is dead, brought in when it is back.

Every step is checked from outside: the database's own rows, and the search.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx2

from engram.cli.demo import CheckFailed
from engram.embedded.kafka import Broker, jars
from engram.kernel import logs
from engram.kernel.errors import EngramError
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.supervisor import Stack
from engram.web.sockets import free_port

TEXT = "# Leases\n\nOnly the holder of a live lease may settle a row.\n"
PATIENCE_SECONDS = 60.0


def tell() -> int:
    logs.configure("error", "human")
    started = time.monotonic()
    _say("looking for Apache Kafka; Maven brings it the first time")
    try:
        jars()
        with tempfile.TemporaryDirectory(prefix="engram-demo-") as folder:
            _tell(Path(folder))
    except (CheckFailed, EngramError) as error:
        print(f"✗ {error}", file=sys.stderr)
        return 1
    _say(f"every step was checked; {time.monotonic() - started:.1f} s in all")
    return 0


def _tell(folder: Path) -> None:
    broker = Broker(folder / "kafka")
    settings = Settings(
        data_dir=folder / "data",
        gateway_port=free_port(),
        ingest_queue="kafka",
        kafka_bootstrap_servers=broker.servers,
        ingest_kafka_lease_seconds=6.0,
        ingest_kafka_max_backoff_ms=1000,
        ingest_kafka_max_attempts=100,
        ingest_kafka_publish_interval_ms=200,
    )
    try:
        broker.start()
        with Stack(settings, alone=True) as stack, httpx2.Client(trust_env=False, timeout=30) as http:
            _say(f"a stack of its own is up on {stack.gateway_url}, and a broker on {broker.servers}")
            _Story(stack, http, broker).tell()
    finally:
        broker.kill()


class _Story:
    def __init__(self, stack: Stack, http: httpx2.Client, broker: Broker) -> None:
        self._stack, self._http, self._broker = stack, http, broker

    def tell(self) -> None:
        first = self._uploaded("first.md", "# First\n\nThe broker is well.\n")
        self._arrives(first)
        _say("uploaded a document: published, consumed, brought in")
        self._broker.kill()
        _say("killed the broker with -9")
        task = self._uploaded("leases.md", TEXT)
        _say(f"uploaded another: task {task}, its event in the same transaction")
        _until(lambda: self._event(task)[0] == "RETRYING", "the event was never tried")
        status, tries = self._event(task)
        _say(f"the publisher finds nobody: the event is {status} after {tries} failure(s)")
        self._broker.start()
        _say("started the broker again")
        _until(lambda: self._event(task)[0] == "SENT", "the event was not published")
        self._arrives(task)
        asked = {"query": "who may settle a row?"}
        found = self._http.post(f"{self._stack.gateway_url}/api/knowledge/search", json=asked).json()
        _check("holder of a live lease" in str(found), f"the search did not find it: {found}")
        _say("the event is SENT and the document is in: “who may settle a row?” finds its paragraph")

    def _uploaded(self, name: str, text: str) -> str:
        path = f"{self._stack.gateway_url}/api/knowledge/documents/upload-async"
        made = self._http.post(path, files={"file": (name, text.encode())}).raise_for_status().json()
        return str(made["taskId"])

    def _arrives(self, task: str) -> None:
        url = f"{self._stack.gateway_url}/api/knowledge/tasks/{task}"
        _until(lambda: self._http.get(url).json()["status"] == "SUCCEEDED", "a document was not brought in")

    def _event(self, task: str) -> tuple[str, int]:
        with connect(self._stack.dsn) as connection:
            (row,) = connection.execute(
                "SELECT status, attempt_count FROM ingest.outbox_event WHERE task_id = %s", [task]
            ).fetchall()
        return row["status"], row["attempt_count"]


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        _check(time.monotonic() < give_up, otherwise)
        time.sleep(0.1)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailed(otherwise)


def _say(text: str) -> None:
    print(f"✓ {text}", flush=True)
