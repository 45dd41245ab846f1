"""The official conformance suite against engram's own mount: guards, tokens and correlation in front.

What does not apply is listed with its reason; all else passes, and the document says the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from conformance.document import DOCUMENT, documented, rendered
from conformance.fixture_server import FIXTURES, serve
from conformance.not_applicable import NOT_APPLICABLE, REASONS
from conformance.suite import RUNS, Run, cell, outcomes
from engram.api.app import create_app
from engram.api.tools import TOOLS
from engram.assembly.callers import tokens_of
from engram.assembly.gateway import open_services
from engram.kernel.settings import Settings
from support.admission import admitted
from support.parts import used
from support.serving import serving

pytestmark = pytest.mark.usefixtures("node_packages")


class WithToken:
    """The suite cannot send a token; this sends it in its place."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._header = (b"authorization", f"Bearer {secret}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [*scope["headers"], self._header]}
        await self._app(scope, receive, send)


@pytest.fixture(params=["open", "tokens"])
def app(request: pytest.FixtureRequest, settings: Settings, tmp_path: Path) -> ASGIApp:
    if request.param == "open":
        return create_app(settings, lambda: open_services(settings), serve=serve)
    file = tmp_path / "tokens.toml"
    secret = admitted(file, "ada", ["read", "write"])
    guarded = replace(settings, tokens_file=file)
    tokens = tokens_of(guarded)
    return WithToken(create_app(guarded, lambda: open_services(guarded), tokens=tokens, serve=serve), secret)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.revision)
def test_what_applies_passes_and_the_document_says_so(run: Run, app: ASGIApp, tmp_path: Path) -> None:
    used(f"MCP suite {run.revision}", f"real: official conformance suite {run.version}")
    folder = tmp_path / "results"
    folder.mkdir()
    with serving(app) as url:
        found = outcomes(run, url, folder)
    listed = NOT_APPLICABLE[run.revision]
    failing = {name: outcome.troubles for name, outcome in found.items() if not outcome.passes}
    assert {name: said for name, said in failing.items() if name not in listed} == {}
    assert set(listed) - set(failing) == set(), "these pass now, or are gone: take them off the list"
    cells = {name: cell(run, name, outcome) for name, outcome in found.items()}
    assert documented(run.heading) == cells, "run `make conformance`"


def test_the_document_is_what_the_script_writes() -> None:
    columns = {run.heading: documented(run.heading) for run in RUNS}
    assert rendered(columns) in DOCUMENT.read_text("utf-8")


def test_every_reason_is_used_and_every_use_has_a_reason() -> None:
    assert {why for listed in NOT_APPLICABLE.values() for why in listed.values()} == set(REASONS)


def test_a_fixture_takes_no_tools_place() -> None:
    assert not set(FIXTURES) & set(TOOLS)
