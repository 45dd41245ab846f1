"""Small values by namespace and key: watermarks and cursors, moved by compare-and-set."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, Row, any_row, rows, scalar
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "kv.sql")


class _Absent:
    """What a key that is not there has, as opposed to one whose value is null."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@primitive
def get_value(namespace: str, key: str, default: Any = None, config: Config | None = None) -> Query[Any]:
    def value(found: list[Row]) -> Any:
        return found[0]["value_json"] if found else default

    return Query(SQL["get"], value, {"namespace": namespace, "key": key})


@primitive
def put_value(namespace: str, key: str, value: Any, config: Config | None = None) -> Query[bool]:
    """Set a key, whatever it was."""
    return Query(SQL["put"], any_row, {"namespace": namespace, "key": key, "value": Jsonb(value)})


@primitive
def compare_and_set(
    namespace: str, key: str, expected: Any, value: Any, config: Config | None = None
) -> Query[bool]:
    """Move a key from `expected` (`ABSENT`: it must not be there) to `value`; False if it had another value."""
    params = {"namespace": namespace, "key": key, "value": Jsonb(value)}
    if expected is ABSENT:
        return Query(SQL["put_if_absent"], any_row, params)
    return Query(SQL["compare_and_set"], any_row, {**params, "expected": Jsonb(expected)})


@primitive
def beat(
    namespace: str, key: str, value: dict[str, Any], keep_seconds: float, config: Config | None = None
) -> Query[bool]:
    """Say that `key` is alive: `value` and, as `at`, the database's time. Old ones are removed."""
    params = {"namespace": namespace, "key": key, "value": Jsonb(value), "keep_seconds": keep_seconds}
    return Query(SQL["beat"], any_row, params)


@primitive
def seconds_since_beat(namespace: str, prefix: str = "", config: Config | None = None) -> Query[float | None]:
    """The age of the latest sign of life, by the database's clock; None: there was none."""
    return Query(SQL["seconds_since_beat"], scalar, {"namespace": namespace, "prefix": prefix})


@primitive
def delete_value(namespace: str, key: str, config: Config | None = None) -> Query[bool]:
    return Query(SQL["delete"], any_row, {"namespace": namespace, "key": key})


@primitive
def list_values(
    namespace: str, prefix: str = "", config: Config | None = None
) -> Query[list[dict[str, Any]]]:
    return Query(SQL["list"], rows, {"namespace": namespace, "prefix": prefix})
