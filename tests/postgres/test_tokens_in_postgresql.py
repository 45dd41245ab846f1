"""Whatever is written, PostgreSQL takes the tokens of it and finds the text by them."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.embedded import EmbeddedPostgres
from engram.postgres.pool import connect
from engram.postgres.query import Row
from engram.search.tokens import MAX_TOKEN_LENGTH, MAX_TOKENS, any_of, tokenize, tsvector


@pytest.fixture(scope="module")
def connection(postgres_server: EmbeddedPostgres) -> Iterator[psycopg.Connection[Row]]:
    with connect(postgres_server.dsn("postgres")) as connection:
        yield connection


def taken(connection: psycopg.Connection[Row], tokens: list[str]) -> Row:
    row = connection.execute(
        "SELECT tsvector_to_array(%(vector)s::tsvector) AS words, length(%(vector)s::tsvector) AS length,"
        " %(vector)s::tsvector @@ %(asked)s::tsquery AS found",
        {"vector": tsvector(tokens), "asked": any_of(tokens)},
    ).fetchone()
    assert row
    return row


TEXTS = st.one_of(
    st.text(max_size=200),
    st.text(st.characters(min_codepoint=0x3000, max_codepoint=0xFFEF, codec="utf-8"), max_size=60),
    st.text("ab '\\\":,|&!()<->*\t\n\x00_éß续租", max_size=60),
)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_any_text_is_taken_and_found_by_itself(connection: psycopg.Connection[Row], text: str) -> None:
    tokens = tokenize(text)
    row = taken(connection, tokens)
    assert set(row["words"]) == set(tokens)
    assert row["found"] == bool(tokens)


@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_any_one_of_its_words_finds_it(connection: psycopg.Connection[Row], text: str) -> None:
    tokens = tokenize(text)
    for token in tokens[:5]:
        row = connection.execute(
            "SELECT %s::tsvector @@ %s::tsquery AS found", [tsvector(tokens), any_of([token])]
        ).fetchone()
        assert row == {"found": True}


def test_every_character_that_can_be_a_token_is_taken(connection: psycopg.Connection[Row]) -> None:
    found = (tokenize(chr(n)) for n in range(0x110000) if not 0xD800 <= n <= 0xDFFF)
    every = list(dict.fromkeys(token for tokens in found for token in tokens))
    for start in range(0, len(every), MAX_TOKENS):
        part = every[start : start + MAX_TOKENS]
        row = taken(connection, part)
        assert set(row["words"]) == set(part)
        assert row["found"]


@pytest.mark.parametrize("word", ["w{}", "租{}", "{}"])
def test_as_many_short_words_as_there_may_be(connection: psycopg.Connection[Row], word: str) -> None:
    tokens = [word.format(n) for n in range(MAX_TOKENS)]
    row = taken(connection, tokens)
    assert row["length"] == MAX_TOKENS
    assert row["found"]


@pytest.mark.parametrize("character", ["x", "é", "𝒳"])
def test_a_word_as_long_as_it_may_be(connection: psycopg.Connection[Row], character: str) -> None:
    tokens = tokenize(character * 1000)
    assert taken(connection, tokens)["words"] == [tokens[0]]
    assert len(tokens[0]) == MAX_TOKEN_LENGTH


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(" ".join(f"{n:064x}" for n in range(16_200)), id="a list of hashes"),
        pytest.param(
            " ".join("ﷲ" * 15 + f"{n:04d}" for n in range(9_999)), id="200,000 characters that grow"
        ),
    ],
)
def test_as_many_long_words_as_there_may_be(connection: psycopg.Connection[Row], text: str) -> None:
    vector = tsvector(tokenize(text))
    assert connection.execute("SELECT length(%s::tsvector) AS n", [vector]).fetchone()
