"""The table of commands says what the commands say, and `engram --help` costs no more than printing it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from engram.cli import _function, application
from engram.cli.commands import COMMANDS, GROUPS, overview


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_the_commands_own_help_says(name: str) -> None:
    target, says = COMMANDS[name]
    words = inspect.getdoc(_function(target)) or ""
    assert says == words.split("\n\n")[0].replace("\n", " ")


@pytest.mark.parametrize("group", GROUPS)
def test_every_command_of_a_group_is_there_and_says_something(group: str) -> None:
    for target in GROUPS[group].commands.values():
        assert inspect.getdoc(_function(target))


def test_the_overview_names_everything_once() -> None:
    lines = [line.split()[0] for line in overview().splitlines() if line[:2] == "  " and line[2:3].strip()]
    about, commands = lines[:2], lines[2:]
    assert about == ["The", "for."]
    assert commands == [*COMMANDS, *GROUPS]


def test_the_overview_is_printed_without_the_library_that_reads_arguments() -> None:
    code = "import sys; sys.argv = ['engram', '--help']\ntry:\n import engram.cli as c; c.main()\nfinally:\n print('typer' in sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.strip()) == (0, "False")
    assert "Commands:" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Commands:"),
        (["--help"], 0, "Commands:"),
        (["sandbx"], 2, "No such command 'sandbx'"),
        (["sandbox"], 2, "Make sandboxes and run commands in them."),
        (["outbox", "--help"], 0, "requeue"),
        (["store", "--help"], 0, "Store a memory."),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_what_is_asked_in_passing_is_answered(arguments: list[str], code: int, said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "engram", *arguments], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, said in ran.stdout + ran.stderr) == (code, True)


def test_a_command_alone_keeps_its_name() -> None:
    assert [command.name for command in application(["store"]).registered_commands] == ["store"]
