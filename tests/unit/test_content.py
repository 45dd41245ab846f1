"""Content has one identity."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.kernel.content import MAX_DEPTH, labelled_sha, payload_sha, why_unstorable


@given(st.text())
def test_it_is_the_lower_case_hex_sha256_of_the_utf8_text(text: str) -> None:
    sha = payload_sha(text)
    assert sha == hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert len(sha) == 64
    assert sha == sha.lower()


def test_nothing_is_normalised() -> None:
    """What differs in one byte is other content."""
    composed, decomposed = "\u00e9", "e\u0301"
    assert len({payload_sha(t) for t in ("a", "a ", "A", "a\n", composed, decomposed)}) == 6


def test_a_known_value() -> None:
    assert payload_sha("续租约") == "4b0bb1edd28baa023cb3534bcbedfaf582ac99a307731322b80027096e903bb6"
    assert payload_sha("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_form_for_people() -> None:
    assert labelled_sha(payload_sha("")).startswith("sha256:e3b0c44298fc1c14")


def nested(depth: int, value: Any = None) -> Any:
    for _ in range(depth):
        value = [value]
    return value


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x00")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc续"), inner),
)


@given(JSON)
def test_plain_json_can_be_kept(value: object) -> None:
    assert why_unstorable(value) is None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("a\x00b", "NUL"),
        ("\ud800", "surrogates"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (nested(MAX_DEPTH + 1), "deep"),
    ],
)
def test_what_postgresql_would_refuse_is_told(value: object, why: str) -> None:
    for wrapped in (value, [1, value], {"a": {"b": value}}):
        assert why in str(why_unstorable(wrapped))


@pytest.mark.parametrize("key", ["a\x00b", "\udfff"])
def test_keys_are_looked_at_too(key: str) -> None:
    assert why_unstorable({"fine": {key: 1}})


def test_a_value_far_too_deep_is_refused_without_descending() -> None:
    assert why_unstorable(nested(100_000)) == f"must be nested at most {MAX_DEPTH} deep"
