"""A Kafka broker to try things with: Apache Kafka in KRaft mode, its jars brought by Maven.

For `engram demo --kafka`, `make kafka` and the tests; nobody's data belongs there.
The jars are kept in the virtual environment.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from engram.kernel.errors import EmbeddedError

POM = Path(__file__).with_name("kafka_pom.xml")
VERSION = "3.9.1"
INSTALL_SECONDS = 240
START_SECONDS = 60
_JAVA = ("-Xmx384m", "-Xms64m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")


class NoBroker(EmbeddedError):
    """There is no Java, no Maven, or it could not bring the jars."""


def jars(on_progress: Callable[[str], object] = lambda _: None) -> Path:
    """The folder of the jars; brings them first if the POM changed."""
    missing = [name for name in ("java", "mvn") if not shutil.which(name)]
    if missing:
        raise NoBroker(
            f"{' and '.join(missing)} cannot be found",
            hint="install Java 11 or later and Maven (Debian: default-jre-headless, maven)",
        )
    home = Path(sys.prefix) / "kafka"
    try:
        home.mkdir(exist_ok=True)
    except OSError as error:
        raise NoBroker(f"there is no place for its jars: {error}") from error
    found = home / hashlib.sha256(POM.read_bytes()).hexdigest()[:16]
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            on_progress(f"Maven brings Apache Kafka {VERSION} (up to some minutes, once)")
            _install(home / "draft")
            (home / "draft").rename(found)
    return found


def _install(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    command = [
        "mvn",
        "-q",
        "-B",
        "-f",
        str(POM),
        "dependency:copy-dependencies",
        f"-DoutputDirectory={draft}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise NoBroker("Maven took too long") from None
    if done.returncode:
        raise NoBroker(f"Maven failed: {(done.stdout + done.stderr)[-500:]}")


class Broker:
    """One broker and controller in a process; `kill` and `start` keep its data and its address."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.port, self._controller = port or _free_port(), _free_port()
        self.servers = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._require_free_port()
        self._configure()

    def start(self) -> None:
        self._require_free_port()
        log = (self._folder / "broker.log").open("ab")
        self._process = subprocess.Popen(  # noqa: S603
            self._java("kafka.Kafka", str(self._folder / "server.properties")), stdout=log, stderr=log
        )
        log.close()
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        said = (self._folder / "broker.log").read_text("utf-8", "replace")[-2000:]
        self.kill()
        raise EmbeddedError(f"the broker did not start: {said}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def _require_free_port(self) -> None:
        """Whoever else listens there would be taken for the broker."""
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise EmbeddedError(
                    f"the broker cannot listen on {self.servers}: {error.strerror}",
                    hint="stop what listens there, or choose another port (`make kafka` takes KAFKA_PORT)",
                ) from error

    def _configure(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self._folder / "data"),
            "num.partitions": "3",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "message.max.bytes": "600000",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
        }
        path = self._folder / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), "utf-8")
        if not (self._folder / "data").exists():
            cluster = _cluster_id()
            words = ["format", "-t", cluster, "-c", str(path)]
            command = self._java("kafka.tools.StorageTool", *words)
            done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
            if done.returncode:
                raise EmbeddedError(f"Kafka cannot use {self._folder}: {(done.stdout + done.stderr)[-500:]}")

    def _java(self, *words: str) -> list[str]:
        return ["java", *_JAVA, "-cp", f"{jars()}/*", *words]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _cluster_id() -> str:
    """As Kafka writes ids. One that begins with a dash would be taken for an option: one of 64 does."""
    while (made := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made
