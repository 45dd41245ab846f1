"""What the documents say of the code is taken from the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram.ingest.lifecycle import TASK
from engram.kernel.failpoints import FAILPOINTS
from engram.logbook.lifecycle import OUTBOX

DOCS = Path(__file__).parents[2] / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")


@pytest.mark.parametrize("document", ["architecture.md", "lease-protocol.md"])
def test_the_lease_diagram_is_the_state_machines_own(document: str) -> None:
    assert f"```mermaid\n{OUTBOX.mermaid()}```" in (DOCS / document).read_text("utf-8")


def test_the_diagram_of_a_task_is_the_state_machines_own() -> None:
    assert f"```mermaid\n{TASK.mermaid()}```" in (DOCS / "ingest.md").read_text("utf-8")


def test_every_failpoint_is_explained() -> None:
    assert [name for name in FAILPOINTS if f"| `{name}` |" not in ARCHITECTURE] == []
