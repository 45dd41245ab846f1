"""Which words of a question are looked up, and what a question looks for at all."""

from __future__ import annotations

import pytest

from engram.search.asking import Term, terms
from engram.search.frequencies import Frequencies, read_frequencies
from engram.search.lookup import ENOUGH, plan

KNOWN = Frequencies(
    rows=100_000,
    words={"the": 0.9, "payment": 0.05, "payments": 0.01, "refund": 0.02, "webhook": 0.01, "lease": 0.002},
    tags={"space:big": 0.5, "space:small": 0.001},
)


def asked(text: str) -> list[Term]:
    return terms(text, 32)


def test_before_anything_is_known_every_word_is_looked_up() -> None:
    found = plan(asked("refund the payment"), Frequencies(), [])
    assert found.sources == found.terms == ["'refund':*", "'payment':*"]
    assert found.weights == [None, None]
    assert found.together == "'refund' & 'payment'"
    assert found.sample is None
    assert not found.unlooked


def test_rare_words_are_looked_up_and_common_ones_where_they_meet() -> None:
    found = plan(asked("refund payment lease unheard"), KNOWN, [])
    assert found.sources == [None, None, "'leas':*", "'unheard':*"]
    every, *pairs = (found.together or "").split(" | ")
    assert every == "'refund' & 'payment' & 'lease' & 'unheard'"
    assert pairs == ["'refund' & 'payment'"]
    assert found.sample == "'refund'", "the least common of the common"
    assert found.unlooked


def test_a_rarer_word_weighs_more() -> None:
    refund, payment, lease, unheard = plan(asked("refund payment lease unheard"), KNOWN, []).weights
    assert lease > refund > payment > 0
    assert unheard is None, "left to what the look-up finds"


def test_all_forms_of_a_word_are_counted() -> None:
    assert KNOWN.of_term(Term("payment", "payment")) == pytest.approx(0.06)
    assert KNOWN.of_term(Term("payment")) == 0.05
    assert KNOWN.of_term(Term("unheard", "unheard")) is None


def test_pairs_that_meet_too_often_are_not_looked_up() -> None:
    known = Frequencies(rows=100_000, words={"alpha": 0.3, "beta": 0.3}, tags={})
    found = plan(asked("alpha beta"), known, [])
    assert (found.sources, found.together, found.sample) == ([None, None], None, "'alpha'")


def test_a_rare_tag_makes_every_word_rare() -> None:
    found = plan(asked("refund payment"), KNOWN, ["space:small"])
    assert found.sources == ["'refund'", "'payment'"], "in the asked form: all forms are many rows to read"
    assert found.sample is None
    assert plan(asked("refund payment"), KNOWN, ["space:big"]).sources == [None, None]


def test_a_wider_look_up_takes_any_word() -> None:
    found = plan(asked("refund payment lease"), KNOWN, []).widened()
    assert found.sample == "'refund':* | 'payment':* | 'leas':*"
    assert not found.unlooked


def test_one_word_meets_nobody() -> None:
    assert plan(asked("refund"), KNOWN, []).together is None
    assert plan(asked("refund"), Frequencies(), []).together is None


def test_a_table_that_was_never_analysed_tells_nothing() -> None:
    row = {"rows": -1.0, "column": None, "elements": None, "frequencies": None}
    assert read_frequencies([row]) == Frequencies()
    assert Frequencies().passing(["space:a"]) == 1.0
    analysed = read_frequencies([{**row, "rows": 7.0}])
    assert (analysed.rows, analysed.words) == (7.0, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("retries", ["'retr':*"]),
        ("Deployments, deployed, deploying", ["'deploy':*"]),
        ("use", ["'use'"]),
        ("what is it", ["'what'", "'is'", "'it'"]),
        ("为什么要重试？", ["'要重'", "'重试'"]),
        ("怎么", ["'怎么'"]),
        ("PAY-1017", ["'pay'", "'1017'"]),
        ("обновление", ["'обновление'"]),
        ("!?", []),
    ],
)
def test_what_a_question_looks_for(text: str, expected: list[str]) -> None:
    assert [term.query for term in asked(text)] == expected


def test_a_long_question_is_cut() -> None:
    assert len(terms(" ".join(f"w{n}" for n in range(100)), 32)) == 32
    assert ENOUGH >= 100, "as many as may be asked for"
