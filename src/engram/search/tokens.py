"""Text -> tokens, for Latin and CJK scripts alike.

Latin, Cyrillic and other spaced scripts give one token per word. Chinese,
Japanese and Korean runs, which no space divides, give overlapping bigrams (and
the single character where a run is one long), so that any two-character word
inside a sentence is found. The same function makes the stored side and the
asked side; a text indexed by one version must be asked by the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

MAX_TOKENS = 20_000
# PostgreSQL's tsvector ends at 1 MiB, its word positions included.
MAX_BYTES = 800_000
MAX_TOKEN_LENGTH = 64
_MAX_POSITION = 16_383
_BYTES_A_POSITION = 8
_MOST_POSITIONS = 16

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
# Marks and vowel signs belong to the letter before them, though \w does not say so.
_MARKS = (
    "\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u064b-\u065f"
    "\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u0900-\u0963\u0966-\u0dff\u0e01-\u0e3a"
    "\u0e40-\u0e4e\u0eb0-\u0ecd\u0f35-\u0f39\u0f71-\u0f84\u1000-\u1049\u1780-\u17d3\u200c\u200d\u3099\u309a"
)
_RUNS = re.compile(rf"(?P<cjk>[{_CJK}]+)|(?P<word>[^\W_{_CJK}](?:[^\W_{_CJK}]|[{_MARKS}])*)")
_ASCII_WORDS = re.compile("[a-z0-9]+")
# A character makes one token at most, of two characters and its position at most.
_SHORT = min(MAX_TOKENS, MAX_BYTES // (2 * 4 + _BYTES_A_POSITION))


def tokenize(text: str) -> list[str]:
    """Tokens in order of appearance, repeats included, bounded in number and length.

    >>> tokenize("Renew the lease_token, 续租约!")
    ['renew', 'the', 'lease', 'token', '续租', '租约']
    """
    folded = _folded(text)
    if len(folded) <= _SHORT:
        # Too short to come near a bound; and most text is plain, for which this is many times as fast.
        words = _ASCII_WORDS.findall(folded) if folded.isascii() else None
        return list(_tokens(folded)) if words is None else [word[:MAX_TOKEN_LENGTH] for word in words]
    tokens: list[str] = []
    size = 0
    for token in _tokens(folded):
        size += len(token.encode()) + _BYTES_A_POSITION
        if len(tokens) >= MAX_TOKENS or size > MAX_BYTES:
            break
        tokens.append(token)
    return tokens


def _folded(text: str) -> str:
    """One form for all spellings; normalised again because folding takes some letters apart."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _tokens(text: str) -> Iterator[str]:
    for run in _RUNS.finditer(text):
        found = run.group()
        if run.lastgroup == "word":
            yield found[:MAX_TOKEN_LENGTH]
        elif len(found) == 1:
            yield found
        else:
            yield from (found[i : i + 2] for i in range(len(found) - 1))


def tsvector(tokens: Sequence[str]) -> str:
    """PostgreSQL's text form of a tsvector with positions; tokens hold only word characters.

    >>> tsvector(["b", "a", "b"])
    "'b':1,3 'a':2"
    """
    entries: dict[str, str] = {}
    for position, token in zip(chain(range(1, _MAX_POSITION), repeat(_MAX_POSITION)), tokens, strict=False):
        known = entries.get(token)
        if known is None:
            entries[token] = f"'{token}':{position}"
        elif known.count(",") < _MOST_POSITIONS - 1:
            entries[token] = f"{known},{position}"
    return " ".join(entries.values())


def any_of(tokens: Sequence[str]) -> str:
    """PostgreSQL's text form of a tsquery that matches any of the tokens.

    >>> any_of(["a", "b", "a"])
    "'a' | 'b'"
    """
    return " | ".join(f"'{token}'" for token in dict.fromkeys(tokens))
