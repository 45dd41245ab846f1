"""Time comes in from outside."""

from __future__ import annotations

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path

import engram
from engram.kernel.clock import SYSTEM_CLOCK, ManualClock


def test_the_system_clock_is_aware_and_goes_forward() -> None:
    before, tick = SYSTEM_CLOCK.now(), SYSTEM_CLOCK.monotonic()
    assert before.tzinfo is UTC
    assert SYSTEM_CLOCK.now() >= before
    assert SYSTEM_CLOCK.monotonic() >= tick
    assert abs(before - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(datetime(2030, 1, 1, tzinfo=UTC))
    assert (clock.now(), clock.monotonic()) == (datetime(2030, 1, 1, tzinfo=UTC), 0.0)
    clock.advance(90.5)
    assert clock.now() == datetime(2030, 1, 1, 0, 1, 30, 500_000, tzinfo=UTC)
    assert clock.monotonic() == 90.5
    assert clock.now() == clock.now()


def test_only_the_clock_asks_the_machine_for_the_date() -> None:
    """A decision that hides a call to `datetime.now` cannot be tested without waiting."""
    asking = set()
    for path in Path(engram.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today"):
                base = node.value
                if isinstance(base, ast.Name) and base.id in ("datetime", "date"):
                    asking.add(path.name)
    assert asking == {"clock.py"}
