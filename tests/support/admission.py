"""Tokens for tests of a gateway that asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram.api import tokens, tokens_file


def admitted(file: Path, owner: str, scopes: Sequence[str], spaces: Sequence[str] | None = None) -> str:
    """A new token in the file; its secret. `spaces` None: every shared space."""
    secret = tokens.new_secret()
    entry: dict[str, object] = {
        "sha256": tokens.sha256_of(secret),
        "owner": owner,
        "scopes": list(scopes),
    }
    token = tokens.checked(entry if spaces is None else {**entry, "spaces": list(spaces)}, "entry")
    tokens_file.edit(file, lambda text: tokens.with_table(text, token))
    return secret
