"""Items, events, attachments and key-value cursors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from engram.kernel.errors import ConstraintViolated
from engram.logbook import items, kv
from engram.logbook.config import Config

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
