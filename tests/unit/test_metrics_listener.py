"""`/metrics` of a worker process: there while it works, on its own port or on a free one."""

from __future__ import annotations

import httpx2
import pytest

from engram.web.metrics_listener import serving_metrics
from engram.web.sockets import free_port

NAMES = (
    'ingest_task_process_total{result="not_due"}',
    "ingest_task_dlq_total",
    'ingest_stream_reclaim_total{result="claimed"}',
)


def test_it_serves_every_metric_and_stops() -> None:
    with serving_metrics(0) as url:
        told = httpx2.get(url, trust_env=False).text
        assert [name for name in NAMES if name not in told] == []
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url, trust_env=False)


def test_a_second_process_with_the_same_settings_takes_another_port(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with serving_metrics(port) as first, serving_metrics(port) as second:
        assert first == f"http://127.0.0.1:{port}/metrics"
        assert second != first
        assert httpx2.get(second, trust_env=False).status_code == 200
    assert "metrics.port_taken" in caplog.text
