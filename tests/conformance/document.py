"""The table of `docs/conformance.md`, made from a run of the suite.

`make conformance` starts a gateway on a throw-away database, runs the suite and
rewrites the table.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conformance.fixture_server import serve
from conformance.not_applicable import REASONS
from conformance.suite import RUNS, Run, cell, outcomes
from engram.api.app import create_app
from engram.assembly.addresses import migrate_all
from engram.assembly.gateway import open_services
from engram.embedded import EmbeddedPostgres
from engram.kernel.settings import Settings
from support.serving import serving

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
BEGIN, END = "<!-- made by `make conformance` -->\n", "<!-- end -->\n"

Cells = Mapping[str, str]


def rendered(columns: Mapping[str, Cells]) -> str:
    """`columns`: by heading, each with its cells by scenario."""
    scenarios = sorted({name for cells in columns.values() for name in cells})
    lines = [["scenario", *columns], ["---"] * (len(columns) + 1)]
    lines += [[f"`{name}`", *(cells.get(name, "") for cells in columns.values())] for name in scenarios]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    reasons = "".join(f"- *{name}*: {why}\n" for name, why in REASONS.items())
    return f"{BEGIN}\n{table}\n{reasons}\n{END}"


def documented(heading: str) -> Cells:
    """A column of the table as it stands in the document."""
    table = DOCUMENT.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [
        [part.strip() for part in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"
    ]
    at = rows[0].index(heading)
    return {row[0].strip("`"): row[at] for row in rows[2:] if row[at]}


def main() -> None:
    logging.disable()  # Some fixtures fail on purpose.
    with tempfile.TemporaryDirectory(prefix="engram-conformance-") as folder, gateway(Path(folder)) as url:
        columns = {run.heading: _cells(run, url, Path(folder)) for run in RUNS}
    text = DOCUMENT.read_text("utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCUMENT.write_text(before + rendered(columns) + after, "utf-8")


@contextmanager
def gateway(folder: Path) -> Iterator[str]:
    with EmbeddedPostgres(folder / "data") as postgres:
        dsn = postgres.dsn()
        migrate_all(dsn)
        settings = replace(Settings.load({}), postgres_dsn=dsn, openmemory_base_url="http://127.0.0.1:9")
        with serving(create_app(settings, lambda: open_services(settings), serve=serve)) as url:
            yield url


def _cells(run: Run, url: str, folder: Path) -> Cells:
    mine = folder / run.revision
    mine.mkdir()
    return {name: cell(run, name, outcome) for name, outcome in outcomes(run, url, mine).items()}


if __name__ == "__main__":
    main()
