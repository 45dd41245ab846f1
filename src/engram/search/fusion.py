"""Rank fusion: one order from several lists whose scores cannot be compared."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

# The usual constant: large enough that the first place of one list does not
# outweigh a good place in two.
RANK_OFFSET = 60


def fuse(*rankings: Sequence[K]) -> list[tuple[K, float]]:
    """Reciprocal rank fusion, best first; ties keep the order of first appearance.

    >>> [key for key, _ in fuse(["a", "b"], ["b", "c"])]
    ['b', 'a', 'c']
    """
    scores: dict[K, float] = {}
    for ranking in rankings:
        for rank, key in enumerate(dict.fromkeys(ranking), start=1):
            scores[key] = scores.get(key, 0.0) + 1.0 / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: -item[1])
