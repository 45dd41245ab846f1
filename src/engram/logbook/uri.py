"""The only URI grammar of engram; this text is its specification.

It is pure: it opens nothing and asks nobody. No other module may build or take
apart a `memory://` URI or a key by itself, and what is refused here is not
repaired elsewhere.

    reference     = evidence | key | physical | external       at most 2048 characters

    evidence      = "memory://patch_blobs/" source-type "/" source-id "/" sha256
                  | "memory://attachments/" attachment-id "/" sha256
    key           = "scm/" project-key "/" repo-id "/" source-type "/" rev-or-sha "/" sha256 "." ext
                  | "blobs/" (the first two digits of sha256) "/" sha256
    physical      = "file:///" path
                  | ("s3" | "gs") "://" bucket "/" path
                  | ("http" | "https") "://" host [":" port] ["/" path] ["?" query] ["#" fragment]
    external      = scheme "://" [authority] ["/" path] ["?" query] ["#" fragment]

    source-type   = a-z, then at most 31 of a-z 0-9 "_" "-"
    source-id     = text
    project-key, rev-or-sha = text without "/", at most 200 characters when encoded
    attachment-id, repo-id  = a whole number from 1 to 2^63 - 1, no leading zero
    sha256        = 64 of 0-9 a-f
    ext           = 1 to 16 of a-z 0-9
    text          = one or more of A-Z a-z 0-9 "-" "." "_" "~" ":" and "%XX"

*Evidence* is what an audit or a memory rests on; it names content, not a place.
A *key* is what the database stores and the artifact store serves. A *physical*
URI says where something lies and comes in from outside only. Anything else that
is well formed is *external*: engram keeps it and does not know what it means.

    memory://patch_blobs/git/1:abc123/<sha256>        scm/payments/1/git/abc123/<sha256>.diff
    memory://patch_blobs/svn/1:r1000/<sha256>         blobs/e3/<sha256>
    memory://attachments/12345/<sha256>               mr://project/123

*One spelling.* In `text` every character outside the list is its UTF-8 bytes as
`%XX` with upper-case digits, and nothing in the list is: `:` stays literal, `/`
is `%2F`. So build-then-parse and parse-then-build are both the identity, and any
other spelling is refused. No Unicode normalisation: what differs, differs.

*No way out.* Decoded text holds no control character, backslash or lone
surrogate, and none of its "/"-separated parts is empty, "." or "..". The path of
a physical or external URI has no such part either, encoded or not (empty parts
are allowed where the scheme is `http`, `https` or unknown). User names and
passwords are refused everywhere, query and fragment except where shown.

Adding a scheme is compatible. Changing `memory://`, or what a parser returns,
breaks stored evidence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

from engram.kernel.content import why_unstorable
from engram.kernel.errors import UriError

MAX_LENGTH = 2048
# How a person is told what such a reference looks like.
ATTACHMENT_FORM = "memory://attachments/<attachment_id>/<sha256>"
PATCH_FORM = "memory://patch_blobs/<source_type>/<source_id>/<sha256>"
MAX_KEY_SEGMENT = 200  # a file name holds 255 bytes
MAX_NUMBER = (1 << 63) - 1

_URI_CHARACTERS = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+")
_TEXT = re.compile(r"(?:[A-Za-z0-9\-._~:]|%[0-9A-F]{2})+")
_SOURCE_TYPE = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXT = re.compile(r"[a-z0-9]{1,16}")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_REFERENCE = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,31})://(?P<authority>[^/?#]*)(?P<path>(?:/[^?#]*)?)"
    r"(?:\?(?P<query>[^#]*))?(?:#(?P<fragment>[^#]*))?"
)


class UriType(StrEnum):
    ARTIFACT_KEY = "artifact_key"
    CONTENT_KEY = "content_key"
    PATCH_EVIDENCE = "patch_evidence"
    ATTACHMENT_EVIDENCE = "attachment_evidence"
    PHYSICAL = "physical"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class ParsedUri:
    """`scheme` is empty for a key; `path` is what follows `://`, up to `?` or `#`, undecoded.

    `parts` has the decoded fields of evidence and keys, by the grammar's names;
    otherwise `authority`, `query` and `fragment` where there are any.
    """

    uri: str
    scheme: str
    path: str
    type: UriType
    parts: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class _Rules:
    authority: re.Pattern[str]
    names_a_file: bool


_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PHYSICAL = {
    "file": _Rules(re.compile(""), names_a_file=True),
    "s3": _Rules(_BUCKET, names_a_file=True),
    "gs": _Rules(_BUCKET, names_a_file=True),
    "http": _Rules(_HOST, names_a_file=False),
    "https": _Rules(_HOST, names_a_file=False),
}
_EXTERNAL = _Rules(re.compile(r"[A-Za-z0-9\-._~:%!$&'()*+,;=\[\]]*"), names_a_file=False)


def parse_uri(uri: str) -> ParsedUri:
    """What kind of reference this is, and its parts; `UriError` for anything outside the grammar.

    >>> parse_uri("mr://project/123").type.value
    'external'
    """
    _require_characters(uri)
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return _parse_key(uri)
    if scheme == "memory":
        return _parse_evidence(uri, rest)
    return _parse_reference(uri)


def build_evidence_uri(source_type: str, source_id: str, sha256: str) -> str:
    """
    >>> build_evidence_uri("git", "1:feat/α", "0" * 64)[:40]
    'memory://patch_blobs/git/1:feat%2F%CE%B1'
    """
    path = f"{_source_type(source_type)}/{_encoded('source_id', source_id)}/{_sha256(sha256)}"
    return _bounded(f"memory://patch_blobs/{path}")


def parse_evidence_uri(evidence_uri: str) -> dict[str, Any] | None:
    """`source_type`, `source_id`, `sha256`; None for anything else. Never raises."""
    return _parts_of(evidence_uri, UriType.PATCH_EVIDENCE)


def build_attachment_evidence_uri(attachment_id: int, sha256: str) -> str:
    return f"memory://attachments/{_whole('attachment_id', attachment_id)}/{_sha256(sha256)}"


def parse_attachment_evidence_uri(evidence_uri: str) -> dict[str, Any] | None:
    """`attachment_id` (a number), `sha256`; None for anything else. Never raises."""
    return _parts_of(evidence_uri, UriType.ATTACHMENT_EVIDENCE)


def build_artifact_key(
    project_key: str, repo_id: int, source_type: str, rev_or_sha: str, sha256: str, ext: str
) -> str:
    """
    >>> build_artifact_key("payments", 1, "svn", "r1000", "0" * 64, "diff")[:25]
    'scm/payments/1/svn/r1000/'
    """
    segments = (
        _encoded_name("project_key", project_key),
        str(_whole("repo_id", repo_id)),
        _source_type(source_type),
        _encoded_name("rev_or_sha", rev_or_sha),
        f"{_sha256(sha256)}.{_ext(ext)}",
    )
    return "scm/" + "/".join(segments)


def parse_artifact_key(key: str) -> dict[str, Any] | None:
    """The arguments of `build_artifact_key`; None for anything else. Never raises."""
    return _parts_of(key, UriType.ARTIFACT_KEY)


def build_content_key(sha256: str) -> str:
    """The key of content that is nothing but its bytes."""
    return f"blobs/{_sha256(sha256)[:2]}/{sha256}"


def parse_content_key(key: str) -> dict[str, Any] | None:
    """`sha256`; None for anything else. Never raises."""
    return _parts_of(key, UriType.CONTENT_KEY)


def sha256_of_key(key: str) -> str:
    """The hash that the content under a key of either kind must have."""
    parts = parse_artifact_key(key) or parse_content_key(key)
    if parts is None:
        raise _refused("not an artifact key", key)
    return str(parts["sha256"])


def artifact_key_of(evidence_uri: str, project_key: str, ext: str) -> str:
    """Where the content of a patch's evidence is kept: its `source_id` is `<repo_id>:<rev_or_sha>`."""
    parts = parse_evidence_uri(evidence_uri)
    if parts is None:
        raise _refused("not the evidence of a patch", evidence_uri)
    repo_id, separator, rev_or_sha = parts["source_id"].partition(":")
    if not separator:
        raise _refused("the source_id is not <repo_id>:<rev_or_sha>", evidence_uri)
    repo = _parsed_number("repo_id", repo_id)
    return build_artifact_key(project_key, repo, parts["source_type"], rev_or_sha, parts["sha256"], ext)


def build_evidence_refs_json(
    patches: list[dict[str, Any]] | None = None,
    attachments: list[dict[str, Any]] | None = None,
    extra: dict[str, Any] | None = None,
    *,
    outbox_id: int | None = None,
) -> dict[str, Any]:
    """The one shape of `evidence_refs_json`; parts that are empty are left out.

    An entry is given by its `artifact_uri`, or by the fields it is built from,
    and comes out with both; other fields (`size_bytes`, `kind`, ...) are kept.
    `outbox_id` belongs to the top level, where reconcile looks for it, so
    `extra` may hold neither it nor an `artifact_uri`; the rest of it is kept.
    """
    refs: dict[str, Any] = {}
    if outbox_id is not None:
        refs["outbox_id"] = _whole("outbox_id", outbox_id)
    if patches:
        refs["patches"] = [_entry(given, UriType.PATCH_EVIDENCE) for given in patches]
    if attachments:
        refs["attachments"] = [_entry(given, UriType.ATTACHMENT_EVIDENCE) for given in attachments]
    if extra:
        refs["extra"] = _checked_extra(extra)
    return refs


def split_evidence_refs(refs: list[str]) -> dict[str, Any]:
    """A caller's references as arguments for `build_evidence_refs_json`, repeats dropped.

    What starts like `memory:` must be evidence; any other text is an external
    reference and is never taken for an artifact.
    """
    patches, attachments, external = [], [], []
    for ref in dict.fromkeys(_checked_refs(refs)):
        if parts := parse_evidence_uri(ref):
            patches.append({"artifact_uri": ref, **parts})
        elif parts := parse_attachment_evidence_uri(ref):
            attachments.append({"artifact_uri": ref, **parts})
        elif ref.strip().lower().startswith("memory:"):
            raise _refused("not evidence as engram writes it", ref, "evidence_refs")
        else:
            external.append(ref)
    extra = {"external_refs": external} if external else {}
    return {"patches": patches, "attachments": attachments, "extra": extra}


def validate_evidence_ref(ref: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether an entry may stand in `evidence_refs_json`, and if not, why. Never raises."""
    problem = _why_invalid(ref)
    return problem is None, problem


def _parse_evidence(uri: str, path: str) -> ParsedUri:
    match path.split("/"):
        case ["patch_blobs", source_type, source_id, sha256]:
            kind = UriType.PATCH_EVIDENCE
            parts: dict[str, Any] = {
                "source_type": _source_type(source_type),
                "source_id": _decoded("source_id", source_id),
                "sha256": _sha256(sha256),
            }
        case ["attachments", attachment_id, sha256]:
            kind = UriType.ATTACHMENT_EVIDENCE
            parts = {
                "attachment_id": _parsed_number("attachment_id", attachment_id),
                "sha256": _sha256(sha256),
            }
        case _:
            raise _refused("not evidence: neither patch_blobs nor attachments", uri)
    return ParsedUri(uri, "memory", path, kind, parts)


def _parse_key(key: str) -> ParsedUri:
    match key.split("/"):
        case ["scm", project_key, repo_id, source_type, rev_or_sha, name]:
            sha256, _, ext = name.partition(".")
            parts = {
                "project_key": _decoded_name("project_key", project_key),
                "repo_id": _parsed_number("repo_id", repo_id),
                "source_type": _source_type(source_type),
                "rev_or_sha": _decoded_name("rev_or_sha", rev_or_sha),
                "sha256": _sha256(sha256),
                "ext": _ext(ext),
            }
            return ParsedUri(key, "", key, UriType.ARTIFACT_KEY, parts)
        case ["blobs", shard, sha256] if shard == _sha256(sha256)[:2]:
            return ParsedUri(key, "", key, UriType.CONTENT_KEY, {"sha256": sha256})
    raise _refused("neither a URI nor an artifact key", key)


def _parse_reference(uri: str) -> ParsedUri:
    match = _REFERENCE.fullmatch(uri)
    if match is None or _BAD_ESCAPE.search(uri):
        raise _refused("not a well-formed URI", uri)
    rules = _PHYSICAL.get(match["scheme"], _EXTERNAL)
    if "@" in match["authority"]:
        raise UriError("user names and passwords do not belong in a reference")  # nor in a message
    if not rules.authority.fullmatch(match["authority"]) or not match["authority"] + match["path"].strip("/"):
        raise _refused("it does not say what or where", uri)
    _require_safe_path(match["authority"], match["path"], uri)
    if rules.names_a_file:
        _require_file(match, uri)
    kind = UriType.EXTERNAL if rules is _EXTERNAL else UriType.PHYSICAL
    parts = {name: match[name] for name in ("authority", "query", "fragment") if match[name]}
    return ParsedUri(uri, match["scheme"], match["authority"] + match["path"], kind, parts)


def _require_safe_path(authority: str, path: str, uri: str) -> None:
    try:
        decoded = unquote(authority + path, errors="strict")
    except UnicodeDecodeError:
        raise _refused("its path is not UTF-8", uri) from None
    if _unsafe(decoded) or any(part in (".", "..") for part in decoded.split("/")):
        raise _refused("its path leads out, or has characters no path should have", uri)


def _require_file(match: re.Match[str], uri: str) -> None:
    if match["query"] is not None or match["fragment"] is not None:
        raise _refused("query and fragment do not belong here", uri)
    if "%2f" in match["path"].lower() or "" in match["path"].split("/")[1:] or not match["path"]:
        raise _refused("its path has an empty part or a hidden separator", uri)


def _require_characters(uri: str) -> None:
    if not isinstance(uri, str):
        raise UriError("a reference must be text")
    if len(uri) > MAX_LENGTH:
        raise _refused(f"longer than {MAX_LENGTH} characters", uri)
    if not _URI_CHARACTERS.fullmatch(uri):
        raise _refused("empty, or has characters that must be percent-encoded", uri)


def _parts_of(text: str, kind: UriType) -> dict[str, Any] | None:
    try:
        parsed = parse_uri(text)
    except UriError:
        return None
    return dict(parsed.parts) if parsed.type is kind else None


def _entry(given: dict[str, Any], kind: UriType) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UriError("an evidence entry must be an object")
    uri = given.get("artifact_uri") or _uri_of_fields(given, kind)
    parts = _parts_of(uri, kind)
    if parts is None:
        raise _refused(f"not {kind.value.replace('_', ' ')}", uri)
    entry = {"artifact_uri": uri, **parts, **given}
    if problem := _why_invalid(entry):
        raise _refused(problem, uri)
    return entry


def _uri_of_fields(given: dict[str, Any], kind: UriType) -> str:
    sha256: Any = given.get("sha256")
    if kind is UriType.PATCH_EVIDENCE:
        source_type: Any = given.get("source_type")
        source_id: Any = given.get("source_id")
        return build_evidence_uri(source_type, source_id, sha256)
    attachment_id: Any = given.get("attachment_id")
    return build_attachment_evidence_uri(attachment_id, sha256)


def _checked_extra(extra: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(extra, dict):
        raise UriError("extra must be an object", fields={"extra": "must be an object"})
    if misplaced := {"outbox_id", "artifact_uri"} & extra.keys():
        raise UriError(f"extra may not hold {' or '.join(sorted(misplaced))}", fields={"extra": "misplaced"})
    if problem := why_unstorable(extra):
        raise UriError(f"extra {problem}", fields={"extra": problem})
    return dict(extra)


def _checked_refs(refs: list[str]) -> list[str]:
    if not isinstance(refs, list):
        raise UriError("evidence_refs must be a list", fields={"evidence_refs": "must be a list"})
    for ref in refs:
        if not isinstance(ref, str) or not ref.strip() or len(ref) > MAX_LENGTH or _CONTROL.search(ref):
            raise _refused(f"each must be plain text of 1 to {MAX_LENGTH} characters", ref, "evidence_refs")
    return refs


def _why_invalid(ref: object) -> str | None:
    if not isinstance(ref, dict):
        return "an evidence entry must be an object"
    uri: Any = ref.get("artifact_uri")
    parts = parse_evidence_uri(uri) or parse_attachment_evidence_uri(uri)
    if parts is None:
        return "artifact_uri must be memory://patch_blobs/... or memory://attachments/..."
    if "sha256" not in ref:
        return "sha256 is required"
    for name in ("sha256", "source_type", "source_id", "attachment_id"):
        if name in ref and not _same(ref[name], parts.get(name)):
            return f"{name} is not the one in artifact_uri"
    return _why_invalid_option(ref) or why_unstorable(ref)


def _why_invalid_option(ref: dict[str, Any]) -> str | None:
    size, kind = ref.get("size_bytes", 0), ref.get("kind", "-")
    if type(size) is not int or not 0 <= size <= MAX_NUMBER:
        return "size_bytes must be a whole number, 0 or more"
    if not isinstance(kind, str) or not 1 <= len(kind) <= 64:
        return "kind must be text of 1 to 64 characters"
    return None


def _same(left: object, right: object) -> bool:
    """Equal and of one type: `True` is not attachment 1."""
    return type(left) is type(right) and left == right


def _encoded(name: str, text: str) -> str:
    if not isinstance(text, str) or _unsafe(text):
        raise _refused(f"{name} must be text without control characters, backslashes or surrogates", text)
    if any(part in ("", ".", "..") for part in text.split("/")):
        raise _refused(f"{name} must not be empty or have parts that are empty, '.' or '..'", text)
    return quote(text, safe=":")


def _decoded(name: str, segment: str) -> str:
    text = unquote(segment)
    if not _TEXT.fullmatch(segment) or _encoded(name, text) != segment:
        raise _refused(f"{name} is not in its one spelling", segment)
    return text


def _encoded_name(name: str, text: str) -> str:
    segment = _encoded(name, text)
    if "/" in text or len(segment) > MAX_KEY_SEGMENT:
        raise _refused(f"{name} must not hold '/' and have at most {MAX_KEY_SEGMENT} characters", text)
    return segment


def _decoded_name(name: str, segment: str) -> str:
    text = _decoded(name, segment)
    _encoded_name(name, text)
    return text


def _whole(name: str, number: int) -> int:
    if type(number) is not int or not 1 <= number <= MAX_NUMBER:
        raise _refused(f"{name} must be a whole number from 1 to 2^63 - 1", number)
    return number


def _parsed_number(name: str, digits: str) -> int:
    if not _NUMBER.fullmatch(digits):
        raise _refused(f"{name} must be a whole number without leading zeros", digits)
    return _whole(name, int(digits))


def _source_type(value: str) -> str:
    return _matching(_SOURCE_TYPE, value, "source_type must be a short lower-case word")


def _sha256(value: str) -> str:
    return _matching(_SHA256, value, "sha256 must be 64 lower-case hex digits")


def _ext(value: str) -> str:
    return _matching(_EXT, value, "ext must be 1 to 16 lower-case letters or digits")


def _matching(pattern: re.Pattern[str], value: str, rule: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _refused(rule, value)
    return value


def _bounded(uri: str) -> str:
    if len(uri) > MAX_LENGTH:
        raise _refused(f"longer than {MAX_LENGTH} characters", uri)
    return uri


def _unsafe(text: str) -> bool:
    return "\\" in text or _CONTROL.search(text) is not None


def _refused(why: str, what: object, field_name: str | None = None) -> UriError:
    shown = ascii(what[:100]) if isinstance(what, str) else type(what).__name__
    return UriError(f"{why}: {shown}", fields={field_name: why} if field_name else None)
