"""`engram why`, as an operator types it; and the commands that it names, typed in their turn."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import Result

from engram.cli.memory import call_tool
from engram.kernel.errors import InputError, NotFound
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.outbox import Dead
from support.backend import Backend
from support.faults import Fault, Order
from support.processes import environment, run_engram

Engram = Callable[..., Result]


def dead(config: Config, text: str, tries: int) -> int:
    """A row that a worker gave up at that try."""
    row = outbox.enqueue_memory(text, "private:ada", config=config)
    for number in range(1, tries + 1):
        (claimed,) = outbox.claim_outbox("w", 1, 60, config)
        if number < tries:
            outbox.fail_retry(row, "w", "answered 500", "2026-01-01T00:00:00Z", config)
    outbox.dead_many("w", [Dead(row, claimed["lease_token"], "answered 500")], config)
    return row


def test_a_deferred_write_is_explained_from_the_reply_to_its_delivery(
    engram: Engram, gateway: str, database: Config, backend: Backend
) -> None:
    backend.faults.fail(Order(Fault.STATUS, 429))
    reply = call_tool("memory_store", {"payload_md": "We deploy on Tuesdays."}, gateway)
    row = reply["outbox_id"]
    told = engram("why", str(row)).stdout.splitlines()
    assert told[0] == f"outbox:{row}  private:local  “We deploy on Tuesdays.”"
    rest = told.index("what happened")
    state = " ".join(" ".join(told[1:rest]).split())
    assert state.startswith("due since ")
    assert state.endswith(": last: POST /memory/add answered 429; no worker runs")
    assert f"parked as outbox:{row} (openmemory_write_failed:rate_limited), asked by local" in told[rest + 1]
    assert told[rest + 2 : rest + 4] == ["what to do", "  engram worker outbox --once"]
    by_request = engram("why", reply["correlation_id"]).stdout
    assert f"decided: parked as outbox:{row} " in by_request


def test_programs_get_json(engram: Engram, gateway: str, database: Config) -> None:
    reply = call_tool("memory_store", {"payload_md": "A fact."}, gateway)
    told = json.loads(engram("why", reply["memory_id"], "--json").stdout)
    assert (told["state"], told["space"], told["next"]) == ("stored", "private:local", [])
    assert datetime.fromisoformat(told["since"]) <= datetime.fromisoformat(told["now"])
    assert told["timeline"][0]["source"].startswith("audit:")


def test_every_command_that_is_named_for_a_dead_row_does_what_it_says(
    engram: Engram, database: Config
) -> None:
    used_up = dead(database, "Used up.", 5)
    refused = dead(database, "Refused.", 1)

    def first_step(row: int) -> Result:
        told = json.loads(engram("why", str(row), "--json").stdout)
        assert told["state"] == "dead"
        program, *arguments = shlex.split(told["next"][0]["command"])
        assert program == "engram"
        return engram(*arguments)

    assert first_step(used_up).stdout.startswith(f"{used_up}: requeued as ")
    assert first_step(used_up).stdout.startswith("outbox:"), "the next step is to look at the new row"
    assert first_step(refused).stdout.endswith("text\nRefused.\n")


def test_a_request_that_wrote_much_is_told_a_page_of_it(
    engram: Engram, database: Config, gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx2

    monkeypatch.setattr("engram.cli.why.AT_ONCE", 2)
    for number in range(3):
        httpx2.post(
            f"{gateway}/memory/store",
            json={"payload_md": f"fact {number}"},
            headers={"X-Correlation-ID": "one-session"},
            trust_env=False,
        ).raise_for_status()
    result = engram("why", "one-session", "--json")
    assert [json.loads(line)["excerpt"] for line in result.stdout.splitlines()] == ["fact 0", "fact 1"]
    assert result.stderr == "the first 2; the id stands for more\n"


def test_an_id_that_means_two_things_says_so(engram: Engram, database: Config, gateway: str) -> None:
    row = outbox.enqueue_memory("A fact.", "team:a", config=database)
    outbox.claim_outbox("w", 1, 60, database)
    outbox.ack_sent(row, "w", str(row), database)
    result = engram("why", str(row))
    assert result.stdout.startswith(f"outbox:{row} ")
    assert result.stderr.startswith(f"{row} is also the memory server's id of memory:")
    record = result.stderr.split(":")[-1].strip()
    assert engram("why", f"memory:{record}").stdout.startswith(f"memory:{record} ")


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ("42", "logbook.outbox_memory.outbox_id, logbook.memories.memory_id, governance.write_audit.correlation_id"),
        ("audit:7", "governance.write_audit.audit_id"),
        ("memory:9", "logbook.memories.memory_record_id"),
        ("corr-0123456789abcdef", "governance.write_audit.correlation_id"),
    ],
)  # fmt: skip
def test_an_unknown_id_says_where_it_was_looked_for(
    engram: Engram, database: Config, wanted: str, place: str
) -> None:
    with pytest.raises(NotFound, match=f"nothing has the id {wanted}") as error:
        engram("why", wanted)
    assert error.value.hint == f"looked for it in {place}"


def test_what_is_no_id_is_refused(engram: Engram, database: Config) -> None:
    with pytest.raises(InputError, match="is no id"):
        engram("why", "outbox:x")


def test_without_a_database_it_says_what_to_start(tmp_path: Path) -> None:
    done = run_engram("why", "42", env=environment(ENGRAM_DATA_DIR=str(tmp_path / "none")))
    assert done.returncode == 1
    assert "engram up" in done.stderr
    assert "Traceback" not in done.stderr
