"""Memory cards: one layout, nothing left out silently, and the same words make the same card."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engram.gateway import cards
from engram.gateway.cards import Card, build_card, check_card, draft_card, keep_in, split_summary
from engram.gateway.pastes import MAX_LINES, blobs, pieces
from engram.kernel.errors import InputError
from engram.logbook.artifacts import LocalArtifacts
from engram.logbook.uri import build_attachment_evidence_uri, parse_uri, split_evidence_refs

LARGEST_ID = (1 << 63) - 1
DIFF = (
    "diff --git a/pay.py b/pay.py\nindex 83db48f..bf2a1cd 100644\n--- a/pay.py\n+++ b/pay.py\n"
    "@@ -1,9 +1,9 @@\n" + "".join(f" line {n}\n" for n in range(8)) + "-old\n+new\n"
)
TRACE = (
    "Traceback (most recent call last):\n"
    + "".join(f'  File "a.py", line {n}, in f\n    call({n})\n' for n in range(8))
    + "ValueError: no\n"
)
JAVA = (
    "java.lang.IllegalStateException: no\n"
    + "\tat com.acme.Pay.run(Pay.java:1)\n" * 15
    + "Caused by: x\n\t... 12 more\n"
)
LOG = "".join(f"2026-01-30 10:00:{n:02d} INFO paid invoice {n}\n" for n in range(20))
CODE = "".join(f"x{n} = {n}\n" for n in range(20))
PROSE = "Deploys go out on Tuesdays, because the ledger is closed on Mondays. " * 5


def fenced(content: str, info: str = "") -> str:
    return f"```{info}\n{content}```\n"


@pytest.fixture
def artifacts(tmp_path: Path) -> LocalArtifacts:
    return LocalArtifacts(tmp_path / "artifacts")


def kept(artifacts: LocalArtifacts, key: str) -> str:
    with artifacts.open(key) as reader:
        return reader.read().decode()


def placed(draft: cards.CardDraft) -> Card:
    """Finished as if every block were the attachment with the longest URI."""
    return draft.finish({b.sha256: build_attachment_evidence_uri(LARGEST_ID, b.sha256) for b in draft.blobs})


def test_the_layout() -> None:
    card = build_card(
        "pitfall",
        "Retries",
        "Do not retry a 422.",
        module="payments/ledger",
        details="It kills the row.",
        steps=["Look.", "Wait.\nThen look again."],
        evidence=["mr://project/123", "mr://project/123"],
        tags=["retries", "outbox"],
    )
    assert card.payload_md == (
        "# Retries\n\n"
        "- Kind: PITFALL\n- Module: payments/ledger\n- Tags: retries, outbox\n\n"
        "Do not retry a 422.\n\n"
        "## Details\n\nIt kills the row.\n\n"
        "## Steps\n\n1. Look.\n2. Wait.\n   Then look again.\n\n"
        "## Evidence\n\n- mr://project/123\n"
    )
    assert (card.kind, card.evidence_refs, card.trimmed) == ("PITFALL", ["mr://project/123"], [])
    assert card.meta_json == {
        "title": "Retries", "module": "payments/ledger", "tags": ["retries", "outbox"],
    }  # fmt: skip


def test_what_is_not_given_is_not_there() -> None:
    card = build_card("FACT", "Deploys", "On Tuesdays.")
    assert card.payload_md == "# Deploys\n\n- Kind: FACT\n\nOn Tuesdays.\n"
    assert card.meta_json == {"title": "Deploys"}


@pytest.mark.parametrize(
    ("pasted", "kind", "content"),
    [
        (fenced(DIFF, "diff"), "diff", DIFF),
        (fenced(DIFF), "diff", DIFF),
        (DIFF, "diff", DIFF),
        (DIFF.replace("\n", "\r\n"), "diff", DIFF.replace("\n", "\r\n")),
        (TRACE, "trace", TRACE),
        (JAVA, "trace", JAVA),
        (fenced(TRACE, "text"), "trace", TRACE),
        (LOG, "log", LOG),
        (fenced(LOG, "log"), "log", LOG),
        ("~~~~\n" + LOG + "~~~~\n", "log", LOG),
        (fenced(CODE, "python"), "code", CODE),
        (fenced("x" * 1300 + "\n"), "code", "x" * 1300 + "\n"),
        ("  ```\n" + "".join(f"  {line}\n" for line in CODE.splitlines()) + "  ```\n", "code", CODE),
    ],
)
def test_a_long_block_becomes_a_pointer_and_its_bytes_are_kept(
    artifacts: LocalArtifacts, pasted: str, kind: str, content: str
) -> None:
    card = build_card("PITFALL", "T", f"Before it.\n\n{pasted}\nAfter it.", artifacts=artifacts)
    (moved,) = card.trimmed
    assert (moved.kind, moved.lines, moved.size_bytes) == (
        kind,
        len(content.splitlines()),
        len(content.encode()),
    )
    assert kept(artifacts, moved.where) == content
    (line,) = [line for line in card.payload_md.splitlines() if line.startswith(">")]
    assert line == (
        f"> [{kind}] {moved.lines} lines, {moved.size_bytes} bytes, sha256:{moved.sha256}: {moved.where}"
    )
    assert "Before it." in card.payload_md
    assert "After it." in card.payload_md
    assert card.evidence_refs == [moved.where]


def test_a_fence_that_is_never_closed_holds_the_rest() -> None:
    (blob,) = blobs("Before.\n```python\n" + CODE)
    assert blob.content == CODE


@pytest.mark.parametrize(
    "text",
    [
        fenced("make up\nmake test\n", "console"),
        "".join(LOG.splitlines(keepends=True)[:MAX_LINES]),
        "- one\n" * 30,
        "".join(f"{n}. step\n" for n in range(1, 30)),
        "a paragraph\n\n" * 30,
        "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 20,
        "ERROR handling is done in three places:\n" + "  and a long explanation of each\n" * 20,
        "    indented\n" * 30,
        "--- \n" * 30,
        "WARNING " + "words " * 300,
        "@@ -1,2 +1,2 @@\n a\n-b\n+c\n" + "- a list after the hunk\n" * 20,
    ],
)
def test_what_only_looks_like_a_paste_stays(text: str) -> None:
    assert blobs(text) == []


def test_a_list_after_a_diff_is_not_taken_for_it() -> None:
    (blob,) = blobs(DIFF + "- one\n- two\n+ three\n")
    assert blob.content == DIFF


def test_several_files_in_one_diff_are_one_block() -> None:
    assert [blob.content for blob in blobs(f"{DIFF}\n{DIFF}")] == [f"{DIFF}\n{DIFF}"]


def test_the_same_block_twice_is_kept_once(artifacts: LocalArtifacts) -> None:
    card = build_card("FACT", "T", f"one\n\n{LOG}", details=f"again\n\n{LOG}", artifacts=artifacts)
    assert len(card.trimmed) == 1
    assert card.payload_md.count(card.trimmed[0].where) == 2


def test_a_recorded_block_is_named_by_its_attachment(artifacts: LocalArtifacts) -> None:
    recorded = []

    def record(blob, artifact) -> int:
        recorded.append((blob.kind, artifact.key))
        return 7

    card = build_card("FACT", "T", LOG, artifacts=artifacts, record=record)
    (moved,) = card.trimmed
    assert moved.where == f"memory://attachments/7/{moved.sha256}"
    assert recorded == [("log", f"blobs/{moved.sha256[:2]}/{moved.sha256}")]
    assert card.evidence_refs == [moved.where]


def test_a_text_that_is_too_long_is_cut_where_one_can_see_it(artifacts: LocalArtifacts) -> None:
    long = "".join(f"Sentence {n} of a long story. " for n in range(500))
    card = build_card("FACT", "T", "Short.", details=long, artifacts=artifacts)
    (moved,) = card.trimmed
    assert kept(artifacts, moved.where) == long
    shown = card.payload_md.partition("## Details\n\n")[2].partition("\n\n> [cut]")[0]
    assert shown
    assert long.startswith(shown)
    said = re.search(r"> \[cut\] (\d+) characters left out; the whole is .*: (\S+)\n", card.payload_md)
    assert said
    assert int(said[1]) == pytest.approx(len(long) - len(shown), abs=1)
    assert said[2] == moved.where


def test_without_a_store_nothing_is_left_out() -> None:
    card = build_card("FACT", "T", PROSE + "\n\n" + LOG, details=CODE * 50)
    assert LOG.strip() in card.payload_md
    assert (CODE * 50).strip() in card.payload_md
    assert card.trimmed == []
    assert "too_long" in {problem.name for problem in check_card(card.payload_md, "FACT")}


def test_more_evidence_than_there_is_room_for_is_counted() -> None:
    refs = [f"mr://project/{n}/{'x' * 50}" for n in range(30)]
    card = build_card("FACT", "T", "S", evidence=refs)
    shown = re.findall(r"^- (mr://\S+)$", card.payload_md, re.M)
    assert shown == refs[: len(shown)]
    assert f"- and {30 - len(shown)} more, in evidence_refs\n" in card.payload_md
    assert card.evidence_refs == refs


def test_a_block_inside_a_step_is_found(artifacts: LocalArtifacts) -> None:
    card = build_card(
        "PROCEDURE", "T", "S", steps=["Run:\n" + fenced(CODE), fenced("ls\n")], artifacts=artifacts
    )
    (moved,) = card.trimmed
    assert kept(artifacts, moved.where) == CODE
    assert "2.\n   ```\n   ls\n   ```" in card.payload_md


def test_an_open_fence_does_not_swallow_the_rest_of_the_card(artifacts: LocalArtifacts) -> None:
    card = build_card("FACT", "T", "See:\n```\nls", details="More.", artifacts=artifacts)
    assert "```\nls\n```\n\n## Details" in card.payload_md


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("kind", {"kind": "RUMOUR"}),
        ("title", {"title": ""}),
        ("title", {"title": "two\nlines"}),
        ("title", {"title": "x" * 121}),
        ("title", {"title": "\ud800"}),
        ("summary", {"summary": " \n"}),
        ("summary", {"summary": "a\x00b"}),
        ("summary", {"summary": "\ud800"}),
        ("module", {"module": ""}),
        ("module", {"module": "a\nb"}),
        ("tags", {"tags": ["a,b"]}),
        ("tags", {"tags": ["a b"]}),
        ("tags", {"tags": [str(n) for n in range(11)]}),
        ("steps", {"steps": ["one", " "]}),
        ("steps", {"steps": ["x"] * 51}),
        ("evidence", {"evidence": ["mr://a/1"] * 51}),
        ("evidence_refs", {"evidence": ["memory://nonsense"]}),
        ("details", {"details": "x" * 100_000_000}),
        ("details", {"details": "a\n" * 1_000_000}),
        ("summary", {"summary": "x" * 100_000_000}),
        ("steps", {"steps": ["x" * 3_000_000, "y" * 3_000_000]}),
    ],
)
def test_what_is_no_card_is_refused_by_field(field: str, given: dict) -> None:
    asked = {"kind": "FACT", "title": "T", "summary": "S", **given}
    with pytest.raises(InputError) as refused:
        draft_card(**asked)
    assert field in refused.value.context["fields"]


HOSTILE = {
    "short lines": "a\n" * 100_000,
    "no lines": "x" * 4_000_000,
    "an open fence": "```" + "x" * 4_000_000,
    "many fences": "```\na\n```\n" * 33_000,
    "many long fences": ("```\n" + "a\n" * 13 + "```\n") * 6_000,
    "many hunks": "@@ -1 +1 @@\n" * 100_000,
    "a hunk without end": "@@ -1,999999999 +1,999999999 @@\n" + " x\n" * 90_000,
    "half a diff": "--- a\n" * 100_000,
    "half a log": "ERROR: x\n  y\n  z\n\n" * 25_000,
    "tildes": ("~" * 299 + "x\n") * 13_000,
    "spaces": (" " * 299 + "x\n") * 13_000,
    "dots": ("a." * 149 + "\n") * 13_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_largest_hostile_text_takes_seconds_not_minutes(name: str) -> None:
    started = time.process_time()
    card = placed(draft_card("FACT", "T", "S", details=HOSTILE[name]))
    assert check_card(HOSTILE[name], "FACT")
    assert time.process_time() - started < 20, "it grows faster than its input"
    assert len(card.payload_md) <= cards.MAX_CARD


def test_split_summary() -> None:
    assert split_summary("First.\n\nThen.\n\nLast.\n") == ("First.", "Then.\n\nLast.")
    assert split_summary("Only.") == ("Only.", None)
    assert split_summary("```\na\n\nb\n```\n\nThen.") == ("```\na\n\nb\n```\n\nThen.", None)


def test_a_good_card_has_no_problems() -> None:
    card = build_card("PROCEDURE", "Deploys", PROSE * 5, steps=["Look.", "Deploy."])
    assert check_card(card.payload_md, "procedure") == []


@pytest.mark.parametrize(
    ("name", "payload", "kind"),
    [
        ("unknown_kind", "# T\n\n- Kind: RUMOUR\n\nS\n", "RUMOUR"),
        ("no_title", "- Kind: FACT\n\nS\n", "FACT"),
        ("no_title", "", "FACT"),
        ("no_kind", "# T\n\nS\n", "FACT"),
        ("no_kind", "# T\n\n- Kind: PITFALL\n\nS\n", "FACT"),
        ("no_summary", "# T\n\n- Kind: FACT\n\n## Evidence\n\n- mr://a/1\n", "FACT"),
        ("no_steps", "# T\n\n- Kind: PROCEDURE\n\nS\n", "PROCEDURE"),
        ("too_short", "# T\n\n- Kind: FACT\n\nS\n", "FACT"),
        ("too_long", "# T\n\n- Kind: FACT\n\n" + "word " * 700, "FACT"),
        ("too_long", "# T\n\n- Kind: FACT\n\n" + "周二部署。" * 200, "FACT"),
        ("pasted", f"# T\n\n- Kind: FACT\n\n{LOG}", "FACT"),
        ("not_a_card", "a\x00b", "FACT"),
        ("not_a_card", "x" * 100_000_000, "FACT"),
    ],
)
def test_what_a_card_lacks_is_named(name: str, payload: str, kind: str) -> None:
    assert name in {problem.name for problem in check_card(payload, kind)}


LINES = st.sampled_from(
    ["prose", "", "- item", "# heading", "```", "```diff", "~~~", "    code", "\ttab", "> quote", "x" * 400,
     "2026-01-30 10:00:00 INFO x", "ERROR: no", "Traceback (most recent call last):", '  File "a", line 1',
     "ValueError: x", "  at f(a.js:1)", "diff --git a/x b/x", "--- a/x", "+++ b/x", "@@ -1,3 +1,3 @@", "-old",
     "+new", " context", "周二部署", "\r", "1. step"]
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=200), st.lists(LINES, max_size=80).map("\n".join))


@given(TEXTS)
@example("```\n\n")
def test_no_character_is_lost_between_pieces(text: str) -> None:
    found = pieces(text)
    assert sum(piece.chars for piece in found) == len(text)
    assert all(piece.blob.content in text for piece in found if piece.blob)


def _storable(text: str) -> bool:
    return "\x00" not in text and not re.search("[\ud800-\udfff]", text)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(TEXTS.filter(lambda t: bool(t.strip()) and _storable(t)), TEXTS.filter(_storable))
def test_a_card_is_bounded_deterministic_and_says_where_everything_is(summary: str, details: str) -> None:
    card = placed(draft_card("FACT", "T", summary, details=details))
    assert placed(draft_card("FACT", "T", summary, details=details)) == card
    assert len(card.payload_md) <= cards.MAX_CARD
    assert all(moved.where in card.payload_md for moved in card.trimmed)
    assert card.payload_md.startswith("# T\n\n- Kind: FACT\n\n")
    split_evidence_refs(card.evidence_refs)
    assert all(parse_uri(ref) for ref in card.evidence_refs)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(TEXTS.filter(lambda t: bool(t.strip()) and _storable(t)))
def test_every_word_is_in_the_card_or_in_what_was_moved(summary: str) -> None:
    draft = draft_card("FACT", "T", summary)
    everything = placed(draft).payload_md + "".join(f" {blob.content} " for blob in draft.blobs)
    assert set(summary.split()) <= set(everything.split()) | {"```", "~~~", "```diff"}


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(TEXTS.filter(lambda t: bool(t.strip()) and _storable(t)))
def test_nothing_that_was_pasted_is_left_in_a_card_that_was_not_cut(summary: str) -> None:
    card = placed(draft_card("FACT", "T", summary))
    if "[cut]" not in card.payload_md:
        assert "pasted" not in {problem.name for problem in check_card(card.payload_md, "FACT")}


def test_keeping_is_the_callers(artifacts: LocalArtifacts) -> None:
    """The same draft, kept by an asynchronous server or by a script."""
    draft = draft_card("FACT", "T", LOG)
    keep = keep_in(artifacts)
    card = draft.finish({blob.sha256: keep(blob) for blob in draft.blobs})
    assert card == build_card("FACT", "T", LOG, artifacts=artifacts)
