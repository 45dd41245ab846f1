"""What the conformance tests need beyond the parts that every test has."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import node


@pytest.fixture(scope="session")
def node_packages() -> Path:
    """Installed once; where that fails it is tried once, and every test that needs them fails."""
    return node.installed()
