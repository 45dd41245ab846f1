"""The closing report: which parts were real, which stood in, what was skipped.

A fixture that brings up a part says so with `used`; what no test used is not
claimed. Workers of a parallel run hand their list to the one that reports.
"""

from __future__ import annotations

from typing import Any

import pytest

_parts: dict[str, str] = {}


def used(part: str, how: str) -> None:
    """`how` starts with "real" or "stand-in"."""
    if not how.startswith(("real", "stand-in")):
        raise ValueError(how)
    _parts[part] = how


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["parts"] = dict(_parts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    _parts.update(getattr(node, "workeroutput", {}).get("parts", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("parts")
    for part, how in sorted(_parts.items()):
        terminalreporter.write_line(f"{part:<16} {how}")
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(f"{'skipped':<16} {len(skipped)} test(s)")
