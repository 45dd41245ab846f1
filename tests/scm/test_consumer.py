"""The consumer: facts become cards by the ordinary path, once, whatever fails in between."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from engram.assembly.parts import open_client
from engram.gateway.callers import Caller
from engram.gateway.evidence import Evidence, ReadRequest
from engram.gateway.memory_query import MemoryQuery, QueryRequest
from engram.gateway.memory_store import MemoryStore
from engram.gateway.placement import Placement
from engram.gateway.scm_consumer import NAMESPACE, Consumed, ScmConsumer, cursor_key
from engram.kernel.errors import EngramError, InputError, NotFound, StateConflict
from engram.kernel.settings import Settings
from engram.logbook import governance, kv
from engram.logbook.config import Config
from engram.postgres.executors import AsyncExecutor
from engram.scm import store as facts_store
from engram.scm.source import Page
from support.backend import Backend
from support.faults import Fault
from support.gitrepo import GitRepo
from support.subversion import SvnRepo

pytestmark = pytest.mark.anyio


@pytest.fixture
async def consumer(db: AsyncExecutor, settings: Settings) -> AsyncIterator[ScmConsumer]:
    async with open_client(settings) as client:
        yield ScmConsumer(db, MemoryStore(db, client, settings))


@pytest.fixture
def team_open(config: Config) -> None:
    governance.update_settings("default", True, None, "ada", config)


async def followed(follower, origin: GitRepo):
    repo = await follower.add("git", origin.url)
    await follower.sync(repo)
    await follower.materialize(repo)
    return repo


async def cursor(follower, repo) -> object:
    return await follower.db.run(kv.get_value.query(NAMESPACE, cursor_key(repo.repo_id)))


@pytest.mark.usefixtures("team_open")
async def test_a_commit_becomes_a_card_with_its_evidence(
    follower, consumer: ScmConsumer, origin: GitRepo, backend: Backend
) -> None:
    message = "Fence the leases\n\nA paused worker may wake up late, so every claim draws a token."
    sha = origin.commit(
        message, {"src/queue/lease.py": "1\n", "docs/x.md": "1\n", "src/queue/claim.py": "2\n"}
    )
    repo = await followed(follower, origin)
    done = await consumer.run_once(repo.repo_id, "default")

    assert (done.stored, done.facts) == (1, 1)
    (kept,) = backend.kept()
    assert "space:team:default" in kept["tags"]
    for part in ("# Fence the leases", "- Kind: FACT", "- Module: src/queue", "every claim draws a token",
                 f"Source: git {sha[:12]} by Ada on 2023-11-14", "src/queue/lease.py"):  # fmt: skip
        assert part in kept["content"]
    uri = follower.asked("SELECT uri FROM scm.patch_blobs")[0]["uri"]
    assert uri in kept["content"]
    audit = follower.asked("SELECT actor_user_id, action, evidence_refs_json FROM governance.write_audit")[0]
    assert (audit["actor_user_id"], audit["action"]) == ("scm", "allow")
    assert audit["evidence_refs_json"]["patches"][0]["artifact_uri"] == uri
    assert len(audit["evidence_refs_json"]["patches"][0]["sha256"]) == 64
    candidate = follower.asked("SELECT * FROM analysis.knowledge_candidates")[0]
    assert (candidate["target_space"], candidate["title"]) == ("team:default", "Fence the leases")
    assert candidate["evidence_refs_json"]["patches"][0]["artifact_uri"] == uri


@pytest.mark.usefixtures("team_open")
async def test_a_repeat_and_a_replay_store_nothing_new(
    follower, consumer: ScmConsumer, origin: GitRepo, backend: Backend
) -> None:
    origin.commit("one", {"a": "1\n"})
    origin.commit("two", {"a": "2\n"})
    repo = await followed(follower, origin)
    await consumer.run_once(repo.repo_id, "default")
    assert (await consumer.run_once(repo.repo_id, "default")).facts == 0
    await consumer.replay(repo.repo_id)
    again = await consumer.run_once(repo.repo_id, "default")
    assert (again.repeated, again.stored) == (2, 0)
    assert len(backend.contents()) == 2
    assert len(follower.asked("SELECT candidate_id FROM analysis.knowledge_candidates")) == 2


@pytest.mark.usefixtures("team_open")
async def test_a_dead_memory_server_parks_the_cards_and_the_cursor_moves(
    follower, consumer: ScmConsumer, origin: GitRepo, backend: Backend
) -> None:
    origin.commit("one", {"a": "1\n"})
    repo = await followed(follower, origin)
    backend.faults.fail(Fault.DROP)
    done = await consumer.run_once(repo.repo_id, "default")
    assert done.parked == 1
    assert len(follower.asked("SELECT outbox_id FROM logbook.outbox_memory WHERE status = 'pending'")) == 1
    assert await cursor(follower, repo) is not None


@pytest.mark.usefixtures("team_open")
async def test_while_the_memory_server_is_away_a_card_is_found_once(
    follower, consumer: ScmConsumer, origin: GitRepo, backend: Backend, settings: Settings
) -> None:
    origin.commit("Fence the leases", {"a": "1\n"})
    repo = await followed(follower, origin)
    await consumer.run_once(repo.repo_id, "default")
    backend.faults.fail(Fault.DROP, path="/memory/query")
    async with open_client(settings) as client:
        asked = QueryRequest("fence leases", "ada", "corr-1")
        reply = await MemoryQuery(follower.db, client, settings).query(asked)
    assert reply.degraded
    assert [found["source"] for found in reply.results] == ["logbook"]


@pytest.mark.usefixtures("team_open")
async def test_an_error_leaves_the_cursor_and_the_next_run_goes_on(
    follower, consumer: ScmConsumer, origin: GitRepo, backend: Backend
) -> None:
    origin.commit("one", {"a": "1\n"})
    repo = await followed(follower, origin)
    await consumer.run_once(repo.repo_id, "default")
    before = await cursor(follower, repo)
    origin.commit("two", {"a": "2\n"})
    await follower.sync(repo)
    follower.asked("ALTER TABLE governance.write_audit ADD CONSTRAINT closed CHECK (audit_id = 0) NOT VALID")
    with pytest.raises(EngramError):
        await consumer.run_once(repo.repo_id, "default")
    assert await cursor(follower, repo) == before
    follower.asked("ALTER TABLE governance.write_audit DROP CONSTRAINT closed")
    assert (await consumer.run_once(repo.repo_id, "default")).stored == 1
    assert len(backend.contents()) == 2


async def test_a_closed_team_space_diverts_and_that_is_final(
    follower, consumer: ScmConsumer, origin: GitRepo
) -> None:
    origin.commit("one", {"a": "1\n"})
    repo = await followed(follower, origin)
    assert (await consumer.run_once(repo.repo_id, "default")).diverted == 1
    assert await cursor(follower, repo) is not None


@pytest.mark.usefixtures("team_open")
async def test_what_is_not_worth_a_card(follower, consumer: ScmConsumer, origin: GitRepo) -> None:
    base = origin.commit("base", {"a": "1\n"})
    origin.commit("bump", {"a": "2\n"}, author=b"dependabot[bot] <x@y>")
    origin.commit("bulk", {f"f{n}": "1" for n in range(301)})
    side = origin.commit("side", {"vendor/s": "1"}, ref="refs/heads/side", parents=[base])
    origin.commit("merge", parents=[origin.tip("refs/heads/main"), side])
    origin.commit("lost", {"a": "9\n"}, ref="refs/heads/lost", parents=[base])
    repo = await followed(follower, origin)
    origin.move("refs/heads/lost", None)
    await follower.sync(repo)
    await consumer.set_rules("default", {"never_paths": ["vendor/*"]})
    done = await consumer.run_once(repo.repo_id, "default")
    assert (done.stored, done.unworthy) == (1, {"bot": 1, "bulk": 1, "merge": 1, "path": 1, "superseded": 1})
    await consumer.set_rules("default", {"merges": True, "bots": [], "bulk": True})
    await consumer.replay(repo.repo_id)
    again = await consumer.run_once(repo.repo_id, "default")
    assert (again.repeated, again.stored, again.unworthy) == (1, 4, {"superseded": 1})
    with pytest.raises(InputError, match="colour is no rule"):
        await consumer.set_rules("default", {"colour": 1})


@pytest.mark.usefixtures("team_open")
async def test_a_merge_request_that_is_merged_later_is_seen_then(
    follower, consumer: ScmConsumer, backend: Backend
) -> None:
    repo = await follower.add("gitlab", "http://127.0.0.1:1/group/project")
    held = await follower.db.run(facts_store.acquire(repo.repo_id, "me", 60, "strict"))
    row = {"mr_iid": 7, "state": "opened", "title": "Retry less", "description": "It hammered the server.",
           "author_name": "ada", "source_branch": "x", "target_branch": "main", "web_url": "https://x.example/7"}  # fmt: skip
    await follower.db.run(facts_store.put_page(held, Page("mrs", [row])))
    assert (await consumer.run_once(repo.repo_id, "default")).unworthy == {"not merged": 1}
    await follower.db.run(facts_store.put_page(held, Page("mrs", [row])))
    assert (await consumer.run_once(repo.repo_id, "default")).facts == 0, "nothing has changed"
    await follower.db.run(facts_store.put_page(held, Page("mrs", [{**row, "state": "merged"}])))
    assert (await consumer.run_once(repo.repo_id, "default")).stored == 1
    assert "Source: mr !7 by ada, https://x.example/7" in backend.contents()[0]


@pytest.mark.usefixtures("team_open")
async def test_revisions_keep_their_own_cursor_which_a_person_may_set_back(
    follower, consumer: ScmConsumer, tmp_path
) -> None:
    origin = SvnRepo(tmp_path / "svn")
    for n in range(3):
        origin.put("trunk.txt", f"{n}\n", f"revision {n}")
    repo = await follower.add("svn", origin.url)
    await follower.sync(repo)
    assert (await consumer.run_once(repo.repo_id, "default")).stored == 3
    assert (await cursor(follower, repo))["last_processed_rev"] == 3
    await follower.db.run(kv.put_value.query(NAMESPACE, cursor_key(repo.repo_id), {"last_processed_rev": 1}))
    assert (await consumer.run_once(repo.repo_id, "default")).repeated == 2


@pytest.mark.usefixtures("team_open")
async def test_a_consumer_whose_cursor_somebody_moved_stops_and_nothing_is_doubled(
    follower, consumer: ScmConsumer, origin: GitRepo, backend: Backend, config: Config
) -> None:
    origin.commit("one", {"a": "1\n"})
    origin.commit("two", {"a": "2\n"})
    repo = await followed(follower, origin)

    def somebody_else(done: Consumed) -> None:
        kv.put_value(NAMESPACE, cursor_key(repo.repo_id), {"changed_seq": 0}, config)

    overtaken = ScmConsumer(consumer.db, consumer.store, somebody_else)
    with pytest.raises(StateConflict, match="consumed by somebody else"):
        await overtaken.run_once(repo.repo_id, "default")
    assert await cursor(follower, repo) == {"changed_seq": 0}
    assert (await consumer.run_once(repo.repo_id, "default")).repeated == 2
    assert len(backend.contents()) == 2


async def test_a_patch_is_read_by_those_who_may_read_its_project(
    follower, db: AsyncExecutor, origin: GitRepo
) -> None:
    origin.commit("one", {"a": "1\n"})
    await followed(follower, origin)
    uri = follower.asked("SELECT uri FROM scm.patch_blobs")[0]["uri"]
    evidence = Evidence(db, follower.artifacts, Placement(db, "default"), max_bytes=1000)
    reply = await evidence.read(ReadRequest(Caller("ada"), "corr-1", uri))
    assert reply.content.startswith("diff --git a/a b/a")
    assert (reply.kind, reply.space) == ("diff", "team:default")
    stranger = Caller("eve", shared_spaces=frozenset({"team:other"}))
    with pytest.raises(NotFound):
        await evidence.read(ReadRequest(stranger, "corr-2", uri))
    with pytest.raises(NotFound):
        await evidence.read(ReadRequest(Caller("ada"), "corr-3", uri[:-64] + "0" * 64))
    huge = uri.replace("/1:", f"/{1 << 70}:")
    with pytest.raises(NotFound):
        await evidence.read(ReadRequest(Caller("ada"), "corr-4", huge))
