"""What engram knows of every memory: the search behind degraded reads, and the space filter."""

from __future__ import annotations

import pytest

from engram.logbook import memories, outbox
from engram.logbook.config import Config
from engram.logbook.connection import run


def texts(config: Config, asked: str, *spaces: str, states: tuple[str, ...] = ("parked",)) -> list[str]:
    query = memories.search(asked, spaces=spaces, states=states, limit=10)
    return [row["payload_md"] for row in run(query, config)]


@pytest.fixture
def filled(config: Config) -> Config:
    for text in ("Renew the lease before the call.", "租约过期后可被重新领取", "Deploy on Tuesdays."):
        outbox.enqueue_memory(text, "team:a", config=config)
    outbox.enqueue_memory("Renew nothing here.", "private:bob", config=config)
    return config


def test_words_find_memories_in_the_asked_spaces_only(filled: Config) -> None:
    assert texts(filled, "how do I renew a lease", "team:a") == ["Renew the lease before the call."]
    assert texts(filled, "renew", "private:ada") == []
    assert texts(filled, "renew", "private:bob", "team:a") == [
        "Renew nothing here.",
        "Renew the lease before the call.",
    ]


def test_chinese_is_found_by_any_two_characters(filled: Config) -> None:
    assert texts(filled, "租约", "team:a") == ["租约过期后可被重新领取"]
    assert texts(filled, "重新领取", "team:a") == ["租约过期后可被重新领取"]


@pytest.mark.parametrize("asked", ["", "   ", "!!!", "' | ! & (", "\\", "a':*", "%(limit)s"])
def test_odd_questions_find_nothing_and_break_nothing(filled: Config, asked: str) -> None:
    assert texts(filled, asked, "team:a") == []


def test_states_are_honoured(filled: Config) -> None:
    assert texts(filled, "deploy", "team:a", states=("stored",)) == []
    (row,) = run(outbox.claim("w1", 1, 60), filled)
    run(outbox.ack_many("w1", [outbox.Sent(row["outbox_id"], row["lease_token"], "mem-1")]), filled)
    assert texts(filled, row["payload_md"], "team:a", states=("stored",)) == [row["payload_md"]]


def test_hits_of_the_memory_server_are_known_only_in_readable_spaces(filled: Config) -> None:
    for row in run(outbox.claim("w1", 10, 60), filled):
        run(
            outbox.ack_many(
                "w1", [outbox.Sent(row["outbox_id"], row["lease_token"], f"mem-{row['outbox_id']}")]
            ),
            filled,
        )
    ids = [f"mem-{n}" for n in range(1, 20)]
    assert {r["target_space"] for r in run(memories.by_memory_ids(ids, spaces=["team:a"]), filled)} == {
        "team:a"
    }
    assert run(memories.by_memory_ids(ids, spaces=["private:eve"]), filled) == []
