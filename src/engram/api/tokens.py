"""A token: a random secret that says who calls and what they may do. And its line in the tokens file.

The tokens file is TOML, a `[[token]]` table for each:

    [[token]]
    sha256 = "…"                        # of the token; the token itself is kept nowhere
    owner = "ada"                       # the caller: private:ada is their own space
    scopes = ["read", "write"]          # and "admin"
    spaces = ["team:payments"]          # optional: no other shared space
    expires_at = 2027-01-01T00:00:00Z   # optional
    note = "Ada's laptop"               # optional

A plain SHA-256 is enough, because a token is 32 random bytes: there is nothing
to guess. Everything in the file is checked; what is wrong is refused with the
file, the entry and the problem, and never with a value, which may be a token
that was put there by mistake.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tomllib
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engram.gateway.callers import SCOPES, Caller
from engram.gateway.spaces import parse_space
from engram.kernel.content import why_unstorable
from engram.kernel.errors import ConfigError

PREFIX = "engram_"
PREAMBLE = "# Who may call engram. `engram token` edits this file; so may you. Only hashes are kept here.\n"
SHOWN_DIGITS = 8

_SHA256 = re.compile(r"[0-9a-f]{64}")
_TABLE = re.compile(r"\s*\[\[\s*token\s*\]\]")
_EMPTY_OR_COMMENT = re.compile(r"\s*(#.*)?")
_MAX_NOTE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of a token. `spaces` None: every shared space."""

    sha256: str
    owner: str
    scopes: frozenset[str]
    spaces: frozenset[str] | None = None
    expires_at: datetime | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """Enough of the hash to tell it from the others."""
        return self.sha256[:SHOWN_DIGITS]

    @property
    def caller(self) -> Caller:
        return Caller(self.owner, self.scopes, self.spaces, verified=True)

    def expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def sha256_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def parse(text: str, origin: str) -> tuple[Token, ...]:
    """The tokens of a file's text; raises `ConfigError` for anything that is not as it should be."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}") from error
    entries = tables.pop("token", [])
    if tables:
        raise ConfigError(f"{origin}: unknown key {_names(tables)}", hint="each token is a [[token]] table")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{origin}: token is not a list of tables", hint="each token is a [[token]] table")
    found = tuple(checked(entry, f"{origin}: token {n}") for n, entry in enumerate(entries, 1))
    _refuse_twins(found, origin)
    return found


def checked(entry: Mapping[str, Any], where: str) -> Token:
    """One entry as a token; `where` begins the message when something is wrong with it."""
    if unknown := set(entry) - set(_FIELDS):
        raise ConfigError(f"{where}: unknown key {_names(unknown)}", hint=f"known: {', '.join(_FIELDS)}")
    if missing := {"sha256", "owner", "scopes"} - set(entry):
        raise ConfigError(f"{where}: lacks {_names(missing)}")
    values = {}
    for name, value in entry.items():
        try:
            values[name] = _FIELDS[name](value)
        except ValueError as error:
            raise ConfigError(f"{where}: {name} {error}") from None
    return Token(**values)


def rendered(token: Token) -> str:
    """The token's table, such that `parse` gives the same token."""
    lines = [
        "[[token]]",
        f"sha256 = {_quoted(token.sha256)}",
        f"owner = {_quoted(token.owner)}",
        f"scopes = {_list([scope for scope in SCOPES if scope in token.scopes])}",
    ]
    if token.spaces is not None:
        lines.append(f"spaces = {_list(sorted(token.spaces))}")
    if token.expires_at is not None:
        lines.append(f"expires_at = {token.expires_at.isoformat()}")
    if token.note:
        lines.append(f"note = {_quoted(token.note)}")
    return "\n".join(lines) + "\n"


def with_table(text: str, token: Token) -> str:
    """The text with one more table at its end."""
    before = text if text.endswith("\n") else f"{text}\n"
    return f"{before}\n{rendered(token)}"


def without_table(text: str, gone: Token, origin: str) -> str:
    """The text without this token's table; comments and other tables stay as they were written."""
    tokens = parse(text, origin)
    lines = text.splitlines(keepends=True)
    starts = [n for n, line in enumerate(lines) if _TABLE.match(line)]
    if len(starts) == len(tokens):
        at = tokens.index(gone)
        left = _cut(lines, starts[at], [*starts, len(lines)][at + 1])
        if parse(left, origin) == (*tokens[:at], *tokens[at + 1 :]):
            return left
    raise ConfigError(
        f"{origin}: its layout is not one that engram can edit",
        hint=f"remove the entry whose sha256 begins with {gone.name} by hand",
    )


def _cut(lines: list[str], start: int, end: int) -> str:
    """Comments before the next table are that one's; empty lines before this one go with it."""
    while _EMPTY_OR_COMMENT.fullmatch(lines[end - 1].rstrip()):
        end -= 1
    while start and not lines[start - 1].strip():
        start -= 1
    return "".join(lines[:start] + lines[end:])


def _refuse_twins(tokens: tuple[Token, ...], origin: str) -> None:
    first: dict[str, int] = {}
    for n, token in enumerate(tokens, 1):
        if token.sha256 in first:
            raise ConfigError(f"{origin}: token {n}: sha256 is that of token {first[token.sha256]}")
        first[token.sha256] = n


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError("must be 64 lower-case hexadecimal digits: the hash, never the token itself")
    return value


def _owner(value: Any) -> str:
    text = _plain(value)
    if parse_space(f"private:{text}") is None:
        raise ValueError("must be 1 to 128 characters without white space, not starting with : / or \\")
    return text


def _scopes(value: Any) -> frozenset[str]:
    scopes = _texts(value)
    if not scopes or not scopes <= set(SCOPES):
        raise ValueError(f"must be a list of one or more of {', '.join(SCOPES)}")
    return scopes


def _spaces(value: Any) -> frozenset[str]:
    spaces = _texts(value)
    for text in spaces:
        space = parse_space(text)
        if space is None or not space.shared:
            raise ValueError("must be a list of shared spaces: team:<project> or org:<name>")
    return spaces


def _expires_at(value: Any) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError("must be a date and time with a time zone, unquoted, such as 2027-01-01T00:00:00Z")
    return value


def _note(value: Any) -> str:
    text = _plain(value)
    if len(text) > _MAX_NOTE_CHARS:
        raise ValueError(f"may have at most {_MAX_NOTE_CHARS} characters")
    return text


def _texts(value: Any) -> frozenset[str]:
    if not isinstance(value, list):
        raise ValueError("must be a list")
    return frozenset(_plain(part) for part in value)


def _plain(value: Any) -> str:
    """Text that can be shown on a terminal, written as TOML and kept in the database."""
    if not isinstance(value, str):
        raise ValueError("must be text")
    if problem := why_unstorable(value):
        raise ValueError(problem)
    if any(unicodedata.category(character) == "Cc" for character in value):
        raise ValueError("must not contain control characters")
    return value


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "sha256": _sha256,
    "owner": _owner,
    "scopes": _scopes,
    "spaces": _spaces,
    "expires_at": _expires_at,
    "note": _note,
}


def _quoted(text: str) -> str:
    # A JSON string is a TOML string, but for DEL, which is a control character and never gets here.
    return json.dumps(text, ensure_ascii=False)


def _list(texts: list[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _names(keys: Mapping[str, Any] | set[str]) -> str:
    return ", ".join(sorted(repr(key) for key in keys))
