"""`engram ingest upload` and `status`: what is waited for, and what it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cli.conftest import Engram
from engram.cli.ingest import _Patience
from support.processes import environment, eventually, started


def test_a_task_is_shown_with_the_name_of_its_document(engram: Engram, gateway: str, tmp_path: Path) -> None:
    paper, other = tmp_path / "notes.md", tmp_path / "x.md"
    paper.write_text("# Notes\n", "utf-8")
    other.write_text("# Others\n", "utf-8")
    engram("ingest", "upload", str(paper))
    engram("ingest", "upload", str(other), "--title", "What was said")
    shown = engram("ingest", "status").output.splitlines()
    assert ["What was said" in shown[0], "notes.md" in shown[1]] == [True, True]
    task = shown[1].split()[0]
    assert "notes.md" in engram("ingest", "status", task).output.splitlines()[0]


def test_whoever_waits_is_told_why(gateway: str, tmp_path: Path) -> None:
    """No worker runs here."""
    (tmp_path / "notes.md").write_text("# Notes\n", "utf-8")
    env, log = environment(GATEWAY_PORT=str(urlsplit(gateway).port)), tmp_path / "log"
    with started("ingest", "upload", "--wait", str(tmp_path / "notes.md"), env=env, log=log):
        said = eventually(lambda: log.read_text("utf-8"), "a word about the wait")
    assert said == "waiting: QUEUED, no worker has begun it (`engram doctor` says whether one runs)\n"


def _row(task: str, status: str, error: str | None = None, done: int = 0) -> dict[str, Any]:
    return {"taskId": task, "status": status, "errorMessage": error, "processedSegments": done}


def test_each_reason_is_told_once_and_again_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.cli.ingest.PATIENCE_SECONDS", 0.0)
    told: list[str] = []
    patience = _Patience(told.append)
    retrying, running = _row("1", "RETRYING", "no space"), _row("2", "RUNNING")
    for rows in ([retrying, running], [retrying, running], [running], [retrying, running]):
        patience.look(rows)
    assert told == [
        "waiting: RETRYING after no space",
        "waiting: RUNNING",
        "waiting: RETRYING after no space",
    ]


def test_while_something_moves_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("engram.cli.ingest.time.monotonic", lambda: now)
    told: list[str] = []
    patience = _Patience(told.append)
    for done in range(5):
        now += 2.9
        patience.look([_row("1", "RUNNING", done=done)])
    assert told == []
    now += 3.1
    patience.look([_row("1", "RUNNING", done=4)])
    assert told == ["waiting: RUNNING"]
