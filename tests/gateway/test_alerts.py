"""Alerts reach the log, the metric and the webhook; they never hold anybody up, and never shout."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from starlette.requests import Request
from starlette.responses import Response

from engram.gateway import alerts as module
from engram.gateway.alerts import Alerts, open_alerts
from engram.kernel import metrics
from support.serving import serving

pytestmark = pytest.mark.anyio


class Hook:
    """Somebody's webhook: keeps what it is told, and answers as it is told to."""

    def __init__(self, status: int = 204, hangs: bool = False) -> None:
        self.told: list[dict] = []
        self.asked = 0
        self.status, self.hangs = status, hangs

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(30)
        self.told.append(json.loads(await Request(scope, receive).body()))
        await Response(status_code=self.status)(scope, receive, send)


@contextmanager
def hook(**how: object) -> Iterator[tuple[Hook, str]]:
    app = Hook(**how)  # type: ignore[arg-type]
    with serving(app) as url:
        yield app, f"{url}/hooks/s3cret-path"


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def count(kind: str) -> float:
    return metrics.ALERTS.labels(kind)._value.get()


async def test_an_alert_is_logged_counted_and_posted(caplog: pytest.LogCaptureFixture) -> None:
    before = count("outbox_dead")
    with hook() as (app, url):
        async with open_alerts(url) as alerts:
            alerts.raise_alert(
                "outbox_dead", "outbox row 7 is dead", outbox_id=7, next="engram outbox show 7"
            )
    (told,) = app.told
    assert (told["kind"], told["text"], told["held_back"]) == ("outbox_dead", "outbox row 7 is dead", 0)
    assert told["facts"] == {"outbox_id": 7, "next": "engram outbox show 7"}
    assert {"at", "host"} <= set(told)
    assert count("outbox_dead") == before + 1
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "alert.outbox_dead")
    assert b'engram_alerts_total{kind="outbox_dead"}' in metrics.exposition()


async def test_without_a_webhook_the_log_and_the_metric_remain(caplog: pytest.LogCaptureFixture) -> None:
    before = count("outbox_dead")
    async with open_alerts(None) as alerts:
        alerts.raise_alert("outbox_dead", "outbox row 7 is dead")
    assert count("outbox_dead") == before + 1
    assert [record.getMessage() for record in caplog.records] == ["alert.outbox_dead"]


async def test_of_each_kind_one_is_told_and_the_rest_counted() -> None:
    with hook() as (app, url):
        alerts = Alerts(url, quiet_seconds=3600)
        for n in range(10):
            alerts.raise_alert("outbox_dead", f"row {n}")
        alerts.raise_alert("openmemory_unauthorized", "the key is refused")
        await until(lambda: len(app.told) == 2)
        assert sorted(told["text"] for told in app.told) == ["row 0", "the key is refused"]
        await alerts.drain()
        assert len(app.told) == 3, "what is held back is told at the end"
        assert (app.told[2]["text"], app.told[2]["held_back"]) == ("row 9", 8)


async def test_what_was_held_back_is_told_when_the_quiet_is_over() -> None:
    with hook() as (app, url):
        alerts = Alerts(url, quiet_seconds=0.2)
        for n in range(3):
            alerts.raise_alert("outbox_dead", f"row {n}")
        await until(lambda: len(app.told) == 2)
        assert [(told["text"], told["held_back"]) for told in app.told] == [("row 0", 0), ("row 2", 1)]
        await until(lambda: not alerts._quiet)
        alerts.raise_alert("outbox_dead", "row 3")
        await until(lambda: len(app.told) == 3)
        assert app.told[2]["held_back"] == 0
        await alerts.drain()


async def test_a_webhook_that_fails_is_nobodys_trouble(caplog: pytest.LogCaptureFixture) -> None:
    with hook(status=500) as (app, url):
        async with open_alerts(url) as alerts:
            alerts.raise_alert("outbox_dead", "row 1")
    assert app.asked == 1
    async with open_alerts("http://127.0.0.1:9/s3cret-path") as alerts:
        alerts.raise_alert("outbox_dead", "row 2")
    failed = [record for record in caplog.records if record.getMessage() == "alert.not_sent"]
    assert [record.fields["error"] for record in failed] == ["HTTPStatusError", "ConnectError"]  # type: ignore[attr-defined]
    assert "s3cret-path" not in caplog.text
    assert "s3cret-path" not in str([record.__dict__ for record in failed])


async def test_a_webhook_that_hangs_holds_up_neither_the_caller_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(module, "POST_SECONDS", 3.0)
    with hook(hangs=True) as (app, url):
        async with asyncio.timeout(5), open_alerts(url) as alerts:
            alerts.raise_alert("outbox_dead", "row 1")
            await until(lambda: app.asked)
        await until(lambda: not alerts._waiting)


async def test_a_webhook_that_hangs_is_not_queued_up_for_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT", 3)
    monkeypatch.setattr(module, "POST_SECONDS", 3.0)
    monkeypatch.setattr(module, "DRAIN_SECONDS", 10.0)
    with hook(hangs=True) as (app, url):
        async with open_alerts(url) as alerts:
            for n in range(10):
                alerts.raise_alert(f"kind_{n}", "one of many kinds")
            await until(lambda: app.asked == 3)
    assert app.asked == 3
    assert sum(record.getMessage() == "alert.dropped" for record in caplog.records) == 7
