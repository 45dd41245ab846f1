"""Named places where a real process dies, and nothing of it is pretended."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import engram
from engram.kernel import failpoints
from engram.kernel.errors import ConfigError
from engram.kernel.failpoints import FAILPOINTS, VARIABLE, arm_from_environment, failpoint

NAME, OTHER = "memory_store.after_intent", "memory_store.after_call"

PROGRAM = f"""
from engram.kernel.failpoints import arm_from_environment, failpoint
arm_from_environment()
for step in range(1, 6):
    print("step", step, flush=True)
    failpoint({OTHER!r})
    failpoint({NAME!r})
print("survived", flush=True)
"""


@pytest.fixture(autouse=True)
def _disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", None)
    monkeypatch.delenv(VARIABLE, raising=False)


def run(value: str | None) -> subprocess.CompletedProcess[str]:
    environ = {key: text for key, text in os.environ.items() if key != VARIABLE}
    if value is not None:
        environ[VARIABLE] = value
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.crash
@pytest.mark.parametrize(("value", "steps"), [(NAME, 1), (f"{NAME}:1", 1), (f"{NAME}:3", 3)])
def test_an_armed_process_kills_itself_there(value: str, steps: int) -> None:
    died = run(value)
    assert died.returncode == -signal.SIGKILL == -9
    assert died.stdout.splitlines() == [f"step {n}" for n in range(1, steps + 1)]


@pytest.mark.crash
@pytest.mark.parametrize("value", [None, "", f"{NAME}:6", "outbox_worker.after_claim"])
def test_a_place_that_is_not_reached_kills_nobody(value: str | None) -> None:
    lived = run(value)
    assert lived.returncode == 0
    assert lived.stdout.endswith("survived\n")


@pytest.mark.crash
def test_the_command_refuses_an_unknown_name_before_it_does_anything() -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "engram", "settings"],
        env={**os.environ, VARIABLE: "memory_store.nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "there is no failpoint 'memory_store.nowhere'" in refused.stderr
    assert NAME in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("value", ["nowhere", "memory_store", f" {NAME}", NAME.upper(), ":3"])
def test_an_unknown_name_is_refused_with_the_known_ones(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError) as refused:
        arm_from_environment()
    assert VARIABLE in refused.value.message
    assert refused.value.hint
    assert all(name in refused.value.hint for name in FAILPOINTS)


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5", "3:3", " 3"])
def test_a_bad_count_is_refused(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{NAME}:{count}")
    with pytest.raises(ConfigError, match="bad count"):
        arm_from_environment()


def test_unarmed_a_place_does_nothing_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even its name is looked at: the check costs only those who crash."""
    monkeypatch.setattr(failpoints, "FAILPOINTS", None)
    arm_from_environment()
    failpoint(NAME)
    failpoint("anything")


def test_armed_an_undeclared_place_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, NAME)
    arm_from_environment()
    with pytest.raises(AssertionError, match="undeclared failpoint 'anything'"):
        failpoint("anything")


def test_arming_again_without_the_variable_disarms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, NAME)
    arm_from_environment()
    monkeypatch.delenv(VARIABLE)
    arm_from_environment()
    failpoint(NAME)


def places() -> Counter[str]:
    """Every `failpoint("...")` call in the source."""
    found: Counter[str] = Counter()
    for path in Path(engram.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and _name_of(node.func) == "failpoint":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), f"{path}: a failpoint's name must be literal"
                found[str(argument.value)] += 1
    return found


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_every_declared_place_is_in_the_source_and_every_place_is_declared() -> None:
    assert set(places()) == set(FAILPOINTS)


def test_a_place_is_named_after_its_module_and_explained() -> None:
    modules = {path.stem for path in Path(engram.__file__).parent.rglob("*.py")}
    for name, meaning in FAILPOINTS.items():
        assert name.partition(".")[0] in modules
        assert meaning
