"""Spans of time as people write them: `90s`, `15m`, `24h`, `7d`, `2w`."""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SPAN = re.compile(r"(?P<number>[0-9]{1,9})(?P<unit>[smhdw])")
MOST_SECONDS = 100 * 366 * 86_400


def seconds_of(text: str) -> int:
    """
    >>> seconds_of("24h")
    86400
    """
    match = _SPAN.fullmatch(text.strip())
    seconds = int(match["number"]) * _SECONDS[match["unit"]] if match else 0
    if not match or seconds > MOST_SECONDS:
        raise ValueError("must be a number and s, m, h, d or w, at most 100 years: e.g. 24h or 7d")
    return seconds
