"""A statement as a value: what to send, with what, and how to read what comes back.

A `Query` does nothing by itself. The sync and the async executor run the same
one, so no operation is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
