"""The official conformance suite, run against a gateway that is up."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from conformance.not_applicable import NOT_APPLICABLE
from support import node

SECONDS = 100


@dataclass(frozen=True)
class Run:
    """One edition of the suite, asked for the scenarios of one revision."""

    revision: str
    package: str
    choice: tuple[str, str]

    @property
    def version(self) -> str:
        pinned = json.loads((node.PINNED / "package.json").read_text("utf-8"))["dependencies"]
        return pinned[self.package].rpartition("@")[2]

    @property
    def heading(self) -> str:
        return f"{self.revision}, suite {self.version}"


RUNS = (
    Run("2025", "conformance-2025", ("--suite", "all")),
    Run("2025-11-25", "conformance-2026", ("--requirements", "2025-11-25")),
    Run("2026-07-28", "conformance-2026", ("--requirements", "2026-07-28")),
)


@dataclass(frozen=True)
class Outcome:
    """Of one scenario: how many checks held, and what the suite said of the others."""

    held: int
    troubles: tuple[str, ...]

    @property
    def passes(self) -> bool:
        return self.held > 0 and not self.troubles


def outcomes(run: Run, url: str, folder: Path) -> dict[str, Outcome]:
    """By scenario. The suite leaves a folder for each; its exit code is not asked."""
    program = node.installed() / "node_modules" / run.package / "dist" / "index.js"
    command = [str(node.NODE), str(program), "server", "--url", f"{url}/mcp", "-o", str(folder), *run.choice]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    found = {_scenario(path.parent.name): _outcome(path) for path in folder.glob("*/checks.json")}
    assert found, done.stdout + done.stderr
    return found


def _scenario(folder: str) -> str:
    named = re.fullmatch(r"server-(.+)-\d{4}-\d\d-\d\dT[\d-]+Z", folder)
    assert named, folder
    return named[1]


def _outcome(path: Path) -> Outcome:
    checks = json.loads(path.read_text("utf-8"))
    troubles = tuple(
        f"{check['id']}: {check.get('errorMessage') or check['status']}"
        for check in checks
        if check["status"] in ("FAILURE", "WARNING")
    )
    return Outcome(sum(check["status"] == "SUCCESS" for check in checks), troubles)


def cell(run: Run, scenario: str, outcome: Outcome) -> str:
    """As the document has it. A scenario that does not apply names its reason, in italics."""
    reason = NOT_APPLICABLE[run.revision].get(scenario)
    return f"passes ({outcome.held})" if reason is None else f"*{reason}*"
