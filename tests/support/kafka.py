"""A Kafka broker for the tests, and for `make kafka`.

`KAFKA_BOOTSTRAP_SERVERS` names one that is there. Else Apache Kafka is started
(`engram.embedded.kafka`). Where there is no Java or no Maven, librdkafka's mock
cluster stands in.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engram.embedded.kafka import Broker, NoBroker, jars


@contextmanager
def mock_cluster() -> Iterator[str]:
    """It lives as long as the producer that makes it."""
    from confluent_kafka import Producer

    owner = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock"})
    (broker,) = owner.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    owner.flush(1)


def main() -> None:
    if sys.argv[1:] == ["install"]:
        try:
            jars()
        except NoBroker as why:
            print(f"no Kafka broker for the tests ({why}); a mock cluster stands in", file=sys.stderr)
        return
    folder = Path(os.environ.get("KAFKA_DIR") or tempfile.mkdtemp(prefix="engram-kafka-"))
    broker = Broker(folder, int(os.environ.get("KAFKA_PORT", "9092")))
    broker.start()
    print(f"KAFKA_BOOTSTRAP_SERVERS={broker.servers}   (data in {folder}; Ctrl-C stops it)", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        broker.kill()


if __name__ == "__main__":
    main()
