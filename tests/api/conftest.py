"""The whole gateway, served over HTTP, on real parts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import httpx2
import pytest

from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from support.parts import used
from support.serving import serving


@pytest.fixture
def gateway(settings: Settings) -> Iterator[str]:
    used("MCP client", f"real: official SDK {version('mcp')}")
    with serving(build_app(settings)) as url:
        yield url


@pytest.fixture
def http(gateway: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway, trust_env=False) as client:
        yield client
