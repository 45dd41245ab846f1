"""Every sabotage of `make mutants` still applies to the code, so none of them passes for killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_mutants import ROOT, load, sabotaged

MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m["name"])
def test_a_mutant_applies_and_changes_something(mutant: dict) -> None:
    text = (ROOT / mutant["file"]).read_text("utf-8")
    assert sabotaged(text, mutant) != text
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant["tests"])


def test_names_are_unique() -> None:
    names = [mutant["name"] for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 25
    assert Path(ROOT / "Makefile").exists()
