"""How common words and tags are, from what PostgreSQL's own ANALYZE knows.

It costs nothing to keep and is a little out of date, which is good enough to
decide which words to look up first. It is about the whole table, not about one
tenant or owner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from engram.search.asking import Term

# A word that is not among the commonest is rarer than the rarest of them, and mostly much rarer.
_UNLISTED = 0.25


@dataclass(frozen=True)
class Frequencies:
    """`rows` is None until the table was analysed: then nothing is known and nothing is common."""

    rows: float | None = None
    words: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, float] = field(default_factory=dict)

    def of_term(self, term: Term) -> float | None:
        """The share of rows that have the term; None for one that is not among the common."""
        if term.stem is None:
            return self.words.get(term.word)
        forms = self._in_order[bisect_left(self._in_order, term.stem) :]
        shares = [self.words[word] for word in takewhile(term.covers, forms)]
        return min(1.0, sum(shares)) if shares else None

    def passing(self, tags: Sequence[str]) -> float:
        """The share of rows that have all these tags."""
        if self.rows is None:
            return 1.0
        share = 1.0
        for tag in tags:
            share *= self.tags.get(tag, _rarest(self.tags))
        return share

    @cached_property
    def _in_order(self) -> list[str]:
        return sorted(self.words)

    @property
    def unlisted(self) -> float:
        return _UNLISTED * _rarest(self.words)


def _rarest(shares: Mapping[str, float]) -> float:
    return min(shares.values(), default=0.0)


def read_frequencies(found: Sequence[Mapping[str, Any]]) -> Frequencies:
    rows = found[0]["rows"] if found else -1
    if rows <= 0:
        return Frequencies()
    listed = {
        row["column"]: dict(zip(row["elements"] or (), row["frequencies"] or (), strict=False))
        for row in found
    }
    return Frequencies(rows, listed.get("words", {}), listed.get("tags", {}))
