"""A statement as a value: what to send, with what, and how to read what comes back.

A `Query` does nothing by itself. The sync and the async executor run the same
one, so no operation is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Row = dict[str, Any]
Read = Callable[[list[Row]], T]


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL with the name it has in its file, e.g. `outbox.claim`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Query(Generic[T]):
    statement: Statement
    read: Read[T]
    params: Mapping[str, Any] = field(default_factory=dict)


def rows(found: list[Row]) -> list[Row]:
    return found


def maybe_row(found: list[Row]) -> Row | None:
    return found[0] if found else None


def one_row(found: list[Row]) -> Row:
    (row,) = found
    return row


def any_row(found: list[Row]) -> bool:
    """For guarded updates: did it apply? Zero rows is an answer, not an error."""
    return bool(found)


def scalar(found: list[Row]) -> Any:
    (row,) = found
    (value,) = row.values()
    return value


def nothing(found: list[Row]) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Both:
    """What two steps in one statement came to; the second is taken only if the first applied."""

    first: bool
    second: bool


def both(first: Query[Any], second: Query[Any]) -> Query[Both]:
    """One statement of two guarded updates: each says by a row whether it applied."""
    params = {**{f"first_{name}": value for name, value in first.params.items()}, **second.params}
    return Query(_joined(first.statement, second.statement), lambda found: Both(**found[0]), params)


_PARAMETER = re.compile(r"%\((\w+)\)s")


@lru_cache
def _joined(first: Statement, second: Statement) -> Statement:
    named = _PARAMETER.sub(r"%(first_\1)s", first.text.rstrip(";"))
    head, returning, tail = second.text.rstrip(";").rpartition("\nRETURNING ")
    if not (head.startswith("UPDATE ") and named.startswith("UPDATE ") and "\nRETURNING " in named):
        raise ValueError(f"{first.name} and {second.name} are not two updates that say whether they applied")
    steps = f"WITH first AS (\n{named}\n), second AS (\n{head}\nAND EXISTS (SELECT FROM first){returning}{tail}\n)"
    # Both come from engram's own files; what a caller says is in the parameters.
    text = f"{steps}\nSELECT EXISTS (SELECT FROM first) AS first, EXISTS (SELECT FROM second) AS second;"  # noqa: S608
    return Statement(f"{first.name}+{second.name}", text)
