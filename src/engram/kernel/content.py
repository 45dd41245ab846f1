"""The identity of content: its SHA-256, in the one form engram uses."""

from __future__ import annotations

import hashlib


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
