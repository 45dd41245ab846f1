"""What a question looks for: its words, without those that only ask, in any of their endings.

"How do we retry deliveries?" looks for words that begin with `retr` and
`deliver`. Only the asked side is treated so: what is stored keeps every word as
it is, and a text can still be found by each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engram.search.tokens import tokenize

# English words, and the bigrams that Chinese ones fall into, that turn a
# statement into a question or hold a sentence together.
_ASKING_WORDS = """
    a about am an and any are as at be been being but by can could did do does doing for from had has have
    he her here hers him his how i if in into is it its let may me might must my no nor not of off on or our
    ours out over own shall she should so some such than that the their theirs them then there these they
    this those to too under up us was we were what when where which while who whom whose why will with
    would you your yours anybody anyone anything somebody someone something
    怎样 为什 时候 如何 是否 谁 哪里 哪儿 哪个 哪些 在哪 多久 多少 几个 几点 可以 能不 不能 我们 你们 他们
    的 了 是 在
"""
_ASKING = frozenset(_ASKING_WORDS.split())
# Characters of no Chinese word but those that ask: whatever bigram they fall into asks too.
_PARTICLES = frozenset("么吗呢")
_ENDINGS = (
    "ations", "ation", "ments", "ment", "ings", "ing", "ions", "ion", "ers", "er", "ies", "ied",
    "ed", "es", "ly", "s", "e", "y",
)  # fmt: skip
_SHORTEST_STEM = 4


@dataclass(frozen=True, slots=True)
class Term:
    """One thing to look for: a word, or every word that begins with a stem."""

    word: str
    stem: str | None = None

    @property
    def query(self) -> str:
        """As a tsquery; words hold only word characters."""
        return f"'{self.stem}':*" if self.stem else f"'{self.word}'"

    @property
    def exact(self) -> str:
        """The word as it was asked, which an index finds without looking at its neighbours."""
        return f"'{self.word}'"

    def covers(self, word: str) -> bool:
        return word.startswith(self.stem) if self.stem else word == self.word


def terms(text: str, at_most: int) -> list[Term]:
    """The terms of a question, in order, each once.

    >>> [term.query for term in terms("Why are deliveries retried? 为什么重试", 32)]
    ["'deliver':*", "'retr':*", "'重试'"]
    >>> [term.query for term in terms("what is it", 32)]
    ["'what'", "'is'", "'it'"]
    """
    words = dict.fromkeys(tokenize(text))
    telling = [word for word in words if not _asks(word)] or list(words)
    return list(_distinct(Term(word, _stem(word)) for word in telling))[:at_most]


def _asks(word: str) -> bool:
    return word in _ASKING or not _PARTICLES.isdisjoint(word)


def _distinct(found: Iterable[Term]) -> Iterable[Term]:
    """Two words of one stem are one term."""
    return {term.query: term for term in found}.values()


def _stem(word: str) -> str | None:
    """The word without its English ending; None where it has none, or too little would be left."""
    if word in _ASKING or not (word.isascii() and word.isalpha()) or len(word) < _SHORTEST_STEM:
        return None
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word[: -len(ending)]
    return word
