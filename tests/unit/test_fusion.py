"""Rank fusion: what is good in two lists beats what is best in one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engram.search.fusion import RANK_OFFSET, fuse

RANKINGS = st.lists(st.lists(st.integers(0, 20), max_size=15), max_size=4)


def test_one_list_keeps_its_order() -> None:
    assert [key for key, _ in fuse(["c", "a", "b"])] == ["c", "a", "b"]


def test_nothing_gives_nothing() -> None:
    assert fuse() == []
    assert fuse([], []) == []


def test_scores_are_reciprocal_ranks() -> None:
    assert dict(fuse(["a", "b"], ["b"])) == {
        "b": 1 / (RANK_OFFSET + 2) + 1 / (RANK_OFFSET + 1),
        "a": 1 / (RANK_OFFSET + 1),
    }


def test_two_good_places_beat_one_first_place() -> None:
    assert fuse(["first", "both"], ["other", "both"])[0][0] == "both"


def test_ties_keep_the_order_of_first_appearance() -> None:
    assert [key for key, _ in fuse(["a", "b"], ["b", "a"])] == ["a", "b"]
    assert [key for key, _ in fuse(["x"], ["y"], ["z"])] == ["x", "y", "z"]


def test_a_repeat_within_a_list_counts_once_and_takes_no_place() -> None:
    assert fuse(["a", "a", "b"]) == fuse(["a", "b"])


@given(RANKINGS)
def test_every_key_once_best_first(rankings: list[list[int]]) -> None:
    fused = fuse(*rankings)
    assert sorted(key for key, _ in fused) == sorted({key for ranking in rankings for key in ranking})
    scores = [score for _, score in fused]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score <= len(rankings) / (RANK_OFFSET + 1) + 1e-12 for score in scores)
