"""A Kafka broker for the tests, and for `make kafka`.

`KAFKA_BOOTSTRAP_SERVERS` names one that is there. Else Apache Kafka is started
(`engram.embedded.kafka`); as a script, on `KAFKA_PORT` and with its data in
`KAFKA_DIR`, or in a folder that is removed at the end. Where there is no Java or
no Maven, librdkafka's mock cluster stands in for the tests.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engram.embedded.kafka import Broker, NoBroker, jars
from engram.kernel.errors import ConfigError, EngramError


@contextmanager
def mock_cluster() -> Iterator[str]:
    """It lives as long as the producer that makes it."""
    from confluent_kafka import Producer

    owner = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock"})
    (broker,) = owner.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    owner.flush(1)


def main() -> None:
    try:
        if sys.argv[1:] == ["install"]:
            _install()
        else:
            _serve()
    except EngramError as error:
        sys.exit(f"no broker: {error.message}\n           {error.hint or ''}".rstrip())
    except OSError as error:
        sys.exit(f"no broker: {error}")


def _install() -> None:
    try:
        jars(_told)
    except NoBroker as why:
        _told(f"no Kafka broker for the tests ({why.message}); a mock cluster stands in")


def _serve() -> None:
    """A broker until Ctrl-C, or until this process is asked to end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    port = os.environ.get("KAFKA_PORT") or "9092"
    if not port.isdecimal():
        raise ConfigError(f"KAFKA_PORT: {port!r} is not a port")
    with ExitStack() as held, suppress(KeyboardInterrupt):
        jars(_told)
        kept = os.environ.get("KAFKA_DIR")
        folder = kept or held.enter_context(tempfile.TemporaryDirectory(prefix="engram-kafka-"))
        _told("starting the broker")
        broker = Broker(Path(folder), int(port))
        held.callback(broker.kill)
        broker.start()
        print(f"KAFKA_BOOTSTRAP_SERVERS={broker.servers}   (data in {folder}; Ctrl-C stops it)", flush=True)
        signal.pause()


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
