"""The id that ties a reply to its logs, its audit row and its outbox row."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{3,63}")

current: ContextVar[str | None] = ContextVar("correlation_id", default=None)


def new_correlation_id() -> str:
    return f"corr-{secrets.token_hex(8)}"


def accept_or_new(offered: str | None) -> str:
    """The caller's id when it is short and harmless, else a fresh one."""
    if offered and _SANE.fullmatch(offered):
        return offered
    return new_correlation_id()


def current_or_new() -> str:
    return current.get() or new_correlation_id()
