"""What engram knows of every memory: the search behind degraded reads, and the space filter."""

from __future__ import annotations

import pytest

from engram.kernel.content import payload_sha
from engram.logbook import governance, memories, outbox
from engram.logbook.config import Config


def texts(config: Config, asked: str, *spaces: str, states: tuple[str, ...] = ("parked",)) -> list[str]:
    return [row["payload_md"] for row in memories.search(asked, spaces, states, 10, config)]


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
    (row,) = outbox.claim_outbox("w1", 1, 60, filled)
    outbox.ack_many("w1", [outbox.Sent(row["outbox_id"], row["lease_token"], "mem-1")], filled)
    assert texts(filled, row["payload_md"], "team:a", states=("stored",)) == [row["payload_md"]]


def test_hits_of_the_memory_server_are_known_only_in_readable_spaces(filled: Config) -> None:
    for row in outbox.claim_outbox("w1", 10, 60, filled):
        outbox.ack_sent(row["outbox_id"], "w1", f"mem-{row['outbox_id']}", filled)
    ids = [f"mem-{n}" for n in range(1, 20)]
    assert {r["target_space"] for r in memories.by_memory_ids(ids, ["team:a"], filled)} == {"team:a"}
    assert memories.by_memory_ids(ids, ["private:eve"], filled) == []


def test_the_rarest_word_leads(config: Config) -> None:
    for n in range(40):
        outbox.enqueue_memory(f"The gateway and the worker, note {n}.", "team:a", config=config)
    outbox.enqueue_memory("The gateway drops frobnication on restart.", "team:a", config=config)
    assert texts(config, "gateway worker frobnication", "team:a")[0].startswith("The gateway drops")


def test_a_forgotten_memory_is_gone_at_once_and_may_come_back(filled: Config) -> None:
    known = memories.by_content("team:a", payload_sha("Deploy on Tuesdays."), filled)
    assert known is not None
    forgotten = memories.forget(known["memory_record_id"], "ada", "memory_forget", "corr-1234", filled)
    assert forgotten is not None
    assert texts(filled, "deploy", "team:a") == []
    assert memories.by_content("team:a", payload_sha("Deploy on Tuesdays."), filled) is None
    assert memories.forget(known["memory_record_id"], "ada", config=filled) is None, "once is enough"
    claimed = {row["payload_md"] for row in outbox.claim_outbox("w1", config=filled)}
    assert "Deploy on Tuesdays." not in claimed, "a forgotten row is never sent"
    (audit,) = governance.query_write_audit(reason="memory_forget", config=filled)
    assert (audit["actor_user_id"], audit["action"], audit["correlation_id"]) == ("ada", "allow", "corr-1234")
    anew = outbox.enqueue_memory("Deploy on Tuesdays.", "team:a", config=filled)
    assert anew != known["outbox_id"]
    assert texts(filled, "deploy", "team:a") == ["Deploy on Tuesdays."]


def test_settling_never_leaves_forgotten(filled: Config) -> None:
    claimed = {row["payload_md"]: row for row in outbox.claim_outbox("w1", config=filled)}
    row = claimed["Deploy on Tuesdays."]
    known = memories.by_content("team:a", row["payload_sha"], filled)
    assert known is not None
    memories.forget(known["memory_record_id"], "ada", config=filled)
    assert outbox.ack_sent(row["outbox_id"], "w1", "mem-1", filled, lease_token=row["lease_token"])
    assert memories.by_content("team:a", row["payload_sha"], filled) is None
    assert texts(filled, "deploy", "team:a") == []
