"""`engram report`, `governance`, `evidence` and `forget`, as an operator types them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from engram.cli.memory import call_tool
from engram.kernel.errors import EngramError, InputError
from support.backend import Backend
from support.faults import Fault, Order
from support.processes import environment, run_engram

Engram = Callable[..., Result]


def test_the_report_is_readable_and_exact(engram: Engram, gateway: str, backend: Backend) -> None:
    call_tool("memory_store", {"payload_md": "A fact.", "evidence_refs": ["mr://project/1"]}, gateway)
    backend.faults.fail(Order(Fault.STATUS, 503))
    call_tool("memory_store", {"payload_md": "Parked."}, gateway)
    shown = engram("report").output
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[:2] == ["writes 2", "succeeded 50.00%"]
    assert {"1 allow", "1 redirect", "1 pending", "evidence 1 of 2 stores (50.00%)"} <= set(lines)
    assert "✓ redirects equal outbox rows: 1 and 1" in lines
    assert "0 conflict" not in lines, "what did not happen is left out"
    reply = json.loads(engram("report", "--since", "1h", "--json").output)
    assert (reply["total_writes"], reply["success_rate"]) == (2, 0.5)
    assert "since" in engram("report", "--since", "24h").output
    with pytest.raises(EngramError, match="since"):
        engram("report", "--since", "soon")


def test_a_report_of_nothing_is_readable_too(engram: Engram, gateway: str) -> None:
    assert "succeeded     -" in engram("report").output


def test_governance_is_set_and_shown(engram: Engram, gateway: str, tmp_path: Path) -> None:
    assert "team writes   closed" in engram("governance", "show").output
    opened = engram("governance", "set", "payments", "--team-write", "--actor", "ada").output
    assert "team writes   open" in opened
    file = tmp_path / "policy.json"
    file.write_text('{"max_chars": 100}', "utf-8")
    engram("governance", "set", "payments", "--policy", f"@{file}", "--actor", "bob")
    shown = engram("governance", "show", "payments").output
    assert 'policy        {"max_chars": 100}' in shown
    assert "team writes   open" in shown
    assert 'bob: {} -> {"max_chars": 100}' in shown
    assert "ada: created, open" in shown
    closed = json.loads(engram("governance", "set", "payments", "--no-team-write", "--json").output)
    assert (closed["team_write_enabled"], closed["policy_json"]) == (False, {"max_chars": 100})
    assert "closed" in engram("governance", "show", "payments").output.splitlines()[1]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--policy", "not json"], ["payments"]],
    ids=["nothing", "no-json", "nothing-for-a-project"],
)
def test_a_change_that_says_nothing_is_refused(engram: Engram, arguments: list[str]) -> None:
    engram("governance", "set", *arguments, code=2)


def test_a_bad_policy_is_refused_by_name(engram: Engram, gateway: str) -> None:
    with pytest.raises(EngramError, match=r"policy_json\.max_char "):
        engram("governance", "set", "--policy", '{"max_char": 1}')


@pytest.mark.parametrize(
    "content",
    [b"A log.\n", "日志\r\n".encode(), bytes(range(256)) * 1000, b"nul\x00inside", b"\xef\xbb\xbfbom"],
    ids=["text", "cjk", "binary", "nul", "bom"],
)
def test_a_file_goes_in_and_comes_out_the_same(
    engram: Engram, gateway: str, tmp_path: Path, content: bytes
) -> None:
    source, copy = tmp_path / "a log.txt", tmp_path / "copy"
    source.write_bytes(content)
    kept = json.loads(engram("evidence", "upload", str(source), "--kind", "log").output)
    assert (kept["sha256"], kept["space"]) == (hashlib.sha256(content).hexdigest(), "private:local")
    assert engram("evidence", "read", kept["uri"]).stdout_bytes == content
    engram("evidence", "read", kept["uri"], "--output", str(copy))
    assert copy.read_bytes() == content
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["a log.txt", "copy"]
    found = call_tool("evidence_read", {"uri": kept["uri"]}, gateway)
    assert (found["kind"], found["name"]) == ("log", "a log.txt")


def test_a_file_of_many_pages_is_put_together(
    engram: Engram, gateway: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.cli.evidence.PART_BYTES", 1000)
    content = ("日志" * 3000).encode()
    source = tmp_path / "log"
    source.write_bytes(content)
    kept = json.loads(engram("evidence", "upload", str(source)).output)
    assert engram("evidence", "read", kept["uri"]).stdout_bytes == content


def test_evidence_that_cannot_be_read_leaves_no_file(engram: Engram, gateway: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with pytest.raises(EngramError, match="there is no evidence"):
        engram("evidence", "read", f"memory://attachments/1/{'a' * 64}", "--output", str(copy))
    assert [p for p in tmp_path.iterdir() if p.is_file()] == []


def test_a_file_that_no_gateway_takes_is_not_even_read(
    engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_MAX_BODY_BYTES", "1024")
    large = tmp_path / "large"
    large.write_bytes(b"x" * 1025)
    with pytest.raises(InputError, match="larger than 1024 bytes"):
        engram("evidence", "upload", str(large))


def test_a_memory_is_forgotten(engram: Engram, gateway: str) -> None:
    stored = call_tool("memory_store", {"payload_md": "A fact."}, gateway)
    reply = json.loads(engram("forget", "--memory-id", stored["memory_id"]).output)
    assert reply["forgotten"]
    assert call_tool("memory_query", {"query": "fact"}, gateway)["results"] == []
    with pytest.raises(EngramError, match="either memory_id or outbox_id"):
        engram("forget")


def test_without_a_gateway_or_a_database_each_says_what_to_start(tmp_path: Path) -> None:
    """As a process: one line and the next step, never a trace."""
    env = environment(ENGRAM_DATA_DIR=str(tmp_path / "none"), GATEWAY_PORT="9")
    for arguments in (["report"], ["governance", "show"], ["outbox", "list"]):
        done = run_engram(*arguments, env=env)
        assert done.returncode == 1
        assert "engram up" in done.stderr
        assert "Traceback" not in done.stderr
