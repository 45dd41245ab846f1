"""`engram outbox`, as an operator types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime

import pytest
from typer.testing import Result

from engram.kernel.errors import NotFound
from engram.logbook import governance, memories, outbox
from engram.logbook.config import Config
from engram.logbook.outbox import Dead
from engram.postgres.pool import connect

Engram = Callable[..., Result]


def dead_rows(config: Config, *texts: str) -> list[int]:
    """Rows that a worker gave up, as it gives them up."""
    ids = [outbox.enqueue_memory(text, "team:a", config=config) for text in texts]
    claimed = outbox.claim_outbox("w", len(ids), 60, config)
    outbox.dead_many(
        "w", [Dead(row["outbox_id"], row["lease_token"], "refused: 422") for row in claimed], config
    )
    return ids


def test_the_outbox_is_listed_by_its_marks(engram: Engram, database: Config, dsn: str) -> None:
    (dead,) = dead_rows(database, "Given up.")
    waiting = outbox.enqueue_memory("Waiting\nfor the server.", "team:a", config=database)
    other = outbox.enqueue_memory("Elsewhere.", "private:ada", config=database)
    with connect(dsn) as connection:
        connection.execute(
            "UPDATE logbook.outbox_memory SET created_at = now() - interval '2 hours' WHERE outbox_id = %s",
            [waiting],
        )

    def listed(*arguments: str) -> list[int]:
        lines = engram("outbox", "list", "--json", *arguments).stdout.splitlines()
        return [json.loads(line)["outbox_id"] for line in lines]

    assert listed() == [dead, waiting, other]
    assert listed("--status", "dead") == [dead]
    assert listed("--space", "private:ada") == [other]
    assert listed("--older-than", "1h") == [waiting]
    assert listed("--text", "ELSEWHERE") == [other]
    assert listed("--limit", "1") == [dead]
    table = engram("outbox", "list").stdout.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        [str(dead), "dead"], [str(waiting), "pending"], [str(other), "pending"],
    ]  # fmt: skip
    assert "refused: 422" in table[1]
    assert "Waiting for the server." in table[2]
    engram("outbox", "list", "--status", "gone", code=2)
    engram("outbox", "list", "--older-than", "old", code=2)


def test_one_row_is_shown_with_its_audits(engram: Engram, database: Config) -> None:
    (dead,) = dead_rows(database, "Given up.")
    shown = engram("outbox", "show", str(dead)).output
    assert "last_error           refused: 422" in shown
    assert "reject    outbox_flush_dead" in shown
    assert shown.endswith("text\nGiven up.\n")
    with pytest.raises(NotFound):
        engram("outbox", "show", "999")


def test_requeueing_says_what_became_of_each(engram: Engram, database: Config) -> None:
    one, two = dead_rows(database, "One.", "Two.")
    pending = outbox.enqueue_memory("Two.", "team:a", config=database)
    result = engram("outbox", "requeue", str(one), str(two), str(pending), "999", code=1)
    told = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    fresh = int(told[str(one)].rpartition(" ")[2])
    assert told[str(two)] == f"{pending} has the same content already"
    assert told[str(pending)] == told["999"] == "there is no dead row of this id that may be sent"
    assert result.stderr == "1 requeued, 1 there already, 2 not dead\n"
    row = outbox.get(fresh, database)
    assert row is not None
    assert (row["status"], row["requeued_from"], row["payload_md"]) == ("pending", one, "One.")
    assert [a["reason"] for a in governance.audits_of_outbox(fresh, database)] == ["outbox_requeued"]


def test_all_that_is_dead_is_requeued_once_however_many(
    engram: Engram, database: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.cli.outbox.PAGE", 3)
    ids = dead_rows(database, *(f"fact {n}" for n in range(8)))
    result = engram("outbox", "requeue", "--all-dead")
    assert [int(line.partition(":")[0]) for line in result.stdout.splitlines()] == ids
    assert len(outbox.list_rows("pending", config=database)) == 8
    again = engram("outbox", "requeue", "--all-dead")
    assert again.stderr == "0 requeued, 8 there already, 0 not dead\n"
    assert len(outbox.list_rows("pending", config=database)) == 8


@pytest.mark.parametrize("arguments", [[], ["1", "--all-dead"]], ids=["nothing", "both"])
def test_what_to_requeue_must_be_said(engram: Engram, database: Config, arguments: list[str]) -> None:
    engram("outbox", "requeue", *arguments, code=2)


def test_many_rows_are_listed_page_by_page(
    engram: Engram, database: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.cli.outbox.PAGE", 3)
    ids = sorted(outbox.enqueue_many([(f"fact {n}", "team:a") for n in range(8)], database))
    result = engram("outbox", "list", "--json", "--limit", "7")
    assert [json.loads(line)["outbox_id"] for line in result.stdout.splitlines()] == ids[:7]
    assert f"--after {ids[6]}" in result.stderr
    rest = engram("outbox", "list", "--json", "--limit", "7", "--after", str(ids[6]))
    assert [json.loads(line)["outbox_id"] for line in rest.stdout.splitlines()] == ids[7:]
    assert rest.stderr == "", "there are no more, and nobody says that there may be"
    assert engram("outbox", "list", "--limit", "8").stderr == ""


def test_nothing_is_said_to_be_nothing(engram: Engram, database: Config) -> None:
    for arguments in ([], ["--json"], ["--status", "dead", "--space", "team:none"]):
        result = engram("outbox", "list", *arguments)
        assert (result.stdout, result.stderr) == ("", "no such row\n")
    result = engram("outbox", "requeue", "--all-dead")
    assert (result.stdout, result.stderr) == ("", "0 requeued, 0 there already, 0 not dead\n")


def test_programs_get_json_with_times_that_parse(engram: Engram, database: Config) -> None:
    (dead,) = dead_rows(database, "Given\x1b[31m up.")
    shown = json.loads(engram("outbox", "show", str(dead), "--json").stdout)
    assert (shown["outbox_id"], shown["status"]) == (dead, "dead")
    assert shown["payload_md"] == "Given\x1b[31m up.", "exact, for programs"
    assert datetime.fromisoformat(shown["created_at"]).utcoffset() is not None
    assert [audit["reason"] for audit in shown["audits"]] == ["outbox_flush_dead"]
    lines = engram("outbox", "requeue", str(dead), "999", "--json", code=1).stdout.splitlines()
    done, missing = (json.loads(line) for line in lines)
    assert (done["outbox_id"], done["result"]) == (dead, "requeued")
    assert outbox.get(done["requeued_as"], database) is not None
    assert missing == {"outbox_id": 999, "result": "not dead", "requeued_as": None}


def test_what_a_terminal_would_obey_is_not_shown_to_it(engram: Engram, database: Config) -> None:
    row = outbox.enqueue_memory("red \x1b[31m, bell \x07, 全角\u3000字\nnext", "team:a", config=database)
    shown = engram("outbox", "show", str(row)).stdout
    assert shown.endswith("text\nred \ufffd[31m, bell \ufffd, 全角\u3000字\nnext\n")
    assert "\x1b" not in engram("outbox", "list").stdout


@pytest.mark.parametrize("wrong", ["0", "-1", "x"])
def test_a_bad_id_is_refused_before_the_database_is_asked(engram: Engram, wrong: str) -> None:
    engram("outbox", "show", "--", wrong, code=2)
    engram("outbox", "requeue", "--", wrong, code=2)


def test_an_id_that_no_row_can_have_is_simply_not_there(engram: Engram, database: Config) -> None:
    large = str(1 << 64)
    with pytest.raises(NotFound):
        engram("outbox", "show", large)
    assert engram("outbox", "requeue", large, code=1).stdout.startswith(f"{large}: there is no dead row")
    assert engram("outbox", "list", "--after", large).stdout == ""


def test_dead_rows_are_requeued_by_their_marks(engram: Engram, database: Config) -> None:
    one, two = dead_rows(database, "One.", "Two.")
    result = engram("outbox", "requeue", "--all-dead", "--text", "two")
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == [str(two)]
    assert engram("outbox", "requeue", "--all-dead", "--space", "team:b").stdout == ""
    assert engram("outbox", "requeue", "--all-dead", "--older-than", "1h").stdout == ""
    engram("outbox", "requeue", str(one), "--text", "two", code=2)
    assert len(outbox.list_rows("pending", config=database)) == 1


def test_what_was_forgotten_is_shown_to_nobody(engram: Engram, database: Config) -> None:
    row = outbox.enqueue_memory("A secret.", "team:a", config=database)
    (memory,) = memories.to_forget(outbox_id=row, config=database)
    memories.forget(memory["memory_record_id"], "ada", config=database)
    for arguments in (["list"], ["list", "--json"], ["show", str(row)], ["show", str(row), "--json"]):
        shown = engram("outbox", *arguments).stdout
        assert "secret" not in shown
        assert "forgotten" in shown
