"""The reference is what the code says: `make docs` writes it, and this notices when it was not run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def made() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


PAGES = made()


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_as_the_code_says(name: str) -> None:
    path = DOCS / "reference" / name
    assert path.is_file(), "run `make docs`"
    assert path.read_text("utf-8") == PAGES[name], f"docs/reference/{name} is not the code's: run `make docs`"


def test_nothing_else_is_in_the_reference() -> None:
    assert {path.name for path in (DOCS / "reference").iterdir()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_every_row_has_as_many_cells_as_its_head(name: str) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", PAGES[name], re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(cells) == 1, block


@pytest.mark.parametrize("name", ["errors.md", "metrics.md", "settings.md"])
def test_everything_is_explained(name: str) -> None:
    for line in re.findall(r"^\| `.*", PAGES[name], re.MULTILINE):
        assert line.rstrip(" |").split(" | ")[-1].strip(), line
        assert not line.endswith("| |"), line


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{document.name}: {target}"
        if anchor and found.suffix == ".md":
            heads = re.findall(r"^#+ (.*)", found.read_text("utf-8"), re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
            assert anchor in known, f"{document.name}: {target}"
