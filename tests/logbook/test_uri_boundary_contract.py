"""The URI contract between gateway and logbook: signatures, returned fields, one owner, no surprises."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import engram
from engram.kernel.errors import ErrorCode, InputError
from engram.logbook import uri
from engram.logbook.uri import (
    MAX_LENGTH,
    ParsedUri,
    UriError,
    UriType,
    build_attachment_evidence_uri,
    build_evidence_refs_json,
    build_evidence_uri,
    parse_artifact_key,
    parse_attachment_evidence_uri,
    parse_content_key,
    parse_evidence_uri,
    parse_uri,
    sha256_of_key,
    split_evidence_refs,
    validate_evidence_ref,
)

SHA = "0123456789abcdef" * 4
PATCH = f"memory://patch_blobs/git/1:abc123/{SHA}"
ATTACHMENT = f"memory://attachments/12345/{SHA}"
KEY = f"scm/payments/1/git/abc123/{SHA}.diff"
PATCH_ENTRY = {"artifact_uri": PATCH, "source_type": "git", "source_id": "1:abc123", "sha256": SHA}
ATTACHMENT_ENTRY = {"artifact_uri": ATTACHMENT, "attachment_id": 12345, "sha256": SHA}

# Any text at all, and text that looks like what is parsed.
ANYTHING = st.text(st.characters(exclude_categories=()), max_size=200)
WORDS = f"memory:// patch_blobs attachments scm blobs git 1 12345 0 01 -1 {SHA} {SHA[:2]} {SHA}.diff"
MARKS = "file:// s3:// https:// mr:// / // . .. %2e %2F %00 % : ? # @ [ ] \\ é \ud800"
PIECES = st.sampled_from([*WORDS.split(), *MARKS.split(), " ", "\n", "\x00", str(1 << 63)])
NEARLY = st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join)
TEXTS = ANYTHING | NEARLY
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NEARLY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NEARLY, inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["artifact_uri", "sha256", "source_type", "source_id", "attachment_id", "size_bytes", "kind", "note"]
CHANGES = st.dictionaries(
    st.sampled_from(FIELDS), st.sampled_from([PATCH, ATTACHMENT, SHA, "git", 12345]) | JSON, max_size=2
)
ENTRIES = st.builds(
    lambda whole, changed: {**whole, **changed},
    st.sampled_from([PATCH_ENTRY, ATTACHMENT_ENTRY, {"artifact_uri": PATCH}, {}]),
    CHANGES,
)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("parse_uri", ["uri"]),
        ("build_evidence_uri", ["source_type", "source_id", "sha256"]),
        ("parse_evidence_uri", ["evidence_uri"]),
        ("build_attachment_evidence_uri", ["attachment_id", "sha256"]),
        ("parse_attachment_evidence_uri", ["evidence_uri"]),
        ("build_evidence_refs_json", ["patches", "attachments", "extra"]),
        ("validate_evidence_ref", ["ref"]),
    ],
)
def test_the_specifications_signatures(function: str, arguments: list[str]) -> None:
    parameters = inspect.signature(getattr(uri, function)).parameters.values()
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == arguments
    assert all(p.default is not p.empty for p in parameters if p not in positional), "all more is optional"


def test_the_fields_that_parsers_return() -> None:
    assert parse_evidence_uri(PATCH) == {"source_type": "git", "source_id": "1:abc123", "sha256": SHA}
    assert parse_attachment_evidence_uri(ATTACHMENT) == {"attachment_id": 12345, "sha256": SHA}
    assert parse_artifact_key(KEY) == {
        "project_key": "payments",
        "repo_id": 1,
        "source_type": "git",
        "rev_or_sha": "abc123",
        "sha256": SHA,
        "ext": "diff",
    }
    assert parse_content_key(f"blobs/01/{SHA}") == {"sha256": SHA}


def test_a_parsed_uri_says_scheme_path_and_type() -> None:
    parsed = parse_uri(PATCH)
    assert isinstance(parsed, ParsedUri)
    assert (parsed.uri, parsed.scheme, parsed.type) == (PATCH, "memory", UriType.PATCH_EVIDENCE)
    assert parsed.path == f"patch_blobs/git/1:abc123/{SHA}"
    assert parsed.parts == parse_evidence_uri(PATCH)
    assert hash(parsed) == hash(parse_uri(PATCH))


def test_the_names_of_the_types_are_stable() -> None:
    assert [kind.value for kind in UriType] == [
        "artifact_key",
        "content_key",
        "patch_evidence",
        "attachment_evidence",
        "physical",
        "external",
    ]


def test_a_uri_error_is_the_callers_error() -> None:
    with pytest.raises(UriError) as refused:
        parse_uri("memory://elsewhere/1")
    assert isinstance(refused.value, InputError)
    assert (refused.value.code, refused.value.http_status) == (ErrorCode.INVALID_ARGUMENT, 400)


def test_each_parser_takes_its_own_kind_only() -> None:
    for text in (ATTACHMENT, KEY, "mr://project/123", ""):
        assert parse_evidence_uri(text) is None
    for text in (PATCH, KEY, "mr://project/123", ""):
        assert parse_attachment_evidence_uri(text) is None
    for text in (PATCH, ATTACHMENT, f"blobs/01/{SHA}"):
        assert parse_artifact_key(text) is None


def test_the_module_documents_the_grammar_and_its_examples_are_true() -> None:
    grammar = uri.__doc__ or ""
    for rule in (
        '"memory://patch_blobs/" source-type "/" source-id "/" sha256',
        '"memory://attachments/" attachment-id "/" sha256',
        '"scm/" project-key "/" repo-id "/" source-type "/" rev-or-sha "/" sha256 "." ext',
    ):
        assert rule in grammar
    shown = [word for word in grammar.split() if word.endswith(("/<sha256>", "/<sha256>.diff", "/123"))]
    assert len(shown) == 6
    for example_uri in shown:
        sha = SHA.replace("01", "e3", 1)
        assert parse_uri(example_uri.replace("<sha256>", sha)).type in UriType
    assert doctest.testmod(uri).failed == 0


def test_only_the_logbook_knows_how_evidence_is_spelled() -> None:
    """A `memory://` or key template elsewhere is a second grammar."""
    owner = Path(uri.__file__)
    spelled: dict[str, list[str]] = {}
    for path in Path(engram.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        found = [t for t in texts if t.startswith(("memory://", "scm/", "blobs/"))]
        if found and path != owner:
            spelled[str(path)] = found
    assert spelled == {}


def test_the_grammar_asks_nobody() -> None:
    """It is pure: standard text tools and the kernel."""
    imported = {
        name
        for node in ast.walk(ast.parse(Path(uri.__file__).read_text("utf-8")))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    ours = {name for name in imported if name.startswith("engram")}
    assert ours == {"engram.kernel.content", "engram.kernel.errors"}
    assert not imported & {"os", "pathlib", "urllib.request", "socket", "io"}


@settings(max_examples=400, deadline=None)
@given(TEXTS)
@example("memory://")
@example("://")
@example("http://[")
@example("http://[::1/x")
@example("memory://attachments/" + "9" * 5000 + "/" + SHA)
@example("٣")
@example("memory://attachments/٣/" + SHA)
def test_on_any_text_the_parsers_answer_or_refuse(text: str) -> None:
    answers = [
        parse_evidence_uri(text),
        parse_attachment_evidence_uri(text),
        parse_artifact_key(text),
        parse_content_key(text),
    ]
    try:
        parsed = parse_uri(text)
    except UriError as refused:
        str(refused).encode("ascii")
        assert answers == [None] * 4
    else:
        assert parsed.uri == text
        assert sum(answer is not None for answer in answers) == (
            parsed.type not in (UriType.PHYSICAL, UriType.EXTERNAL)
        )


@settings(max_examples=200, deadline=None)
@given(JSON)
@example(b"memory://attachments/1/" + SHA.encode())
@example(10**5000)
def test_what_is_not_text_is_refused_not_crashed_on(value: Any) -> None:
    if isinstance(value, str):
        return
    assert parse_evidence_uri(value) is None
    assert parse_attachment_evidence_uri(value) is None
    assert parse_artifact_key(value) is None
    for act in (
        parse_uri,
        sha256_of_key,
        lambda v: build_evidence_uri(v, "x", SHA),
        lambda v: build_evidence_uri("git", v, SHA),
        lambda v: build_evidence_uri("git", "x", v),
        lambda v: build_attachment_evidence_uri(7, v),
        lambda v: split_evidence_refs([v]),
    ):
        with pytest.raises(UriError):
            act(value)


@settings(max_examples=300, deadline=None)
@given(JSON | ENTRIES)
@example({})
@example({"artifact_uri": None})
@example({**PATCH_ENTRY, "size_bytes": 10**5000})
@example({**PATCH_ENTRY, "kind": "\ud800"})
@example({**PATCH_ENTRY, "note": float("nan")})
@example([PATCH_ENTRY])
def test_validating_never_raises_and_says_why(value: Any) -> None:
    valid, why = validate_evidence_ref(value)
    assert (why is None) is valid
    if valid:
        json.dumps(value, allow_nan=False).encode()
        assert parse_evidence_uri(value["artifact_uri"]) or parse_attachment_evidence_uri(
            value["artifact_uri"]
        )
        assert value["sha256"] in value["artifact_uri"]
    else:
        assert why
        why.encode("ascii")


@settings(max_examples=200, deadline=None)
@given(st.lists(ENTRIES | JSON, max_size=2), st.lists(ENTRIES | JSON, max_size=2), CHANGES)
@example([PATCH_ENTRY], [ATTACHMENT_ENTRY], {"note": "x"})
def test_what_is_built_is_valid_or_refused(patches: list[Any], attachments: list[Any], extra: Any) -> None:
    try:
        refs = build_evidence_refs_json(patches, attachments, extra)
    except UriError:
        return
    entries = refs.get("patches", []) + refs.get("attachments", [])
    assert len(entries) == len(patches) + len(attachments)
    assert all(validate_evidence_ref(entry) == (True, None) for entry in entries)


@pytest.mark.parametrize("entry", [PATCH_ENTRY, ATTACHMENT_ENTRY])
def test_a_whole_entry_is_valid(entry: dict[str, Any]) -> None:
    assert validate_evidence_ref(entry) == (True, None)
    assert validate_evidence_ref({**entry, "size_bytes": 0, "kind": "diff"}) == (True, None)
    assert validate_evidence_ref({"artifact_uri": entry["artifact_uri"], "sha256": SHA}) == (True, None)
    assert validate_evidence_ref({**entry, "added_later": [1, {"a": None}]}) == (True, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"artifact_uri": None}, "artifact_uri"),
        ({"artifact_uri": KEY}, "artifact_uri"),
        ({"artifact_uri": "mr://project/123"}, "artifact_uri"),
        ({"artifact_uri": PATCH + "?v=1"}, "artifact_uri"),
        ({"sha256": "f" * 64}, "sha256"),
        ({"sha256": SHA.upper()}, "sha256"),
        ({"sha256": None}, "sha256"),
        ({"source_type": "svn"}, "source_type"),
        ({"source_id": "1:other"}, "source_id"),
        ({"attachment_id": 12345}, "attachment_id"),
        ({"size_bytes": -1}, "size_bytes"),
        ({"size_bytes": True}, "size_bytes"),
        ({"size_bytes": 1.0}, "size_bytes"),
        ({"size_bytes": 1 << 63}, "size_bytes"),
        ({"kind": ""}, "kind"),
        ({"kind": 1}, "kind"),
        ({"note": "a\x00b"}, "NUL"),
    ],
)
def test_an_entry_that_disagrees_with_itself_is_not(change: dict[str, Any], why: str) -> None:
    valid, said = validate_evidence_ref({**PATCH_ENTRY, **change})
    assert not valid
    assert why in (said or "")


def test_true_is_not_attachment_one() -> None:
    one = {"artifact_uri": build_attachment_evidence_uri(1, SHA), "sha256": SHA}
    assert validate_evidence_ref({**one, "attachment_id": 1}) == (True, None)
    assert not validate_evidence_ref({**one, "attachment_id": True})[0]
    assert not validate_evidence_ref({**one, "attachment_id": "1"})[0]


def test_an_entry_without_its_hash_is_not_valid() -> None:
    assert validate_evidence_ref({"artifact_uri": PATCH}) == (False, "sha256 is required")


def test_the_unified_object() -> None:
    refs = build_evidence_refs_json(
        [{"source_type": "git", "source_id": "1:abc123", "sha256": SHA, "size_bytes": 10, "kind": "diff"}],
        [{"artifact_uri": ATTACHMENT}],
        {"correlation_id": "corr-0123456789abcdef", "external_refs": ["mr://project/123"]},
        outbox_id=42,
    )
    assert refs == {
        "outbox_id": 42,
        "patches": [{**PATCH_ENTRY, "size_bytes": 10, "kind": "diff"}],
        "attachments": [ATTACHMENT_ENTRY],
        "extra": {"correlation_id": "corr-0123456789abcdef", "external_refs": ["mr://project/123"]},
    }
    json.dumps(refs)


def test_what_is_empty_is_left_out() -> None:
    assert build_evidence_refs_json(None, None, None) == {}
    assert build_evidence_refs_json([], [], {}) == {}
    assert build_evidence_refs_json(outbox_id=1) == {"outbox_id": 1}


def test_the_callers_objects_are_not_changed() -> None:
    patch, extra = {"artifact_uri": PATCH}, {"correlation_id": "corr-0123456789abcdef"}
    refs = build_evidence_refs_json([patch], None, extra)
    refs["extra"]["more"] = 1
    assert patch == {"artifact_uri": PATCH}
    assert extra == {"correlation_id": "corr-0123456789abcdef"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"extra": {"outbox_id": 1}},
        {"extra": {"artifact_uri": "mr://project/123"}},
        {"extra": {"note": "a\x00"}},
        {"extra": ["x"]},
        {"outbox_id": 0},
        {"outbox_id": "42"},
        {"outbox_id": True},
        {"patches": [PATCH]},
        {"patches": [{"artifact_uri": ATTACHMENT}]},
        {"patches": [{"artifact_uri": KEY, "sha256": SHA}]},
        {"patches": [{"artifact_uri": "mr://project/123", "sha256": SHA}]},
        {"patches": [{"artifact_uri": "", "source_type": "git", "source_id": "1:a", "sha256": SHA}]},
        {"patches": [{"source_type": "git", "sha256": SHA}]},
        {"patches": [{**PATCH_ENTRY, "sha256": "f" * 64}]},
        {"patches": [{**PATCH_ENTRY, "size_bytes": -1}]},
        {"attachments": [{"artifact_uri": PATCH}]},
        {"attachments": [{"attachment_id": "7", "sha256": SHA}]},
        {"attachments": [{"sha256": SHA}]},
    ],
)
def test_what_does_not_belong_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UriError):
        build_evidence_refs_json(**arguments)


def test_plain_references_are_told_apart() -> None:
    other = ["mr://project/123", "JIRA-7", KEY, "https://example.org/x?y#z", "C:\\logs\\run.txt", "会议纪要"]
    refs = [other[0], PATCH, *other[1:], ATTACHMENT, PATCH, other[0]]
    split = split_evidence_refs(refs)
    assert split == {
        "patches": [PATCH_ENTRY],
        "attachments": [ATTACHMENT_ENTRY],
        "extra": {"external_refs": other},
    }
    built = build_evidence_refs_json(**split)
    assert built == split
    assert "artifact_uri" not in json.dumps(built["extra"])


def test_no_references_are_no_evidence() -> None:
    assert split_evidence_refs([]) == {"patches": [], "attachments": [], "extra": {}}
    assert build_evidence_refs_json(**split_evidence_refs([])) == {}


@pytest.mark.parametrize(
    "ref",
    [
        "memory://",
        "memory:attachments",
        f"memory://attachments/0/{SHA}",
        f"memory://patch_blobs/git/1:abc/{SHA.upper()}",
        f"memory://documents/1/{SHA}",
        f"MEMORY://attachments/1/{SHA}",
        f" {PATCH}",
        f"{PATCH} ",
        f"{PATCH}#top",
    ],
)
def test_a_malformed_memory_reference_is_refused_by_name(ref: str) -> None:
    with pytest.raises(UriError) as refused:
        split_evidence_refs(["mr://project/123", ref])
    assert ref[:60] in refused.value.message
    assert "evidence_refs" in refused.value.context["fields"]


@pytest.mark.parametrize(
    "refs", [None, PATCH, [""], ["  "], ["a\x00"], ["a\nb"], ["\ud800"], ["x" * 2049], [7]]
)
def test_what_is_no_plain_text_is_no_reference(refs: Any) -> None:
    with pytest.raises(UriError) as refused:
        split_evidence_refs(refs)
    assert "evidence_refs" in refused.value.context["fields"]
    str(refused.value).encode("ascii")


def test_a_reference_of_full_length_is_kept() -> None:
    assert split_evidence_refs(["x" * MAX_LENGTH])["extra"] == {"external_refs": ["x" * MAX_LENGTH]}


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, max_size=5))
def test_splitting_keeps_every_reference_once_or_refuses(refs: list[str]) -> None:
    try:
        split = split_evidence_refs(refs)
    except UriError:
        return
    entries = split["patches"] + split["attachments"]
    kept = [e["artifact_uri"] for e in entries] + split["extra"].get("external_refs", [])
    assert sorted(kept) == sorted(set(refs))
    assert build_evidence_refs_json(**split).get("patches", []) == split["patches"]
