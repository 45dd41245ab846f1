"""The embedded broker, mostly what can be seen without starting one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from itertools import chain, repeat
from pathlib import Path

import pytest

from engram.embedded import kafka
from engram.kernel.errors import EmbeddedError
from engram.web.sockets import free_port
from support.processes import ended, eventually

SCRIPT = [sys.executable, str(Path(__file__).parents[1] / "support" / "kafka.py")]


def test_a_clusters_id_is_never_taken_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    dashes, good = b"\xf8" + bytes(15), b"\xf4" + bytes(15)
    drawn = chain([dashes, dashes], repeat(good))
    monkeypatch.setattr(kafka.uuid, "uuid4", lambda: uuid.UUID(bytes=next(drawn)))
    assert kafka._cluster_id() == "9" + "A" * 21


def test_somebody_elses_listener_is_not_taken_for_the_broker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(EmbeddedError) as refused:
        kafka.Broker(tmp_path / "kafka", other.getsockname()[1])
    assert "cannot listen on 127.0.0.1:" in refused.value.message
    assert "KAFKA_PORT" in str(refused.value.hint)
    assert not (tmp_path / "kafka").exists()


def test_without_java_one_line_says_what_to_install(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "KAFKA_DIR": str(tmp_path / "kafka")}
    ran = subprocess.run(SCRIPT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    first, second = ran.stderr.splitlines()
    assert (first, second.split()[:2]) == ("no broker: java and mvn cannot be found", ["install", "Java"])


@pytest.mark.xdist_group("kafka")
def test_asked_to_end_it_leaves_neither_broker_nor_folder(tmp_path: Path) -> None:
    try:
        kafka.jars()
    except kafka.NoBroker as why:
        pytest.skip(f"no broker can be run here: {why.message}")
    port, log = free_port(), tmp_path / "log"
    env = {**os.environ, "KAFKA_PORT": str(port), "TMPDIR": str(tmp_path)}
    env.pop("KAFKA_DIR", None)
    with log.open("wb") as output:
        process = subprocess.Popen(SCRIPT, env=env, stdout=output, stderr=output)
    try:
        eventually(lambda: f"KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:{port}" in log.read_text(), "the broker")
        process.send_signal(signal.SIGTERM)
        assert ended(process, 30) == 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.glob("engram-kafka-*")) == []
    with socket.socket() as there:
        assert there.connect_ex(("127.0.0.1", port)) != 0
