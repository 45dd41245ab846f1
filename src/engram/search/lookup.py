"""Which words of a question choose the candidates.

Looking up a common word means ranking half the table, and finds what everybody
says. So the rare words of a question are looked up whole, the commoner ones
only where several of them meet, and the least common of these also by itself,
so that there are candidates at all. Every word ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log

from engram.search.asking import Term
from engram.search.frequencies import Frequencies

# As many rows of a word as are looked up, and as many candidates as are ranked, of each kind.
ENOUGH = 200
_MEETING = 5
# Of a word with more rows than this only the asked form is looked up: the index
# has to read all rows of all forms before it can leave out a single one.
_ALL_FORMS = 1_000
# Rows that have every word are found among this many at most: finding them takes
# a look at each row of the rarest word.
_MANY = 20_000


@dataclass(frozen=True, slots=True)
class Lookup:
    """Tsqueries. A weight of None is left to the statement, which knows what it found.

    `terms`, `weights` and `sources` go side by side; a term without a source is not looked up.
    """

    terms: list[str]
    weights: list[float | None]
    sources: list[str | None]
    together: str | None
    sample: str | None
    unlooked: bool
    """Words are left that only a wider sample would find."""
    rows: float | None

    def widened(self) -> Lookup:
        """The same, with every word bringing candidates."""
        return replace(self, sample=" | ".join(self.terms), unlooked=False)


def plan(terms: Sequence[Term], known: Frequencies, tags: Sequence[str]) -> Lookup:
    shares = {term: known.of_term(term) for term in terms}
    reached = (known.rows or 0.0) * known.passing(tags)
    common = sorted(
        (share, term.word, term)
        for term, share in shares.items()
        if share is not None and share * reached > ENOUGH
    )
    commoner = [term for _, _, term in common]
    return Lookup(
        terms=[term.query for term in terms],
        weights=[_weight(shares[term]) for term in terms],
        sources=[None if term in commoner else _source(term, shares[term], known) for term in terms],
        together=" | ".join(_meetings(terms, commoner, shares, known, reached)) or None,
        sample=commoner[0].exact if commoner else None,
        unlooked=bool(commoner),
        rows=known.rows,
    )


def _source(term: Term, share: float | None, known: Frequencies) -> str:
    rows = (share or 0.0) * (known.rows or 0.0)
    return term.query if rows <= _ALL_FORMS else term.exact


def _weight(share: float | None) -> float | None:
    return None if share is None else log(1 + 1 / share)


def _meetings(
    terms: Sequence[Term],
    commoner: Sequence[Term],
    shares: dict[Term, float | None],
    known: Frequencies,
    reached: float,
) -> Iterator[str]:
    """Every word at once; then pairs of the commoner words, as long as few rows have both."""
    if len(terms) < 2:
        return
    rarest = min((share if share is not None else known.unlisted) for share in shares.values())
    if rarest * reached <= _MANY:
        yield " & ".join(term.exact for term in terms)
    left = float(ENOUGH)
    for one, other in combinations(commoner[:_MEETING], 2):
        left -= (shares[one] or 0.0) * (shares[other] or 0.0) * reached
        if left < 0:
            return
        yield f"{one.exact} & {other.exact}"
