"""`engram store --card`: a card by the running gateway, its long blocks as evidence that can be read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from engram.assembly.gateway import build_app
from engram.cli import app
from engram.cli.memory import call_tool
from engram.kernel.errors import EngramError, InputError
from engram.kernel.settings import Settings
from support.serving import serving

LOG = "".join(f"2026-01-30 10:00:{n:02d} ERROR payment {n} refused\n" for n in range(30))
TEXT = f"A refused payment is not retried.\n\nWe saw:\n\n```\n{LOG}```\n\nSo look before you retry.\n"


@pytest.fixture
def gateway(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(build_app(replace(settings, artifacts_dir=tmp_path / "artifacts"))) as url:
        monkeypatch.setenv("GATEWAY_PORT", str(urlsplit(url).port))
        monkeypatch.setenv("ENGRAM_DATA_DIR", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        yield url


def store(*arguments: str, text: str = TEXT) -> Result:
    return CliRunner().invoke(app, ["store", "-", "--actor", "ada", *arguments], input=text)


def test_a_card_with_a_log_in_it(gateway: str, backend) -> None:
    done = store("--card", "--title", "Refused payments", "--kind", "pitfall")
    assert done.exit_code == 0, done.output
    reply = json.loads(done.stdout)
    (uri,) = reply["evidence_refs"]
    assert (reply["action"], reply["space_written"]) == ("allow", "private:ada")
    (kept,) = backend.kept()
    assert kept["content"].startswith(
        "# Refused payments\n\n- Kind: PITFALL\n\nA refused payment is not retried."
    )
    assert f"> [log] 30 lines, {len(LOG)} bytes, sha256:" in kept["content"]
    assert kept["content"].count(uri) == 1
    assert LOG[:40] not in kept["content"]
    assert (kept["metadata"]["kind"], kept["metadata"]["title"]) == ("PITFALL", "Refused payments")
    read = call_tool("evidence_read", {"uri": uri, "actor_user_id": "ada"}, gateway)
    assert (read["content"], read["kind"], read["space"]) == (LOG, "log", "private:ada")
    assert "log of 30 lines" in done.stderr


def test_the_same_card_twice_is_one_memory(gateway: str, backend) -> None:
    arguments = ("--card", "--title", "Refused payments")
    first, again = (json.loads(store(*arguments).stdout) for _ in range(2))
    assert (again["deduplicated"], again["memory_id"]) == (True, first["memory_id"])
    assert len(backend.contents()) == 1


def test_without_card_the_text_is_stored_as_it_is(gateway: str, backend) -> None:
    assert store().exit_code == 0
    assert backend.contents() == [TEXT]


@pytest.mark.parametrize("arguments", [["--card"], ["--title", "T"], ["--card", "--title", "two\nlines"]])
def test_a_card_that_is_none_stores_nothing(gateway: str, backend, arguments: list[str]) -> None:
    done = store(*arguments)
    assert isinstance(done.exception, InputError)
    assert backend.contents() == []


def test_evidence_that_cannot_be_kept_stores_nothing(gateway: str, backend, tmp_path: Path) -> None:
    """No card may point at what is nowhere."""
    (tmp_path / "artifacts").write_text("in the way")
    done = store("--card", "--title", "T")
    assert isinstance(done.exception, EngramError)
    assert backend.contents() == []
