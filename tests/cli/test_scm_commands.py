"""`engram scm` as an operator types it: from a repository to a memory whose evidence can be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engram.kernel.errors import InputError, NotFound
from engram.kernel.settings import Settings
from engram.logbook import outbox
from engram.logbook.config import Config
from support.backend import Backend
from support.faults import Fault
from support.gitrepo import GitRepo

ROOT = Path(__file__).resolve().parents[2]
HISTORY = 200


@pytest.fixture
def scm(settings: Settings, database: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENMEMORY_BASE_URL", settings.openmemory_base_url or "")
    monkeypatch.setenv("OPENMEMORY_API_KEY", settings.openmemory_api_key or "")
    monkeypatch.setenv("ENGRAM_ARTIFACTS_DIR", str(settings.artifacts_dir))


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """The end of engram's own history; where it is not at hand, commits like its own."""
    clone = tmp_path / "clone"
    words = ["git", "clone", "--quiet", "--no-local", f"--depth={HISTORY}", ROOT.as_uri(), str(clone)]
    if not (ROOT / ".git").exists() or subprocess.run(words, capture_output=True, check=False).returncode:
        _likeness(clone)
    return clone


@pytest.mark.usefixtures("gateway", "scm")
def test_from_a_repository_to_evidence(engram, history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(history)
    engram("governance", "set", "--team-writes", "on")
    assert engram("scm", "add", ".").output == f"1: follows git {history} for team:default\n"
    assert re.search(r"\d+ read, \d+ written, \d+ patches\n", engram("scm", "sync").output)
    assert re.search(r"\d+ stored", engram("scm", "consume").output)

    found = json.loads(engram("query", "why are leases fenced").output)["results"]
    cards = [card for card in found if "lease" in card["content"].lower()]
    assert cards[0]["meta"]["source"].startswith("git ")
    assert cards[0]["space"] == "team:default"
    if b"fenced outbox" in logged(history):
        cards = [card for card in cards if "fenced" in card["content"]]
    uri = re.search(r"memory://patch_blobs/git/1:[0-9a-f]{40}/[0-9a-f]{64}", cards[0]["content"])
    assert engram("evidence", "show", uri[0]).stdout_bytes.startswith(b"diff --git ")


def logged(folder: Path) -> bytes:
    return subprocess.run(["git", "log", "--format=%s"], cwd=folder, capture_output=True, check=True).stdout


@pytest.mark.usefixtures("gateway", "scm")
def test_what_each_command_says(engram, tmp_path: Path, backend: Backend, database: Config) -> None:
    origin = GitRepo(tmp_path / "origin.git")
    origin.commit("Retry less, because the server was hammered", {"a": "1\n"})
    assert "no repository is followed" in engram("scm", "status").output
    assert ": follows git" in engram("scm", "add", origin.url, "--rules", '{"bots": []}').output
    assert "followed already" in engram("scm", "add", origin.url).output
    assert "never synced" in engram("scm", "status").output
    assert engram("scm", "sync", "--no-patches").output.endswith(": 1 read, 1 written\n")
    assert engram("scm", "materialize").output.endswith(": 1 diffs, 0 diffstats, 0 empty\n")

    diverted = engram("scm", "consume")
    assert "1 diverted to private:scm" in diverted.stdout
    assert "engram governance set --team-writes on" in diverted.stderr
    assert "nothing new" in engram("scm", "consume").output
    engram("governance", "set", "--team-writes", "on")
    backend.faults.fail(Fault.DROP)
    assert "1 parked" in engram("scm", "consume", "--replay").output
    assert len(outbox.list_rows(config=database)) == 1

    (row,) = [json.loads(line) for line in engram("scm", "status", "--json").output.splitlines()]
    assert (row["facts"], row["patches"], row["waiting"], row["status"]) == (1, 1, 0, "done")
    origin.commit("two", {"a": "2\n"})
    engram("scm", "sync", "1")
    (row,) = [json.loads(line) for line in engram("scm", "status", "--json").output.splitlines()]
    assert (row["facts"], row["waiting"]) == (2, 1)

    shutil.rmtree(origin.folder)
    failed = engram("scm", "sync", code=1)
    assert "✗ 1 git" in failed.stderr
    assert "failed: git could not read" in engram("scm", "status").output


@pytest.mark.usefixtures("scm")
def test_what_is_refused(engram) -> None:
    with pytest.raises(InputError, match="helper program"):
        engram("scm", "add", "ext::sh -c id")
    with pytest.raises(InputError, match="colour is no rule"):
        engram("scm", "add", ".", "--rules", '{"colour": 1}')
    with pytest.raises(NotFound, match="no repository 7"):
        engram("scm", "sync", "7")
    assert "not JSON" in engram("scm", "add", ".", "--rules", "{", code=2).output


def _likeness(folder: Path) -> None:
    repo = GitRepo(folder)
    fenced = "Logbook: fenced outbox\n\nSettling checks holder, live lease and token."
    repo.commit(fenced, {"outbox.sql": "SELECT 1;\n"})
    repo.commit("Leases are handed back on SIGTERM", {"worker.py": "1\n"})
    repo.commit("Tokens: hashed, with owner and scopes", {"tokens.py": "1\n"})
