"""Log lines: for people on a terminal, JSON elsewhere; never a secret in either.

A line is an event name with fields: `log.info("outbox.delivered",
extra=fields(outbox_id=7))`. The correlation id of the request in hand is added
by itself. Values that must not be seen are registered with `hide`, and what
looks like a credential is masked whether registered or not.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from engram.kernel import correlation

_MASK = "***"
_SECRET_NAMES = frozenset(
    {"authorization", "x-api-key", "api-key", "apikey", "password", "passwd", "token", "secret"}
)
_NAMED = r"(?:authorization|x-api-key|password|passwd|api[_-]?key|(?<![\w-])token|secret)"
# A value ends where its quote does; without one, at white space or punctuation.
_VALUE = r"""(?:"[^"]*"|'[^']*'|(?:(?:basic|bearer)\s+)?[^\s,;&}\])'"]+)"""
_CREDENTIALS = (
    re.compile(rf"(?i)({_NAMED}[\"']?\s*[:=]\s*){_VALUE}()"),
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{6,}()"),
    # A token of engram's own, whatever stands before it.
    re.compile(r"(engram_)[A-Za-z0-9_-]{43}()"),
)
_WORD = re.compile(r"\S+")
_USER = re.compile(r"://[^\s:/@]*:")
_hidden: set[str] = set()


def hide(value: str | None) -> None:
    """Never write this value, wherever it turns up."""
    if value and len(value) >= 4:
        _hidden.add(value)


def redact(text: str) -> str:
    # Longest first: a secret that begins like another must not uncover its rest.
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, _MASK)
    if "://" in text:
        text = _WORD.sub(_without_password, text)
    for pattern in _CREDENTIALS:
        text = pattern.sub(rf"\g<1>{_MASK}\g<2>", text)
    return text


def _without_password(word: re.Match[str]) -> str:
    """An address without the password in it. By hand: one pattern for it would take quadratic time."""
    address = word[0]
    user, end = _USER.search(address), address.rfind("@")
    return f"{address[: user.end()]}{_MASK}{address[end:]}" if user and end > user.end() else address


def _redacted(value: Any) -> Any:
    """The value with its strings masked, before it is rendered: a mask never breaks JSON."""
    if isinstance(value, dict):
        return {str(k): _MASK if _is_secret(str(k), v) else _redacted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(v) for v in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redact(str(value))


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and name.lower().replace("_", "-") in _SECRET_NAMES


def fields(**values: Any) -> dict[str, Any]:
    return {"fields": values}


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = dict(getattr(record, "fields", {}))
    correlation_id = correlation.current.get()
    if correlation_id:
        found.setdefault("correlation_id", correlation_id)
    return found


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(_redacted(line), ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        told = " ".join(f"{k}={v}" for k, v in _redacted(_fields_of(record)).items())
        line = f"{clock} {record.levelname.lower():<7} {record.getMessage()} {told}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return redact(line)


def configure(level: str = "info", style: str = "auto", stream: TextIO | None = None) -> None:
    """Set up logging for a process; called once, by the command line."""
    stream = stream or sys.stderr
    human = style == "human" or (style == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanFormatter() if human else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx2", "httpcore2", "httpx", "httpcore", "mcp", "uvicorn.access", "psycopg.pool"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
