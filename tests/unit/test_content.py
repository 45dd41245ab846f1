"""Content has one identity."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from engram.kernel.content import labelled_sha, payload_sha


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
