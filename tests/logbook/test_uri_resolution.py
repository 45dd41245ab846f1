"""Evidence formats: round trips, refusals, and from an evidence URI to what it stands for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engram.logbook.artifacts import LocalArtifacts
from engram.logbook.uri import (
    MAX_KEY_SEGMENT,
    MAX_LENGTH,
    UriError,
    UriType,
    artifact_key_of,
    build_artifact_key,
    build_attachment_evidence_uri,
    build_content_key,
    build_evidence_uri,
    parse_artifact_key,
    parse_attachment_evidence_uri,
    parse_content_key,
    parse_evidence_uri,
    parse_uri,
    sha256_of_key,
)

SHA = "0123456789abcdef" * 4
BIGGEST = (1 << 63) - 1

SHAS = st.text("0123456789abcdef", min_size=64, max_size=64)
SOURCE_TYPES = st.from_regex(r"[a-z][a-z0-9_-]{0,31}", fullmatch=True)
NUMBERS = st.integers(1, BIGGEST)
EXTS = st.from_regex(r"[a-z0-9]{1,16}", fullmatch=True)
PLAIN = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\")
PARTS = st.text(PLAIN | st.sampled_from("%:. ~é续"), min_size=1, max_size=12).filter(
    lambda part: part not in (".", "..")
)
SOURCE_IDS = st.lists(PARTS, min_size=1, max_size=5).map("/".join)
ENCODED = st.text("aZ09-._~:%2FCEB1e", min_size=1, max_size=12)


@settings(deadline=None)
@given(SOURCE_TYPES, SOURCE_IDS, SHAS)
def test_patch_evidence_round_trips(source_type: str, source_id: str, sha256: str) -> None:
    uri = build_evidence_uri(source_type, source_id, sha256)
    assert parse_evidence_uri(uri) == {"source_type": source_type, "source_id": source_id, "sha256": sha256}
    assert uri.isascii()
    assert uri.count("/") == 5, "a source_id is one segment"
    assert parse_uri(uri).type is UriType.PATCH_EVIDENCE


@settings(deadline=None)
@given(NUMBERS, SHAS)
def test_attachment_evidence_round_trips(attachment_id: int, sha256: str) -> None:
    uri = build_attachment_evidence_uri(attachment_id, sha256)
    assert parse_attachment_evidence_uri(uri) == {"attachment_id": attachment_id, "sha256": sha256}
    assert parse_uri(uri).type is UriType.ATTACHMENT_EVIDENCE


@settings(deadline=None)
@given(PARTS, NUMBERS, SOURCE_TYPES, PARTS, SHAS, EXTS)
def test_artifact_keys_round_trip(
    project_key: str, repo_id: int, source_type: str, rev_or_sha: str, sha256: str, ext: str
) -> None:
    given_parts = {
        "project_key": project_key,
        "repo_id": repo_id,
        "source_type": source_type,
        "rev_or_sha": rev_or_sha,
        "sha256": sha256,
        "ext": ext,
    }
    key = build_artifact_key(**given_parts)  # type: ignore[arg-type]
    assert parse_artifact_key(key) == given_parts
    assert sha256_of_key(key) == sha256
    assert (parse_uri(key).type, parse_uri(key).scheme, parse_uri(key).path) == ("artifact_key", "", key)


@settings(deadline=None)
@given(SHAS)
def test_content_keys_round_trip(sha256: str) -> None:
    key = build_content_key(sha256)
    assert parse_content_key(key) == {"sha256": sha256}
    assert sha256_of_key(key) == sha256


@settings(max_examples=300, deadline=None)
@given(ENCODED)
def test_what_parses_is_spelled_as_it_would_be_built(segment: str) -> None:
    uri = f"memory://patch_blobs/git/{segment}/{SHA}"
    parts = parse_evidence_uri(uri)
    assume(parts is not None)
    assert parts is not None
    assert build_evidence_uri(**parts) == uri


@settings(max_examples=200, deadline=None)
@given(SOURCE_IDS, SOURCE_IDS)
def test_different_ids_have_different_uris(one: str, other: str) -> None:
    same = build_evidence_uri("git", one, SHA) == build_evidence_uri("git", other, SHA)
    assert same is (one == other)


@pytest.mark.parametrize(
    ("source_id", "segment"),
    [
        ("1:abc123", "1:abc123"),
        ("1:r1000", "1:r1000"),
        ("1:2:3", "1:2:3"),
        ("1:feature/x", "1:feature%2Fx"),
        ("100%", "100%25"),
        ("%2e%2e", "%252e%252e"),
        ("a b", "a%20b"),
        ("续租", "%E7%BB%AD%E7%A7%9F"),
        ("a+b=c@d?e#f", "a%2Bb%3Dc%40d%3Fe%23f"),
        ("...", "..."),
        (".hidden", ".hidden"),
        ("~-_.", "~-_."),
    ],
)
def test_the_one_spelling_of_a_source_id(source_id: str, segment: str) -> None:
    uri = build_evidence_uri("git", source_id, SHA)
    assert uri == f"memory://patch_blobs/git/{segment}/{SHA}"
    assert (parse_evidence_uri(uri) or {})["source_id"] == source_id


SEGMENTS = [
    "",
    ".",
    "..",
    "%2e%2e",
    "%2E%2E",
    ".%2E",
    "a%2F..%2Fb",
    "..%2Fb",
    "%2Fb",
    "b%2F",
    "a%2F%2Fb",
    "a%2F.%2Fb",
    "%2f",
    "a%2fb",
    "a\\b",
    "a%5Cb",
    "a%00b",
    "a%0Ab",
    "a%7Fb",
    "a%C2%85b",
    "a\x00b",
    "a\nb",
    "a b",
    "a+b",
    "é",
    "\ud800",
    "%ED%A0%80",
    "%C0%AE",
    "%FF",
    "%",
    "%2",
    "%zz",
    "%3A",
    "%61",
    "1%3aabc",
    "a?b",
    "a#b",
    "a@b",
    "a/b",
]


@pytest.mark.parametrize("segment", SEGMENTS)
def test_any_other_spelling_is_refused(segment: str) -> None:
    uri = f"memory://patch_blobs/git/{segment}/{SHA}"
    key = f"scm/p/1/git/{segment}/{SHA}.diff"
    assert parse_evidence_uri(uri) is None
    assert parse_artifact_key(key) is None
    assert parse_artifact_key(f"scm/{segment}/1/git/r1/{SHA}.diff") is None
    for text in (uri, key):
        with pytest.raises(UriError):
            parse_uri(text)


@pytest.mark.parametrize(
    "source_id",
    [
        "",
        ".",
        "..",
        "../x",
        "x/..",
        "a//b",
        "/a",
        "a/",
        "a\\b",
        "a\x00",
        "a\nb",
        "a\x7f",
        "a\x85",
        "\ud800",
        "/",
    ],
)
def test_an_id_that_leads_out_is_not_built(source_id: str) -> None:
    with pytest.raises(UriError):
        build_evidence_uri("git", source_id, SHA)
    with pytest.raises(UriError):
        build_artifact_key("p", 1, "git", source_id, SHA, "diff")


@pytest.mark.parametrize(
    "sha256", ["", "abc", SHA[:-1], SHA + "0", SHA.upper(), f"{SHA[:-1]}g", f"{SHA}\n", None]
)
def test_a_hash_is_64_lower_case_hex_digits(sha256: Any) -> None:
    assert parse_evidence_uri(f"memory://patch_blobs/git/1:a/{sha256}") is None
    assert parse_attachment_evidence_uri(f"memory://attachments/1/{sha256}") is None
    assert parse_content_key(f"blobs/01/{sha256}") is None
    for build in (
        lambda: build_evidence_uri("git", "1:a", sha256),
        lambda: build_attachment_evidence_uri(1, sha256),
        lambda: build_artifact_key("p", 1, "git", "a", sha256, "diff"),
        lambda: build_content_key(sha256),
    ):
        with pytest.raises(UriError):
            build()


@pytest.mark.parametrize(
    "digits", ["0", "-1", "+1", "01", "1.0", "1e3", "", " 1", "٣", "1_0", str(BIGGEST + 1), "9" * 999]
)
def test_a_number_has_one_spelling_and_a_limit(digits: str) -> None:
    assert parse_attachment_evidence_uri(f"memory://attachments/{digits}/{SHA}") is None
    assert parse_artifact_key(f"scm/p/{digits}/git/a/{SHA}.diff") is None


@pytest.mark.parametrize(
    "number", [0, -1, BIGGEST + 1, True, "1", 1.0, None, pytest.param(10**5000, id="huge")]
)
def test_a_number_is_a_positive_whole_one(number: Any) -> None:
    with pytest.raises(UriError):
        build_attachment_evidence_uri(number, SHA)
    with pytest.raises(UriError):
        build_artifact_key("p", number, "git", "a", SHA, "diff")


@pytest.mark.parametrize(
    "source_type", ["", "Git", "1git", "git/x", "git.", "g" * 33, "gít", "git\n", "..", None]
)
def test_a_source_type_is_a_short_word(source_type: Any) -> None:
    assert parse_evidence_uri(f"memory://patch_blobs/{source_type or ''}/1:a/{SHA}") is None
    with pytest.raises(UriError):
        build_evidence_uri(source_type, "1:a", SHA)


@pytest.mark.parametrize("ext", ["", "Diff", "tar.gz", "d/f", "x" * 17, "..", "d\n", None])
def test_an_extension_is_a_short_word(ext: Any) -> None:
    assert parse_artifact_key(f"scm/p/1/git/a/{SHA}.{ext or ''}") is None
    with pytest.raises(UriError):
        build_artifact_key("p", 1, "git", "a", SHA, ext)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "memory:",
        "memory:/attachments",
        "memory://",
        "memory:///",
        "memory://patch_blobs",
        f"memory://patch_blobs/git/{SHA}",
        f"memory://patch_blobs/git/1:a/{SHA}/",
        f"memory://patch_blobs//git/1:a/{SHA}",
        f"memory:///patch_blobs/git/1:a/{SHA}",
        f"memory://patch_blobs/git/1:a/{SHA}?x=1",
        f"memory://patch_blobs/git/1:a/{SHA}#x",
        f"memory://patch_blobs/git/1:a/{SHA}.diff",
        f"memory://user@patch_blobs/git/1:a/{SHA}",
        f"memory://PATCH_BLOBS/git/1:a/{SHA}",
        f"Memory://patch_blobs/git/1:a/{SHA}",
        f"memory://patch%5Fblobs/git/1:a/{SHA}",
        f" memory://patch_blobs/git/1:a/{SHA}",
        f"memory://patch_blobs/git/1:a/{SHA}\n",
        f"memory://attachments/1/{SHA}/x",
        f"memory://attachments/1/x/{SHA}",
        f"memory://attachments/{SHA}",
        f"blobs/00/{SHA}",
        f"blobs/{SHA}",
        f"blobs/01/{SHA}.diff",
        f"/blobs/01/{SHA}",
        f"./blobs/01/{SHA}",
        f"scm/p/1/git/a/{SHA}",
        f"scm/p/1/git/{SHA}.diff",
        f"/scm/p/1/git/a/{SHA}.diff",
        f"SCM/p/1/git/a/{SHA}.diff",
        f"scm/p/1/git/a/{SHA}.diff?x",
        "just words",
        "/etc/passwd",
    ],
)
def test_what_is_nearly_right_is_refused(uri: str) -> None:
    assert parse_evidence_uri(uri) is None
    assert parse_attachment_evidence_uri(uri) is None
    assert parse_artifact_key(uri) is None
    assert parse_content_key(uri) is None
    with pytest.raises(UriError):
        parse_uri(uri)


def test_length_is_limited_both_ways() -> None:
    room = MAX_LENGTH - len(f"memory://patch_blobs/git//{SHA}")
    longest = build_evidence_uri("git", "x" * room, SHA)
    assert len(longest) == MAX_LENGTH
    assert parse_evidence_uri(longest) is not None
    assert parse_evidence_uri(longest.replace("/xxx", "/xxxx")) is None
    with pytest.raises(UriError):
        build_evidence_uri("git", "x" * (room + 1), SHA)
    with pytest.raises(UriError):
        parse_uri("mr://" + "x" * MAX_LENGTH)


def test_the_parts_of_a_key_fit_a_file_name() -> None:
    fits, too_long = "é" * (MAX_KEY_SEGMENT // 6), "é" * (MAX_KEY_SEGMENT // 6 + 1)
    assert parse_artifact_key(build_artifact_key(fits, 1, "git", fits, SHA, "diff"))
    for project, rev in ((too_long, "a"), ("p", too_long), ("p/q", "a"), ("p", "a/b")):
        with pytest.raises(UriError):
            build_artifact_key(project, 1, "git", rev, SHA, "diff")
    assert parse_artifact_key(f"scm/p/1/git/{'a' * (MAX_KEY_SEGMENT + 1)}/{SHA}.diff") is None


@pytest.mark.parametrize(
    ("uri", "kind", "path", "parts"),
    [
        ("file:///home/user/file.txt", "physical", "/home/user/file.txt", {}),
        ("file:///a%20b", "physical", "/a%20b", {}),
        ("s3://bucket/some/key.diff", "physical", "bucket/some/key.diff", {"authority": "bucket"}),
        ("gs://my-bucket.x/key", "physical", "my-bucket.x/key", {"authority": "my-bucket.x"}),
        ("https://example.org", "physical", "example.org", {"authority": "example.org"}),
        ("http://[::1]:8787/x", "physical", "[::1]:8787/x", {"authority": "[::1]:8787"}),
        (
            "https://example.org:443/a//b/?q=%2e%2e#L1",
            "physical",
            "example.org:443/a//b/",
            {"authority": "example.org:443", "query": "q=%2e%2e", "fragment": "L1"},
        ),
        (
            "https://gitlab/api/group%2Fproject",
            "physical",
            "gitlab/api/group%2Fproject",
            {"authority": "gitlab"},
        ),
        ("mr://project/123", "external", "project/123", {"authority": "project"}),
        ("jira://PAY-7", "external", "PAY-7", {"authority": "PAY-7"}),
        (
            "svn+x.y-z://repo/trunk@12?r=1#f",
            "external",
            "repo/trunk@12",
            {"authority": "repo", "query": "r=1", "fragment": "f"},
        ),
        ("doc:///only/a/path", "external", "/only/a/path", {}),
    ],
)
def test_physical_and_external_references(uri: str, kind: str, path: str, parts: dict[str, str]) -> None:
    parsed = parse_uri(uri)
    assert (parsed.uri, parsed.scheme) == (uri, uri.split("://")[0])
    assert (parsed.type, parsed.path, parsed.parts) == (kind, path, parts)


@pytest.mark.parametrize(
    "uri",
    [
        "file://",
        "file:///",
        "file://host/etc/passwd",
        "file:///a/../b",
        "file:///a/%2e%2e/b",
        "file:///a/.%2E/b",
        "file:///a%2F..%2Fb",
        "file:///a%2fb",
        "file:///a//b",
        "file:///a/",
        "file:///a/./b",
        "file:///a?x",
        "file:///a?",
        "file:///a#x",
        "file:///a\\b",
        "file:///a%5Cb",
        "file:///a%00",
        "file:///a%0d%0ab",
        "file:///a%C0%AE",
        "file:///a%",
        "file:///é",
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3:///key",
        "s3://Bucket/key",
        "s3://key:secret@bucket/key",
        "s3://bucket/../other/key",
        "s3://bucket/key?versionId=1",
        "https://",
        "https:///path",
        "https://user@example.org/",
        "https://user:password@example.org/",
        "https://example.org@evil.example/",
        "https://example.org/../x",
        "https://example.org/a/%2E%2e/x",
        "https://example.org/a/%2e%2e%2fx",
        "https://exa mple.org/",
        "https://example.org/%zz",
        "https://example.org/a#b#c",
        "https://-/",
        "https://example.org:port/",
        "HTTPS://example.org/",
        "mr://",
        "mr:///",
        "mr://..",
        "mr://../x",
        "mr://%2e%2e/x",
        "mr://a/..",
        "mr://user@project/1",
        "mr://a\tb",
        "mr://a\x00b",
        "mr://\ud800",
        "mr:project",
        "1mr://project",
        "m r://project",
        f"{'m' * 33}://project",
        "://project",
    ],
)
def test_a_reference_that_hides_something_is_refused(uri: str) -> None:
    with pytest.raises(UriError) as refused:
        parse_uri(uri)
    str(refused.value).encode("ascii")


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UriError, match="user names and passwords") as refused:
        parse_uri("https://someone:hunter2@example.org/")
    assert "hunter2" not in str(refused.value)


def test_patch_evidence_resolves_to_its_artifact_key() -> None:
    git = build_evidence_uri("git", "1:abc123", SHA)
    svn = build_evidence_uri("svn", "42:r1000", SHA)
    assert artifact_key_of(git, "payments", "diff") == f"scm/payments/1/git/abc123/{SHA}.diff"
    assert artifact_key_of(svn, "支付", "diffstat") == f"scm/%E6%94%AF%E4%BB%98/42/svn/r1000/{SHA}.diffstat"


@settings(deadline=None)
@given(NUMBERS, PARTS, SHAS)
def test_resolution_loses_nothing(repo_id: int, rev_or_sha: str, sha256: str) -> None:
    evidence = build_evidence_uri("git", f"{repo_id}:{rev_or_sha}", sha256)
    parts = parse_artifact_key(artifact_key_of(evidence, "payments", "diff")) or {}
    assert (parts["repo_id"], parts["rev_or_sha"], parts["sha256"]) == (repo_id, rev_or_sha, sha256)


@pytest.mark.parametrize("source_id", ["abc123", "x:abc", "0:abc", "01:abc", ":abc", "1:", "1:a/b", "1:.."])
def test_evidence_of_another_source_has_no_artifact_key(source_id: str) -> None:
    with pytest.raises(UriError):
        artifact_key_of(build_evidence_uri("git", source_id, SHA), "payments", "diff")


@pytest.mark.parametrize("uri", [f"memory://attachments/1/{SHA}", "mr://project/1", "", None])
def test_only_patch_evidence_has_an_artifact_key(uri: Any) -> None:
    with pytest.raises(UriError):
        artifact_key_of(uri, "payments", "diff")


def test_attachment_evidence_resolves_to_its_row_and_hash() -> None:
    uri = build_attachment_evidence_uri(12345, SHA)
    parts = parse_attachment_evidence_uri(uri) or {}
    assert (parts["attachment_id"], build_content_key(parts["sha256"])) == (12345, f"blobs/01/{SHA}")


def test_from_evidence_to_the_bytes_it_names(tmp_path: Path) -> None:
    content = b"--- a/x\n+++ b/x\n"
    sha = hashlib.sha256(content).hexdigest()
    evidence = build_evidence_uri("git", "1:feature~1", sha)
    store = LocalArtifacts(tmp_path)
    store.put(content, artifact_key_of(evidence, "payments", "diff"))
    with store.open(artifact_key_of(evidence, "payments", "diff")) as reader:
        assert reader.read() == content


@pytest.mark.parametrize("key", ["", "x", f"memory://attachments/1/{SHA}", f"blobs/00/{SHA}", None])
def test_only_a_key_has_a_keys_hash(key: Any) -> None:
    with pytest.raises(UriError):
        sha256_of_key(key)
