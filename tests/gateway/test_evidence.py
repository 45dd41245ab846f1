"""Evidence is kept before it is referred to, verified when it is read, and read by those who may."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engram.assembly.parts import artifacts
from engram.gateway.callers import Caller
from engram.gateway.evidence import Evidence, ReadReply, ReadRequest, UploadReply, UploadRequest
from engram.gateway.placement import Placement
from engram.kernel.errors import (
    ArtifactCorrupt,
    ArtifactTooLarge,
    Forbidden,
    InputError,
    NotFound,
)
from engram.kernel.settings import Settings
from engram.logbook import governance, items
from engram.logbook.artifacts import Artifact, LocalArtifacts
from engram.logbook.config import Config
from engram.logbook.uri import build_attachment_evidence_uri, parse_attachment_evidence_uri
from engram.postgres.executors import AsyncExecutor
from engram.postgres.pool import connect

pytestmark = pytest.mark.anyio

ADA, BOB = Caller("ada"), Caller("bob")
CORR = "corr-0000000000000001"
LIMIT = 1 << 20


@pytest.fixture
def evidence(db: AsyncExecutor, settings: Settings) -> Evidence:
    return Evidence(db, artifacts(settings), Placement(db, "default"), max_bytes=LIMIT)


async def uploaded(evidence: Evidence, content: str, caller: Caller = ADA, **kw: object) -> UploadReply:
    return await evidence.upload(UploadRequest(caller, CORR, content, **kw))


async def read(evidence: Evidence, uri: str, caller: Caller = ADA, **kw: int) -> ReadReply:
    return await evidence.read(ReadRequest(caller, CORR, uri, **kw))


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def rows(dsn: str) -> list[dict]:
    with connect(dsn) as connection:
        return connection.execute("SELECT * FROM logbook.attachments ORDER BY attachment_id").fetchall()


async def test_what_was_uploaded_is_read_back(evidence: Evidence, dsn: str) -> None:
    kept = await uploaded(evidence, "A log.\n日志\n", kind="log", name="../../etc/passwd")
    content = "A log.\n日志\n".encode()
    assert (kept.sha256, kept.size_bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    assert kept.uri == f"memory://attachments/{kept.attachment_id}/{kept.sha256}"
    assert (kept.space, kept.diverted, kept.deduplicated) == ("private:ada", False, False)
    found = await read(evidence, kept.uri)
    assert (found.content, found.encoding, found.truncated) == ("A log.\n日志\n", "utf-8", False)
    assert (found.kind, found.name, found.next_offset) == ("log", "../../etc/passwd", None)
    (row,) = rows(dsn)
    assert (row["owner"], row["target_space"], row["item_id"]) == ("ada", "private:ada", None)
    assert "passwd" not in row["artifact_key"]


async def test_bytes_that_are_no_text_come_back_in_base64(evidence: Evidence) -> None:
    content = bytes(range(256))
    wrapped = "\n".join(in_base64(content)[n : n + 76] for n in range(0, 344, 76))
    kept = await uploaded(evidence, wrapped, encoding="base64")
    assert kept.sha256 == hashlib.sha256(content).hexdigest()
    found = await read(evidence, kept.uri)
    assert (found.encoding, base64.b64decode(found.content)) == ("base64", content)


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ("日志" * 50, 7),
        ("日志" * 50, 1),
        ("a😀b" * 30, 5),
        ("plain text " * 20, 16),
        (b"\xff\xfe" * 40 + "日志".encode(), 9),
        ("日志".encode() * 20 + b"\xe6", 11),
    ],
    ids=["cut-characters", "one-byte", "four-bytes", "ascii", "binary", "ends-in-half-a-character"],
)
async def test_pages_put_together_are_the_whole(evidence: Evidence, content: str | bytes, size: int) -> None:
    whole = content.encode() if isinstance(content, str) else content
    kept = await uploaded(evidence, in_base64(whole), encoding="base64")
    parts, offset = [], 0
    while True:
        page = await read(evidence, kept.uri, offset=offset, max_bytes=size)
        part = page.content.encode() if page.encoding == "utf-8" else base64.b64decode(page.content)
        assert 0 < len(part) <= size
        parts.append(part)
        assert page.truncated is (page.next_offset is not None)
        if page.next_offset is None:
            break
        assert page.next_offset == offset + len(part)
        offset = page.next_offset
    assert b"".join(parts) == whole


async def test_a_large_file_is_read_from_the_middle(evidence: Evidence) -> None:
    whole = "".join(f"{n:07}\n" for n in range(100_000))
    kept = await uploaded(evidence, whole)
    page = await read(evidence, kept.uri, offset=8 * 70_000, max_bytes=16)
    assert page.content == "0070000\n0070001\n"
    end = await read(evidence, kept.uri, offset=len(whole))
    assert (end.content, end.truncated) == ("", False)


async def test_the_same_bytes_again_are_the_same_attachment(
    evidence: Evidence, config: Config, dsn: str
) -> None:
    governance.upsert_settings("payments", True, config=config)
    item = items.create_item("task", "Mend it", "payments", config=config)
    first = await uploaded(evidence, "A log.")
    again = await uploaded(evidence, in_base64(b"A log."), encoding="base64", kind="other")
    assert (again.uri, again.deduplicated) == (first.uri, True)
    elsewhere = [
        await uploaded(evidence, "A log.", BOB),
        await uploaded(evidence, "A log.", item_id=item),
        await uploaded(evidence, "A log.", target_space="team:payments"),
    ]
    assert not any(other.deduplicated for other in elsewhere)
    assert len({row["artifact_key"] for row in rows(dsn)}) == 1, "the bytes are kept once"
    assert len(rows(dsn)) == 4


async def test_many_at_once_make_one(evidence: Evidence, dsn: str) -> None:
    replies = await asyncio.gather(*(uploaded(evidence, "A log.") for _ in range(16)))
    assert len({reply.uri for reply in replies}) == 1
    assert sum(not reply.deduplicated for reply in replies) == 1
    assert len(rows(dsn)) == 1


async def test_nobody_else_reads_what_is_private(evidence: Evidence) -> None:
    kept = await uploaded(evidence, "Ada's secret.")
    missing = build_attachment_evidence_uri(kept.attachment_id + 1, kept.sha256)
    told = []
    for uri in (kept.uri, missing):
        with pytest.raises(NotFound) as refused:
            await read(evidence, uri, BOB)
        told.append(str(refused.value).replace(uri, "<uri>"))
        assert refused.value.context == {}
    assert told[0] == told[1], "what is not yours and what is not there are told alike"
    assert (await read(evidence, kept.uri)).content == "Ada's secret."


async def test_to_have_the_bytes_oneself_opens_nothing(evidence: Evidence) -> None:
    """Content is kept once, but each reference has its own readers."""
    adas = await uploaded(evidence, "Ada's secret.")
    bobs = await uploaded(evidence, "Ada's secret.", BOB)
    assert bobs.uri != adas.uri
    assert not bobs.deduplicated, "nor does it tell whether somebody has it"
    with pytest.raises(NotFound):
        await read(evidence, adas.uri, BOB)


async def test_shared_evidence_is_read_by_those_whose_token_lists_the_space(
    evidence: Evidence, config: Config
) -> None:
    governance.upsert_settings("payments", True, config=config)
    kept = await uploaded(evidence, "For the team.", target_space="team:payments")
    assert (kept.space, kept.diverted) == ("team:payments", False)
    inside = Caller("bob", shared_spaces=frozenset({"team:payments"}))
    outside = Caller("bob", shared_spaces=frozenset({"team:other"}))
    assert (await read(evidence, kept.uri, inside)).content == "For the team."
    with pytest.raises(NotFound):
        await read(evidence, kept.uri, outside)
    with pytest.raises(Forbidden):
        await uploaded(evidence, "Not for them.", outside, target_space="team:payments")


@pytest.mark.parametrize(
    ("enabled", "policy", "rule"),
    [
        (False, {}, "team_write_disabled"),
        (True, {"allowlist_users": ["bob"]}, "not_allowlisted"),
        (True, {"allowlist_users": "everybody"}, "policy_invalid"),
    ],
)
async def test_a_closed_space_diverts_to_the_private_one(
    evidence: Evidence, config: Config, enabled: bool, policy: dict, rule: str
) -> None:
    governance.upsert_settings("payments", enabled, policy, config=config)
    kept = await uploaded(evidence, "A log.", target_space="team:payments", kind="log")
    assert (kept.space, kept.diverted) == ("private:ada", True)
    assert "team:payments" in kept.message
    assert rule in kept.message
    with pytest.raises(NotFound):
        await read(evidence, kept.uri, BOB)


async def test_the_rules_about_memories_do_not_concern_evidence(evidence: Evidence, config: Config) -> None:
    rules = {"require_evidence": True, "max_chars": 10, "allowed_kinds": ["FACT"]}
    governance.upsert_settings("payments", True, rules, config=config)
    kept = await uploaded(evidence, "A log. " * 100, target_space="team:payments")
    assert kept.space == "team:payments"


@pytest.mark.parametrize(
    ("space", "error"),
    [
        ("private:bob", Forbidden),
        ("public:x", InputError),
        ("team:", InputError),
        ("memory://attachments/1", InputError),
    ],
)
async def test_a_space_that_is_not_ones_own_to_write_is_refused(
    evidence: Evidence, dsn: str, settings: Settings, space: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await uploaded(evidence, "A log.", target_space=space)
    assert rows(dsn) == []
    assert settings.artifacts_dir is not None
    assert not settings.artifacts_dir.exists(), "nothing is written for who may not write"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"content": ""}, "content"),
        ({"content": "not base64!", "encoding": "base64"}, "content"),
        ({"content": "QQ", "encoding": "base64"}, "content"),
        ({"content": "日志", "encoding": "base64"}, "content"),
        ({"content": "\ud800"}, "content"),
        ({"content": "x", "kind": " "}, "kind"),
        ({"content": "x", "kind": "k" * 65}, "kind"),
        ({"content": "x", "name": "n" * 256}, "name"),
        ({"content": "x", "name": "a\x00b"}, "name"),
        ({"content": "x", "item_id": 0}, "item_id"),
        ({"content": "x", "caller": Caller("a b")}, "actor_user_id"),
    ],
    ids=range(11),
)
async def test_a_bad_upload_names_the_field(evidence: Evidence, dsn: str, given: dict, field: str) -> None:
    with pytest.raises(InputError) as refused:
        await evidence.upload(UploadRequest(**{"caller": ADA, "correlation_id": CORR, **given}))
    assert set(refused.value.context["fields"]) == {field}
    assert rows(dsn) == []


async def test_more_than_the_limit_is_refused_and_leaves_nothing(
    evidence: Evidence, dsn: str, settings: Settings
) -> None:
    with pytest.raises(ArtifactTooLarge):
        await uploaded(evidence, "x" * (LIMIT + 1))
    assert rows(dsn) == []
    assert [p for p in (settings.artifacts_dir or Path()).rglob("*") if p.is_file()] == []


async def test_an_item_must_be_there_and_visible(evidence: Evidence, config: Config, dsn: str) -> None:
    item = items.create_item("task", "Mend it", "payments", config=config)
    kept = await uploaded(evidence, "A log.", item_id=item)
    assert [a["attachment_id"] for a in items.list_attachments(item, config)] == [kept.attachment_id]
    told = []
    for caller, item_id in ((ADA, item + 1), (Caller("eve", shared_spaces=frozenset()), item)):
        with pytest.raises(NotFound) as refused:
            await uploaded(evidence, "A log.", caller, item_id=item_id)
        told.append(refused.value.message.replace(str(item_id), "<id>"))
    assert told[0] == told[1]
    assert len(rows(dsn)) == 1


async def test_a_wrong_hash_in_the_uri_finds_nothing(evidence: Evidence) -> None:
    kept = await uploaded(evidence, "A log.")
    with pytest.raises(NotFound):
        await read(evidence, build_attachment_evidence_uri(kept.attachment_id, "0" * 64))


async def test_a_patch_that_nobody_kept_is_not_found(evidence: Evidence) -> None:
    with pytest.raises(NotFound, match="there is no evidence"):
        await read(evidence, f"memory://patch_blobs/git/1:abc/{'a' * 64}")


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "mr://project/1",
        "file:///etc/passwd",
        "memory://attachments/../x",
        f"memory://attachments/01/{'a' * 64}",
        f"memory://attachments/{1 << 63}/{'a' * 64}",
        f"blobs/aa/{'a' * 64}",
    ],
)
async def test_what_is_no_evidence_uri_is_refused_by_name(evidence: Evidence, uri: str) -> None:
    with pytest.raises(InputError) as refused:
        await read(evidence, uri)
    assert set(refused.value.context["fields"]) == {"uri"}


@pytest.mark.parametrize(
    ("given", "field"),
    [({"offset": -1}, "offset"), ({"offset": 7}, "offset"), ({"max_bytes": 0}, "max_bytes"),
     ({"max_bytes": (1 << 20) + 1}, "max_bytes")],
)  # fmt: skip
async def test_a_part_that_is_not_there_is_refused_by_name(
    evidence: Evidence, given: dict, field: str
) -> None:
    kept = await uploaded(evidence, "A log.")
    with pytest.raises(InputError) as refused:
        await read(evidence, kept.uri, **given)
    assert set(refused.value.context["fields"]) == {field}


async def test_damaged_bytes_are_never_given_out_and_uploading_mends_them(
    evidence: Evidence, settings: Settings, dsn: str
) -> None:
    kept = await uploaded(evidence, "A log.")
    (row,) = rows(dsn)
    file = (settings.artifacts_dir or Path()) / row["artifact_key"]
    file.write_text("A lie.")
    with pytest.raises(ArtifactCorrupt):
        await read(evidence, kept.uri, max_bytes=1)
    file.unlink()
    with pytest.raises(ArtifactCorrupt, match="not in the artifact store"):
        await read(evidence, kept.uri)
    assert (await uploaded(evidence, "A log.")).uri == kept.uri
    assert (await read(evidence, kept.uri)).content == "A log."


async def test_the_bytes_are_there_before_the_row(evidence: Evidence, dsn: str, settings: Settings) -> None:
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE logbook.attachments ADD CONSTRAINT broken CHECK (false) NOT VALID")
        with pytest.raises(Exception, match="broken"):
            await uploaded(evidence, "A log.")
        connection.execute("ALTER TABLE logbook.attachments DROP CONSTRAINT broken")
    assert rows(dsn) == []
    assert [p.name for p in (settings.artifacts_dir or Path()).rglob("*") if p.is_file()] == [
        hashlib.sha256(b"A log.").hexdigest()
    ]
    kept = await uploaded(evidence, "A log.")
    assert not kept.deduplicated
    assert parse_attachment_evidence_uri(kept.uri) is not None


async def test_damage_far_from_the_part_that_is_read_is_noticed(
    evidence: Evidence, settings: Settings, dsn: str
) -> None:
    kept = await uploaded(evidence, "x" * (LIMIT - 1) + "y")
    (row,) = rows(dsn)
    with ((settings.artifacts_dir or Path()) / row["artifact_key"]).open("r+b") as file:
        file.seek(LIMIT - 1)
        file.write(b"z")
    with pytest.raises(ArtifactCorrupt):
        await read(evidence, kept.uri, max_bytes=1)


async def test_files_are_written_beside_the_event_loop_not_in_it(db: AsyncExecutor, tmp_path: Path) -> None:
    """A slow disk holds up one upload, not the gateway."""

    class SlowDisk(LocalArtifacts):
        entered, let_go = threading.Event(), threading.Event()

        @contextmanager
        def keeping(self, *given: Any, **more: Any) -> Iterator[Artifact]:
            self.entered.set()
            assert self.let_go.wait(10), "the loop stood still"
            with super().keeping(*given, **more) as artifact:
                yield artifact

    disk = SlowDisk(tmp_path)
    evidence = Evidence(db, disk, Placement(db, "default"), max_bytes=LIMIT)
    uploading = asyncio.create_task(uploaded(evidence, "A log."))
    async with asyncio.timeout(20):
        while not disk.entered.is_set():
            await asyncio.sleep(0.005)
    assert not uploading.done()
    disk.let_go.set()
    assert (await uploading).ok
