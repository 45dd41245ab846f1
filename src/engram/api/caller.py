"""The caller of a request: written into its scope by authentication, read by routes and tools.

None means that nobody was recognised. Nothing is allowed then, so a route that
authentication did not cover can do nothing either.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from engram.gateway.callers import Caller

_KEY = "engram.caller"


def remember(scope: MutableMapping[str, Any], caller: Caller) -> None:
    scope[_KEY] = caller


def caller_of(scope: MutableMapping[str, Any]) -> Caller | None:
    found = scope.get(_KEY)
    return found if isinstance(found, Caller) else None
