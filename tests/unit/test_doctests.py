"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

ROOTS = ["engram.kernel", "engram.search", "engram.web", "engram.gateway.spaces"]


def modules() -> list[ModuleType]:
    found = [importlib.import_module(root) for root in ROOTS]
    inside = [
        importlib.import_module(entry.name)
        for package in found
        for entry in pkgutil.walk_packages(getattr(package, "__path__", []), f"{package.__name__}.")
    ]
    return found + inside


WITH_EXAMPLES = [
    module
    for module in modules()
    if any(case.examples for case in doctest.DocTestFinder().find(module, module.__name__))
]


def test_the_modules_that_should_have_examples_have_some() -> None:
    assert {module.__name__ for module in WITH_EXAMPLES} >= {
        "engram.kernel.backoff",
        "engram.kernel.content",
        "engram.search.fusion",
        "engram.search.tokens",
        "engram.web.guards",
        "engram.gateway.spaces",
    }


@pytest.mark.parametrize("module", WITH_EXAMPLES, ids=lambda module: module.__name__)
def test_the_examples_of(module: ModuleType) -> None:
    result = doctest.testmod(module, raise_on_error=False, verbose=False)
    assert result.attempted > 0
    assert result.failed == 0
