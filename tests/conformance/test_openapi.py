"""schemathesis reads /openapi.json and asks every route for what it promises, and for what it does not.

No 5xx, no status or content type that is not declared, no reply that its schema
does not allow, no request against the schema that is let through, no operation
that says it needs a token and answers without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from engram.api.authentication import PUBLIC
from engram.assembly.gateway import build_app
from engram.kernel.settings import Settings
from support.admission import admitted
from support.parts import used
from support.serving import serving

HERE = Path(__file__).parent
PROGRAM = str(Path(sys.executable).with_name("schemathesis"))
SEED = os.environ.get("ENGRAM_TEST_SEED") or "1"
EXAMPLES = 5

Statuses = Mapping[str, Counter[int]]


@pytest.fixture
def guarded(settings: Settings, tmp_path: Path) -> tuple[Settings, str]:
    file = tmp_path / "tokens.toml"
    secret = admitted(file, "ada", ["read", "write", "admin"])
    return replace(settings, tokens_file=file), secret


def asked(settings: Settings, folder: Path, scale: float, *more: str) -> Statuses:
    """How often each operation answered with which status; fails with schemathesis's own report."""
    used("schemathesis", f"real: {version('schemathesis')}")
    report = folder / "report.ndjson"
    with serving(build_app(settings)) as url:
        words = [
            *(PROGRAM, "--config-file", str(HERE / "schemathesis.toml"), "run", f"{url}/openapi.json"),
            *("--seed", SEED, "--max-examples", str(max(1, round(EXAMPLES * scale))), "--no-color"),
            *("--report", "ndjson", "--report-ndjson-path", str(report), *more),
        ]
        environment = {
            **os.environ,
            "SCHEMATHESIS_HOOKS": "conformance.plausible",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100 * scale,
            check=False,
        )
    assert done.returncode == 0, f"ENGRAM_TEST_SEED={SEED}\n{done.stdout}{done.stderr}"
    return _statuses(report.read_text("utf-8").splitlines())


def _statuses(lines: Sequence[str]) -> Statuses:
    counted: dict[str, Counter[int]] = defaultdict(Counter)
    for event in map(json.loads, lines):
        recorder = event.get("ScenarioFinished", {}).get("recorder", {})
        for exchange in recorder.get("interactions", {}).values():
            counted[recorder["label"]][exchange["response"]["status_code"]] += 1
    return counted


def operations(settings: Settings) -> set[str]:
    paths = build_app(settings).openapi()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


# They ask for what an earlier reply named, and whether one came before is not in our hands.
NEED_AN_EARLIER_REPLY = {
    "GET /api/knowledge/documents/{documentId}",
    "DELETE /api/knowledge/documents/{documentId}",
    "GET /api/knowledge/tasks/{taskId}",
    # An end, or a death, that no worker brings about here.
    "GET /api/knowledge/tasks/{taskId}/events",
    "POST /api/knowledge/tasks/{taskId}/retry",
    "POST /evidence/read",
    "POST /memory/forget",
    "GET /v1/sandboxes/{sandbox_id}",
    "DELETE /v1/sandboxes/{sandbox_id}",
    "POST /v1/sandboxes/{sandbox_id}/exec",
    "POST /v1/sandboxes/{sandbox_id}/extend_ttl",
    "POST /v1/sandboxes/{sandbox_id}/stop",
    "GET /v1/sandboxes/{sandbox_id}/files/{path}",
    "PUT /v1/sandboxes/{sandbox_id}/files/{path}",
    "DELETE /v1/sandboxes/{sandbox_id}/files/{path}",
}


def answered(statuses: Statuses) -> set[str]:
    return {name for name, counted in statuses.items() if any(status < 300 for status in counted)}


def check_that_all_were_answered(statuses: Statuses, settings: Settings) -> None:
    """Otherwise nothing was learnt of what a reply looks like."""
    missing = operations(settings) - answered(statuses)
    assert missing <= NEED_AN_EARLIER_REPLY, "tests/conformance/plausible.py makes sense of requests"


def test_with_a_token(guarded: tuple[Settings, str], tmp_path: Path, scale: float) -> None:
    settings, secret = guarded
    statuses = asked(settings, tmp_path, scale, "--header", f"Authorization: Bearer {secret}")
    check_that_all_were_answered(statuses, settings)


def test_without_a_token(guarded: tuple[Settings, str], tmp_path: Path, scale: float) -> None:
    settings, _ = guarded
    statuses = asked(settings, tmp_path, scale, "--phases", "coverage")
    let_in = {name.partition(" ")[2] for name in answered(statuses)}
    assert set(statuses) == operations(settings)
    assert let_in == PUBLIC & {name.partition(" ")[2] for name in statuses}


def test_where_nobody_needs_one_and_the_memory_server_is_gone(
    settings: Settings, tmp_path: Path, scale: float
) -> None:
    gone = replace(settings, openmemory_base_url="http://127.0.0.1:9")
    check_that_all_were_answered(asked(gone, tmp_path, scale), gone)
