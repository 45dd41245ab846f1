"""The id that ties a reply to its logs and rows."""

from __future__ import annotations

import re
from contextvars import copy_context

import pytest

from engram.kernel import correlation
from engram.kernel.correlation import accept_or_new, current_or_new, new_correlation_id

FRESH = re.compile(r"corr-[0-9a-f]{16}")


def test_fresh_ids_have_the_documented_form_and_differ() -> None:
    ids = {new_correlation_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(FRESH.fullmatch(one) for one in ids)


@pytest.mark.parametrize(
    "offered",
    ["corr-0123456789abcdef", "abcd", "req:42.a_b-c", "0" * 64, "550e8400-e29b-41d4-a716-446655440000"],
)
def test_a_sane_id_is_kept(offered: str) -> None:
    assert accept_or_new(offered) == offered


@pytest.mark.parametrize(
    "offered",
    [
        None,
        "",
        "abc",
        "a" * 65,
        "-leading-dash",
        "with space",
        "line\nbreak",
        "trailing\n",
        "tab\there",
        "quote'--",
        "<script>",
        "日志编号一",
        "a/b/c/d",
        "x\x00yz",
    ],
)
def test_anything_else_is_replaced(offered: str | None) -> None:
    accepted = accept_or_new(offered)
    assert accepted != offered
    assert FRESH.fullmatch(accepted)


def test_the_current_id_belongs_to_its_context() -> None:
    def inside() -> str:
        correlation.current.set("corr-inside")
        return current_or_new()

    assert copy_context().run(inside) == "corr-inside"
    assert correlation.current.get() is None
    assert FRESH.fullmatch(current_or_new())
