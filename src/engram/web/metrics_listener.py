"""`/metrics` of a process that serves nothing else: a listener on loopback, in a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from engram.kernel.logs import fields
from engram.kernel.metrics import REGISTRY

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
STOP_SECONDS = 5.0


@contextmanager
def serving_metrics(port: int) -> Iterator[str]:
    """Serve the process's metrics while the block runs; its address is logged.

    0 takes any free port, and so does a port that is taken: workers that share
    their settings share that too, and one of them can have it.
    """
    server, thread = _started(port)
    url = f"http://{HOST}:{server.server_port}/metrics"
    log.info("metrics.listening", extra=fields(url=url))
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join(STOP_SECONDS)


def _started(port: int) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, addr=HOST, registry=REGISTRY)
    except OSError as error:
        if port == 0:
            raise
        log.warning("metrics.port_taken", extra=fields(port=port, error=str(error)))
        return start_http_server(0, addr=HOST, registry=REGISTRY)
