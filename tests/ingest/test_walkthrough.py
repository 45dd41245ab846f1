"""`docs/ingest-walkthrough.md` and `docs/kafka-walkthrough.md`, run command by command on a real stack."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engram.web.sockets import free_port
from support.processes import environment, eventually, started

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("ingest-crashes")]

DOCS = Path(__file__).parents[2] / "docs"
MARK = "--- next ---"


def blocks(document: str, language: str) -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", document, re.DOTALL | re.MULTILINE))


def settings(document: str) -> dict[str, str]:
    """What the first step exports."""
    words = [shlex.split(line) for line in blocks(document, "sh").splitlines()]
    assert words
    assert all(word[0] == "export" for word in words)
    return dict(word[1].split("=", 1) for word in words)


def steps(document: str) -> list[tuple[str, list[str]]]:
    """Each command with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in blocks(document, "console").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line:
            found[-1][1].append(line)
    return found


def matches(expected: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), line) is not None


@pytest.mark.parametrize("name", ["ingest-walkthrough.md", "kafka-walkthrough.md"])
def test_the_walk(tmp_path: Path, name: str) -> None:
    document = (DOCS / name).read_text("utf-8")
    own = {"ENGRAM_DATA_DIR": str(tmp_path / "data"), "GATEWAY_PORT": str(free_port())}
    env = environment(**own, **settings(document))
    with started("up", env=env, log=tmp_path / "up.log") as process:
        log = tmp_path / "up.log"
        eventually(lambda: "engram is up" in log.read_text() or process.poll(), "engram up")
        assert process.poll() is None, log.read_text()
        script = [f'engram() {{ {shlex.quote(sys.executable)} -m engram "$@"; }}']
        script += [f"{command} 2>&1\necho '{MARK}'" for command, _ in steps(document)]
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    printed = [part.strip("\n").splitlines() for part in done.stdout.split(f"{MARK}\n")]
    assert len(steps(document)) > 8
    for (command, expected), lines in zip(steps(document), printed, strict=False):
        said = [line for line in lines if line.strip()]
        assert len(said) == len(expected), (command, said)
        wrong = [pair for pair in zip(expected, said, strict=True) if not matches(*pair)]
        assert not wrong, (command, wrong)
