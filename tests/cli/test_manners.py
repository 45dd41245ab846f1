"""How the command ends: in one line and the next step, and without a word if nobody reads any more."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from engram import __version__
from support.processes import command, environment, run_engram


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at the end", "at each line"])
@pytest.mark.parametrize(
    "arguments", [["settings"], ["--help"], ["store", "--help"], ["mcp-config", "cursor"]]
)
def test_whoever_stops_reading_is_told_nothing(arguments: list[str], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    env = environment(PYTHONUNBUFFERED=unbuffered)
    ran = subprocess.run(
        command(*arguments), env=env, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_output_that_cannot_be_written_is_a_failure_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            command("settings"),
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (1, b"engram: [Errno 28] No space left on device\n")


def test_the_version_is_told() -> None:
    ran = run_engram("--version", env=environment())
    assert (ran.returncode, ran.stdout) == (0, f"engram {__version__}\n")


def test_settings_are_listed_even_if_the_file_is_wrong(tmp_path: Path) -> None:
    """The error about a name sends people to the list of names."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[gateway]\nprot = 1\n", "utf-8")
    ran = run_engram("settings", env=environment(ENGRAM_CONFIG=str(wrong), ENGRAM_DATA_DIR=str(tmp_path)))
    assert ran.returncode == 1
    assert "GATEWAY_PORT=8787\n" in ran.stdout
    assert "unknown setting gateway.prot\n        did you mean gateway.port?" in ran.stderr
    assert "listed are the defaults" in ran.stderr


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/data", "/proc/none/data"])
def test_a_data_folder_that_cannot_be_is_told_with_its_setting(folder: str) -> None:
    """It is a file, it is below one, or a folder above it cannot be made."""
    ran = run_engram("up", env=environment(ENGRAM_DATA_DIR=folder))
    assert ran.returncode == 1
    first, second = ran.stderr.splitlines()
    assert first.startswith("engram: [Errno ")
    assert "ENGRAM_DATA_DIR" in second


def test_a_folder_above_it_that_is_there_is_not_the_data_folders_matter(tmp_path: Path) -> None:
    env = environment(ENGRAM_DATA_DIR=str(tmp_path / "data"))
    ran = run_engram("evidence", "upload", str(tmp_path), env=env)
    assert (ran.returncode, ran.stderr) == (1, f"engram: [Errno 21] Is a directory: '{tmp_path}'\n")


@pytest.mark.parametrize("arguments", [["migrate"], ["outbox", "list"], ["why", "1"], ["reconcile"]])
def test_a_database_that_does_not_answer_is_told_with_its_setting(
    arguments: list[str], tmp_path: Path
) -> None:
    env = environment(POSTGRES_DSN="postgresql://127.0.0.1:1/none", ENGRAM_DATA_DIR=str(tmp_path))
    ran = run_engram(*arguments, env=env)
    assert ran.returncode == 1
    first, second = ran.stderr.splitlines()
    assert "port 1 failed: Connection refused" in first
    assert "POSTGRES_DSN" in second
