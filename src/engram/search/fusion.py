"""Rank fusion: one order from several lists whose scores cannot be compared."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

# The usual constant: large enough that the first place of one list does not
# outweigh a good place in two.
RANK_OFFSET = 60


def fuse(*rankings: Sequence[K], weights: Sequence[float] = ()) -> list[tuple[K, float]]:
    """Reciprocal rank fusion, best first; ties keep the order of first appearance.

    A list without a weight counts once.

    >>> [key for key, _ in fuse(["a", "b"], ["b", "c"])]
    ['b', 'a', 'c']
    >>> [key for key, _ in fuse(["a"], ["b"], weights=[1, 2])]
    ['b', 'a']
    """
    scores: dict[K, float] = {}
    counts = [*weights, *[1.0] * (len(rankings) - len(weights))]
    for ranking, weight in zip(rankings, counts, strict=True):
        for rank, key in enumerate(dict.fromkeys(ranking), start=1):
            scores[key] = scores.get(key, 0.0) + weight / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: -item[1])
