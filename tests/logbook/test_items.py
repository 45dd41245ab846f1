"""Items, events, attachments and key-value cursors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engram.kernel.errors import ConstraintViolated
from engram.logbook import items, kv
from engram.logbook.config import Config
from engram.logbook.connection import run
from engram.logbook.items import Attached, Attachment, Event, Recorded
from engram.postgres.pool import connect

SHA = "a" * 64


def test_an_item_is_created_listed_and_closed_once(config: Config) -> None:
    first = items.create_item("task", "Mend the webhook", "payments", "ada", {"n": 1}, config)
    second = items.create_item("task", "Rotate the key", "payments", config=config)
    items.create_item("task", "Elsewhere", "other", config=config)
    assert [i["item_id"] for i in items.list_items("payments", config=config)] == [second, first]
    assert [i["item_id"] for i in items.list_items("payments", limit=1, before_id=second, config=config)] == [
        first
    ]
    assert items.close_item(first, config)
    assert not items.close_item(first, config)
    assert [i["item_id"] for i in items.list_items("payments", "open", config=config)] == [second]
    found = items.get_item(first, config)
    assert found is not None
    assert (found["status"], found["meta_json"], found["owner_user_id"]) == ("closed", {"n": 1}, "ada")
    assert items.get_item(10_000, config) is None


def test_an_item_needs_a_title(config: Config) -> None:
    with pytest.raises(ConstraintViolated) as refused:
        items.create_item("task", "", "payments", config=config)
    assert refused.value.constraint == "items_title_given"


def test_events_are_read_by_space_item_type_and_words(config: Config) -> None:
    item = items.create_item("task", "Mend the webhook", "payments", config=config)
    team = items.add_event("note", "team:payments", "The webhook times out.", item, "ada", {"a": 1}, config)
    cjk = items.add_event("note", "team:payments", "租约过期", item, config=config)
    items.add_event("note", "private:bob", "Bob's webhook thoughts.", item, "bob", config=config)

    def ids(*spaces: str, **kw: object) -> list[int]:
        return [e["event_id"] for e in items.list_events(spaces, config=config, **kw)]

    assert ids("team:payments") == [cjk, team]
    assert ids("team:payments", text="webhook") == [team]
    assert ids("team:payments", text="租约") == [cjk]
    assert ids("team:payments", text="!!!") == []
    assert ids("team:payments", item_id=item + 1) == []
    assert ids("team:payments", event_type="decision") == []
    assert ids("private:eve", text="webhook") == []


def test_an_event_of_no_item_is_refused_by_name(config: Config) -> None:
    with pytest.raises(ConstraintViolated) as refused:
        items.add_event("note", "team:a", "x", 999, config=config)
    assert refused.value.constraint == "events_item_id_fkey"


def test_attachments_point_into_the_artifact_store(config: Config) -> None:
    item = items.create_item("task", "Mend the webhook", "payments", config=config)
    attachment = items.add_attachment(
        "log", f"blobs/aa/{SHA}", SHA, 12, item, "ada", {"name": "x.log"}, config
    )
    found = items.get_attachment(attachment, config)
    assert found is not None
    assert (found["sha256"], found["size_bytes"], found["owner"]) == (SHA, 12, "ada")
    assert [a["attachment_id"] for a in items.list_attachments(item, config)] == [attachment]
    with pytest.raises(ConstraintViolated):
        items.add_attachment("log", "k", "not a hash", 12, config=config)


def test_a_key_is_put_read_listed_and_deleted(config: Config) -> None:
    assert kv.get_value("scm.sync", "git_cursor:1", "nothing", config) == "nothing"
    kv.put_value("scm.sync", "git_cursor:1", {"tips": ["a"]}, config)
    kv.put_value("scm.sync", "svn_cursor:1", {"last_rev": 1000}, config)
    kv.put_value("gateway.consume", "git_cursor:1", None, config)
    assert kv.get_value("scm.sync", "git_cursor:1", config=config) == {"tips": ["a"]}
    assert kv.get_value("gateway.consume", "git_cursor:1", "nothing", config) is None
    assert [r["key"] for r in kv.list_values("scm.sync", "svn", config)] == ["svn_cursor:1"]
    assert kv.delete_value("scm.sync", "svn_cursor:1", config)
    assert not kv.delete_value("scm.sync", "svn_cursor:1", config)


def test_a_key_moves_only_from_the_expected_value(config: Config) -> None:
    assert kv.compare_and_set("n", "k", kv.ABSENT, {"rev": 1}, config)
    assert not kv.compare_and_set("n", "k", kv.ABSENT, {"rev": 9}, config)
    assert not kv.compare_and_set("n", "k", {"rev": 2}, {"rev": 3}, config)
    assert kv.compare_and_set("n", "k", {"rev": 1}, {"rev": 2}, config)
    assert kv.get_value("n", "k", config=config) == {"rev": 2}


def test_of_many_that_move_a_key_at_once_each_step_is_taken_once(config: Config, scale: float) -> None:
    kv.put_value("n", "k", 0, config)
    steps = int(40 * scale)

    def climb(_: int) -> int:
        taken = 0
        while (now := kv.get_value("n", "k", config=config)) < steps:
            taken += kv.compare_and_set("n", "k", now, now + 1, config)
        return taken

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(climb, range(8))) == steps


def test_items_are_found_in_several_projects_by_words_and_id(config: Config) -> None:
    webhook = items.create_item("task", "Mend the webhook", "payments", config=config)
    lease = items.create_item("incident", "租约过期", "storage", config=config)
    hidden = items.create_item("task", "Mend the webhook too", "secret", config=config)

    def ids(*projects: str, **kw: object) -> list[int]:
        return [i["item_id"] for i in items.list_items(projects, config=config, **kw)]

    assert ids("payments", "storage", "payments") == [lease, webhook]
    assert ids("payments", "storage", text="webhook incident") == [lease, webhook]
    assert ids("payments", "storage", text="租约") == [lease]
    assert ids("payments", "storage", item_id=webhook) == [webhook]
    assert ids("payments", "storage", item_id=hidden) == []
    assert ids("payments", "storage", limit=1, before_id=lease) == [webhook]
    assert ids() == []


def test_pages_go_through_several_spaces_in_one_order(config: Config) -> None:
    spaces = ["team:a", "private:ada", "team:a"]
    made = [items.add_event("note", spaces[n % 2], f"event {n}", config=config) for n in range(9)]
    items.add_event("note", "private:bob", "not seen", config=config)
    seen: list[int] = []
    while page := items.list_events(spaces, limit=2, before_id=seen[-1] if seen else None, config=config):
        seen += [event["event_id"] for event in page]
    assert seen == made[::-1]


def test_what_was_made_under_a_request_is_found_again(config: Config) -> None:
    def item(request_id: str | None) -> int:
        return items.create_item("task", "Once", "payments", config=config, request_id=request_id)

    def event(space: str, request_id: str | None) -> Recorded:
        return run(items.record_event(Event("note", space, "Once.", request_id=request_id)), config)

    assert item("r1") == item("r1") != item("r2")
    assert item(None) != item(None)
    first = event("team:a", "r1")
    assert event("private:ada", "r1") == first, "it stays where its first try put it"
    assert event("team:a", None) != event("team:a", None)


def test_many_at_once_under_one_request_make_one(config: Config) -> None:
    def make(_: int) -> tuple[int, int]:
        item = items.create_item("task", "Once", "payments", config=config, request_id="r")
        event = run(items.record_event(Event("note", "team:a", "Once.", request_id="r")), config)
        return item, event.event_id

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(make, range(32)))) == 1


def test_the_same_bytes_are_one_attachment_of_owner_space_and_item(config: Config) -> None:
    item = items.create_item("task", "Mend the webhook", "payments", config=config)

    def attach(**kw: object) -> Attached:
        given = {"kind": "log", "artifact_key": f"blobs/aa/{SHA}", "sha256": SHA, "size_bytes": 1, **kw}
        return run(items.attach(Attachment(**given)), config)

    first = attach(owner="ada")
    assert first.fresh
    assert attach(owner="ada", kind="diff") == Attached(first.attachment_id, fresh=False)
    others = [
        attach(owner="bob"),
        attach(owner="ada", item_id=item),
        attach(owner="ada", target_space="team:payments"),
        attach(),
    ]
    assert all(other.fresh for other in others)
    assert attach() == Attached(others[-1].attachment_id, fresh=False), "nobody's is one too"
    again = items.add_attachment("log", f"blobs/aa/{SHA}", SHA, 1, owner="ada", config=config)
    assert again == first.attachment_id


@pytest.mark.parametrize(
    ("owner", "given", "space"),
    [("ada", None, "private:ada"), (None, None, "private:local"), ("ada", "team:a", "team:a")],
)
def test_an_attachment_is_its_owners_alone_unless_told_otherwise(
    config: Config, owner: str | None, given: str | None, space: str
) -> None:
    attachment = items.add_attachment(
        "log", f"blobs/aa/{SHA}", SHA, 1, owner=owner, config=config, target_space=given
    )
    found = items.get_attachment(attachment, config)
    assert found is not None
    assert found["target_space"] == space


FILL = """
INSERT INTO logbook.events (event_type, target_space, content_md)
SELECT 'note', CASE WHEN n % 500 = 0 THEN 'private:ada' ELSE 'team:a' END, 'event ' || n
FROM generate_series(1, 20000) n
"""


@pytest.mark.parametrize("spaces", [["private:ada"], ["private:nobody"], ["team:a", "private:ada"]])
def test_a_page_of_events_never_walks_through_other_spaces(dsn: str, spaces: list[str]) -> None:
    with connect(dsn) as connection:
        connection.execute(FILL)
        connection.execute("ANALYZE logbook.events")
        query = items.list_events.query(spaces, limit=20)
        plan = connection.execute(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {query.statement.text}".encode(), query.params
        ).fetchone()
    assert plan is not None
    nodes = list(plan_nodes(plan["QUERY PLAN"][0]["Plan"]))
    assert {node.get("Index Name") for node in nodes} >= {"events_by_space"}
    assert sum(node.get("Rows Removed by Filter", 0) for node in nodes) == 0
    assert all(node["Node Type"] != "Seq Scan" for node in nodes)


def plan_nodes(plan: dict) -> Iterator[dict]:
    yield plan
    for child in plan.get("Plans", []):
        yield from plan_nodes(child)
