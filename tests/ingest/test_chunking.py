"""Passages: everything is in one, none is too large, and the same blocks give the same ones."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.ingest.chunking import HEADING_SEPARATOR, MAX_BYTES, OVERLAP_BYTES, Block, Passage, passages
from engram.kernel.errors import DocumentRefused

WORDS = st.sampled_from(
    ["lease ", "row. ", "Größe ", "续租约要早。", "settle? ", "\n", "\n\n", "租" * 40, "x" * 700, "a|b\n"]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=60).map("".join)
PAGES = st.one_of(st.none(), st.integers(1, 3))
BLOCKS = st.lists(
    st.one_of(
        st.builds(
            Block,
            st.just("heading"),
            st.integers(1, 9),
            st.sampled_from(["One", "二", "Three\nlines"]),
            PAGES,
        ),
        st.builds(Block, st.sampled_from(["text", "table", "code"]), st.just(0), TEXTS, PAGES),
    ),
    max_size=12,
)


def bare(text: str) -> str:
    return "".join(text.split())


def fresh(found: list[Passage]) -> str:
    return bare("".join(passage.content[passage.overlap :] for passage in found))


@settings(max_examples=150, deadline=None)
@given(BLOCKS)
def test_everything_is_in_exactly_one_passage_and_none_is_too_large(blocks: list[Block]) -> None:
    found = passages(blocks)
    headings = {bare(block.text) for block in blocks if block.kind == "heading"}
    told = fresh([p for p in found if bare(p.content) not in headings])
    assert told == bare("".join(block.text for block in blocks if block.kind != "heading"))
    for passage in found:
        assert len(passage.content.encode()) <= MAX_BYTES
        assert len(passage.content[: passage.overlap].encode()) <= OVERLAP_BYTES
        assert bare(passage.content[passage.overlap :])
    assert [passage.ordinal for passage in found] == list(range(len(found)))
    assert found == passages(list(blocks))


@settings(max_examples=100, deadline=None)
@given(BLOCKS)
def test_every_heading_is_in_some_path(blocks: list[Block]) -> None:
    parts = {part for passage in passages(blocks) for part in passage.heading.split(HEADING_SEPARATOR)}
    assert {" ".join(b.text.split()) for b in blocks if b.kind == "heading"} <= parts


def test_a_passage_knows_its_place() -> None:
    found = passages(
        [
            Block("heading", 1, "Leases", 1),
            Block("text", 0, "Who holds a row.", 1),
            Block("heading", 2, "Renewal", 1),
            Block("text", 0, "Renew early.", 1),
            Block("text", 0, "On the next page.", 2),
            Block("heading", 1, "Outages", 2),
            Block("text", 0, "Not an attempt.", 2),
        ]
    )
    assert [(p.heading, p.page, p.content) for p in found] == [
        ("Leases", 1, "Who holds a row."),
        ("Leases › Renewal", 1, "Renew early."),
        ("Leases › Renewal", 2, "On the next page."),
        ("Outages", 2, "Not an attempt."),
    ]


def test_neighbours_overlap_by_whole_sentences() -> None:
    text = " ".join(f"This is sentence number {n} of the paragraph." for n in range(100))
    first, second, *_ = passages([Block("text", 0, text, None)])
    repeated = second.content[: second.overlap]
    assert repeated.startswith("This is sentence")
    assert first.content.endswith(repeated.strip())


def test_chinese_is_cut_after_its_sentences() -> None:
    text = "".join(f"这是第{n}句话，讲的是租约。" for n in range(200))
    found = passages([Block("text", 0, text, None)])
    assert len(found) > 3
    assert all(passage.content.endswith("。") for passage in found)


def test_each_part_of_a_table_says_what_its_columns_are() -> None:
    rows = "\n".join(["Item | Cost", *(f"Item number {n} | {n}" for n in range(200))])
    found = passages([Block("table", 0, rows, None)])
    assert len(found) > 1
    assert all(passage.content.startswith("Item | Cost\n") for passage in found)


@pytest.mark.parametrize("run", [".", "?!", "…", ".)", '."', "。", "a.", "\n", " .", ". ", ".\u00a0x"])
def test_no_run_of_any_sign_takes_long(run: str) -> None:
    """A worker that cuts a document renews its leases meanwhile, so it must have its turns."""
    for size in (25_000, 200_000):
        text = "Begin " + run * (size // len(run)) + "end"
        began = time.thread_time()
        found = passages([Block("text", 0, text, None)])
        assert time.thread_time() - began < 4
        assert fresh(found) == bare(text)


def test_a_document_of_headings_over_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.ingest.chunking.MAX_PASSAGES", 50)
    headings = [Block("heading", 1, f"Part {n}", None) for n in range(51)]
    assert len(passages(headings[:50])) == 50
    with pytest.raises(DocumentRefused, match="more than 50 passages"):
        passages(headings)


def test_an_ellipsis_or_a_quote_ends_a_sentence_once() -> None:
    says = 'He waited... "Really?!" she said. '
    found = passages([Block("text", 0, says * 60, None)])
    assert len(found) > 1
    assert all(passage.content.endswith(("...", '?!"', "said.")) for passage in found)
