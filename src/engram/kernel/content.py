"""Content: its identity (one form of SHA-256) and whether it can be kept at all."""

from __future__ import annotations

import hashlib
from math import isfinite

MAX_DEPTH = 64
# The largest number that PostgreSQL gives a row.
MAX_ID = (1 << 63) - 1


def payload_sha(payload: str) -> str:
    """Lower-case hex SHA-256 of the UTF-8 text: what makes two payloads the same.

    >>> payload_sha("")[:16]
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(payload.encode("utf-8")).hexdigest()


def labelled_sha(sha: str) -> str:
    """The form shown to people and in error contexts.

    >>> labelled_sha("ab12")
    'sha256:ab12'
    """
    return f"sha256:{sha}"


def why_unstorable(value: object, depth: int = 0) -> str | None:
    """What keeps a JSON value out of PostgreSQL, or None.

    >>> why_unstorable({"a": [1, "b"]}) is None
    True
    >>> why_unstorable({"a": float("nan")})
    'must hold finite numbers only'
    """
    if isinstance(value, str):
        return _why_unstorable_text(value)
    if isinstance(value, float) and not isfinite(value):
        return "must hold finite numbers only"
    if depth > MAX_DEPTH:
        return f"must be nested at most {MAX_DEPTH} deep"
    parts: list[object] = []
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list):
        parts = value
    return next((problem for part in parts if (problem := why_unstorable(part, depth + 1))), None)


MAX_ERROR_CHARS = 2000


def storable(text: str) -> str:
    """Somebody else's words, cut short and without what PostgreSQL cannot hold: for error columns.

    >>> storable("a\\x00b")
    'a�b'
    """
    return text[:MAX_ERROR_CHARS].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def _why_unstorable_text(text: str) -> str | None:
    if "\x00" in text:
        return "must not contain NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must not contain lone surrogates"
    return None
