"""Text into tokens: the same on the stored and the asking side, whatever the script."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.search.tokens import MAX_TOKEN_LENGTH, MAX_TOKENS, any_of, tokenize, tsvector


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        (" \t\n.,;!?'\"\\()[]{}<>|&:*", []),
        ("Renew the Lease", ["renew", "the", "lease"]),
        ("lease_token", ["lease", "token"]),
        ("don't", ["don", "t"]),
        ("v2.10 HTTP/1.1", ["v2", "10", "http", "1", "1"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("Ёлка и мир", ["ёлка", "и", "мир"]),
        ("café", ["café"]),
        ("cafe\u0301", ["café"]),
        ("ＡＢＣ １２３", ["abc", "123"]),
        ("ﬁle ①", ["file", "1"]),
        ("x² µm", ["x2", "μm"]),
    ],
)
def test_spaced_scripts_give_words(text: str, tokens: list[str]) -> None:
    assert tokenize(text) == tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("续", ["续"]),
        ("续租", ["续租"]),
        ("续租约", ["续租", "租约"]),
        ("续租，约定", ["续租", "约定"]),
        ("ひらがな", ["ひら", "らが", "がな"]),
        ("カタカナ", ["カタ", "タカ", "カナ"]),
        ("ｶﾀｶﾅ", ["カタ", "タカ", "カナ"]),
        ("한국어", ["한국", "국어"]),
        ("\u1112\u1161\u11ab\u1100\u116e\u11a8", ["한국"]),
        ("𠮷野家", ["𠮷野", "野家"]),
        ("用PostgreSQL存储", ["用", "postgresql", "存储"]),
        ("第3章", ["第", "3", "章"]),
        ("\uf900\uf901", ["豈更"]),
    ],
)
def test_unspaced_scripts_give_bigrams(text: str, tokens: list[str]) -> None:
    assert tokenize(text) == tokens


def test_any_two_neighbours_of_a_sentence_are_found() -> None:
    sentence = "租约过期后由其他工作者接管"
    stored = set(tokenize(sentence))
    for start in range(len(sentence) - 1):
        assert set(tokenize(sentence[start : start + 2])) <= stored


def test_a_word_is_cut_and_the_number_of_tokens_bounded() -> None:
    assert tokenize("x" * 1000) == ["x" * MAX_TOKEN_LENGTH]
    assert len(tokenize("a " * (MAX_TOKENS + 10))) == MAX_TOKENS
    assert len(tokenize("租" * (MAX_TOKENS * 2))) == MAX_TOKENS


@given(st.text())
def test_tokens_are_bounded_and_hold_only_word_characters(text: str) -> None:
    for token in tokenize(text):
        assert 1 <= len(token) <= MAX_TOKEN_LENGTH
        assert not set(token) & set("'\\ \t\n\r\x00_|&!():*<>")


@pytest.mark.parametrize("text", ["Größe", "ЛЕС", "ΣΊΣΥΦΟΣ", "ÉTÉ", "ǅ", "ﬀ"])
def test_case_and_composition_make_no_difference(text: str) -> None:
    forms = {tuple(tokenize(form)) for form in (text, text.upper(), text.lower(), text.casefold())}
    forms |= {tuple(tokenize(unicodedata.normalize(form, text))) for form in ("NFC", "NFD", "NFKC", "NFKD")}
    assert len(forms) == 1


def test_case_makes_no_difference_to_letters_that_casefold_decomposes() -> None:
    assert tokenize("ταΐζω") == tokenize("ταΐζω".upper())


def test_a_word_written_with_combining_marks_is_one_token() -> None:
    assert len(tokenize("हिन्दी")) == 1


@given(st.text())
def test_tokenizing_tokens_changes_nothing(text: str) -> None:
    assert tokenize(" ".join(tokenize(text))) == tokenize(text)


def test_a_vector_lists_each_word_with_its_places() -> None:
    assert tsvector(tokenize("the lease of the row")) == "'the':1,4 'lease':2 'of':3 'row':5"
    assert tsvector([]) == ""


def test_places_are_few_and_within_what_postgresql_can_count() -> None:
    assert tsvector(["a"] * 100) == "'a':" + ",".join(map(str, range(1, 17)))
    assert tsvector([f"w{n}" for n in range(16_390)]).endswith("'w16389':16383")


def test_a_question_names_each_word_once() -> None:
    assert any_of(tokenize("Lease lease token")) == "'lease' | 'token'"
    assert any_of([]) == ""
