"""What is pure about source control: addresses, rules, cards, git's log."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engram.gateway.cards import MAX_CARD, check_card
from engram.gateway.scm_cards import Rules, card_of, module_of, why_not
from engram.kernel.errors import InputError, SourceError, SourceRefused
from engram.scm.addresses import address
from engram.scm.git import read_log
from engram.scm.source import bulk_reason, second, text
from engram.scm.tries import Tries

HOSTILE = [
    "ext::sh -c touch% /tmp/x",
    "fd::17",
    "-upload-pack=touch x",
    "--help",
    "https://ada:secret@example.org/x.git",
    "https://token@example.org/x.git",
    "ssh://-oProxyCommand=x/y.git",
    "ftp://example.org/x.git",
    "https://example.org/x.git?a=b",
    "a\nb",
    "a\x00b",
    "",
    " x",
    "https:///x.git",
    "no-such-folder",
    "x" * 3000,
]


@pytest.mark.parametrize("given", HOSTILE)
@pytest.mark.parametrize("kind", ["git", "svn", "gitlab"])
def test_a_hostile_address_is_refused(given: str, kind: str) -> None:
    with pytest.raises(InputError) as refused:
        address(given, kind)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://example.org/x.git", ("git", "https://example.org/x.git")),
        ("git@example.org:team/x.git", ("git", "git@example.org:team/x.git")),
        ("ssh://git@example.org/x", ("git", "ssh://git@example.org/x")),
        ("svn://example.org/x/", ("svn", "svn://example.org/x")),
        ("https://gitlab.example.org/g/p", ("gitlab", "https://gitlab.example.org/g/p")),
    ],
)
def test_an_address_says_what_it_is(given: str, expected: tuple[str, str]) -> None:
    assert address(given) == expected


def test_a_folder_is_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "svn" / "db").mkdir(parents=True)
    (tmp_path / "svn" / "format").touch()
    monkeypatch.chdir(tmp_path)
    assert address(".") == ("git", str(tmp_path))
    assert address("svn") == ("svn", (tmp_path / "svn").as_uri())
    with pytest.raises(InputError, match="does not say what it is"):
        address("https://example.org/x")


def fact(**more: Any) -> dict[str, Any]:
    plain = {
        "source_type": "git",
        "source_id": "a" * 40,
        "message": "Say why\n\nBecause it matters.",
        "author_name": "Ada",
        "author_email": "ada@example.org",
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "paths_json": [{"path": "src/a.py"}],
        "files": 1,
        "bulk_reason": None,
        "superseded": False,
        "is_merge": False,
        "state": "merged",
        "web_url": None,
        "patch_uri": None,
    }
    return {**plain, **more}


@pytest.mark.parametrize(
    "odd",
    [
        {"message": ""},
        {"message": "\x1b[31mred\x07\u2028 \r\n\r\nbody\x0b"},
        {"message": "x" * 60_000},
        {"message": "s\n\n" + "word " * 20_000},
        {"message": "s\n\n" + "p\n\n" * 20_000},
        {"paths_json": [{"path": f"dir{n}/{'long' * 200}\n.py"} for n in range(1000)], "files": 5000},
        {"author_name": "", "at": None, "paths_json": []},
        {"author_name": "\x00\x1b" * 500},
        {"source_type": "svn", "source_id": "r7"},
        {"source_type": "mr", "source_id": "7", "web_url": "https://x.example/7"},
    ],
)
def test_any_fact_makes_a_card_that_fits(odd: dict[str, Any]) -> None:
    card = card_of(fact(**odd))
    assert len(card.payload_md) <= MAX_CARD
    assert not {problem.name for problem in check_card(card.payload_md, card.kind)} & {
        "not_a_card",
        "too_long",
    }
    assert card == card_of(fact(**odd))


def test_the_module_is_where_most_of_it_happened() -> None:
    paths = ["README.md", "src/a/b/c/d.py", "src/a/b/x.py", "tests/t.py"]
    assert module_of(fact(paths_json=[{"path": path} for path in paths])) == "src/a/b"
    assert module_of(fact(paths_json=[{"path": "README.md"}])) is None


def test_rules_decide_in_order_and_patterns_know_only_the_star() -> None:
    assert why_not(fact(), Rules()) is None
    assert why_not(fact(author_name="renovate"), Rules()) == "bot"
    assert why_not(fact(author_name="robert"), Rules()) is None
    assert why_not(fact(), Rules(only_paths=("docs/*",))) == "path"
    assert why_not(fact(), Rules(never_paths=("src/*",))) == "path"
    assert why_not(fact(paths_json=[]), Rules(only_paths=("docs/*",))) is None
    assert why_not(fact(state="opened"), Rules()) == "not merged"
    for wrong in ([], {"merges": 1}, {"bots": "x"}, {"bots": [""]}, {"never_paths": ["x"] * 101}):
        with pytest.raises(InputError):
            Rules.parse(wrong)


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
async def test_the_log_is_the_same_in_pieces_of_any_size(size: int) -> None:
    one = b"\x01" + b"\0".join([b"a" * 40, b"", b"A", b"a@b", b"1", b"C", b"c@d", b"2", b"said\n"])
    two = b"\x01" + b"\0".join([b"b" * 40, b"a" * 40, b"A", b"a@b", b"x", b"C", b"c@d", b"-5", b"\x01odd"])
    files = b"\n1\t2\tplain\0-\t-\tbinary\x000\t0\t\0\x01old\0\x01new\x003\t0\tends with a tab\t\0"
    log = one + b"\0\0" + files + two + b"\0\0"

    async def pieces():
        for at in range(0, len(log), size):
            yield log[at : at + size]

    first, last = [commit async for commit in read_log(pieces())]
    assert [path["path"] for path in first["paths"]] == ["plain", "binary", "\x01new", "ends with a tab\t"]
    assert first["paths"][2]["from"] == "\x01old"
    assert (first["additions"], first["deletions"], first["files"]) == (4, 2, 4)
    assert (last["authored"], last["committed"], last["message"]) == (None, 0, "\x01odd")


def test_text_and_dates_that_can_be_kept() -> None:
    assert text(b"a\x00\xff\xed\xa0\x80") == "a" + "\ufffd" * 5
    assert text("\ud800") == "?"
    assert len(text("x" * 100_000)) == 65_536
    assert second(b"99999999999999999999") == 253_402_300_799
    assert (bulk_reason(300, 20_000), bulk_reason(301, 0), bulk_reason(1, 20_001)) == (
        None,
        "301 files",
        "20001 lines",
    )


@pytest.mark.anyio
async def test_three_tries_and_a_refusal_is_none() -> None:
    tries = Tries(pause_ms=(1, 1))
    await tries.after(SourceError("one"))
    await tries.after(SourceError("two"))
    with pytest.raises(SourceError, match="three"):
        await tries.after(SourceError("three"))
    with pytest.raises(SourceRefused):
        await Tries().after(SourceRefused("no"))
    with pytest.raises(SourceError, match="later"):
        await Tries().after(SourceError("later", retry_after=121))
