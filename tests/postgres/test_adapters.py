"""Arrays written by hand say the same as arrays written by the driver; so does JSON read by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import Connection

from engram.embedded import EmbeddedPostgres
from engram.postgres.arrays import numbers, texts
from engram.postgres.pool import connect

storable = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@pytest.fixture(scope="module")
def connection(postgres_server: EmbeddedPostgres) -> Iterator[Connection]:
    with connect(postgres_server.dsn()) as connection:
        yield connection


def answered(connection: Connection, cast: str, given: str) -> list:
    found = connection.execute(f"SELECT %s::{cast} AS value".encode(), [given]).fetchone()
    assert found is not None
    return found["value"]


@given(asked=st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_numbers_arrive_as_they_are(connection: Connection, asked: list[int | None]) -> None:
    assert answered(connection, "bigint[]", numbers(asked)) == asked


@given(asked=st.lists(st.none() | storable | st.sampled_from(["NULL", "", "{}", ",", '"', "\\", "a b"])))
def test_texts_arrive_as_they_are(connection: Connection, asked: list[str | None]) -> None:
    assert answered(connection, "text[]", texts(asked)) == asked


@pytest.mark.parametrize("wrong", ["1,2", 1.5, object()])
def test_what_is_no_whole_number_is_refused(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        numbers([wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["json", "jsonb"])
@pytest.mark.parametrize("written", ["{}", " {} ", "[]", '{"a": {}}', "null", '"{}"', "1.5"])
def test_json_is_read_as_it_was_written(connection: Connection, kind: str, written: str) -> None:
    assert answered(connection, kind, written) == json.loads(written)


def test_an_empty_object_is_nobody_elses(connection: Connection) -> None:
    first, second = (answered(connection, "jsonb", "{}") for _ in range(2))
    first["mine"] = 1
    assert second == {}
