"""Runs that alternate, medians, and the raw values beside them."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engram.assembly.addresses import migrate_all
from engram.embedded import EmbeddedPostgres
from engram.postgres.pool import connect

ROUNDS = 3

Measure = Callable[[], float]


@contextmanager
def database_server() -> Iterator[EmbeddedPostgres]:
    """An embedded PostgreSQL of its own, with its default durability."""
    with (
        tempfile.TemporaryDirectory(prefix="engram-bench-") as folder,
        EmbeddedPostgres(Path(folder)) as server,
    ):
        server.ensure_database("template_bench")
        migrate_all(server.dsn("template_bench"))
        yield server


@contextmanager
def fresh_database(server: EmbeddedPostgres, name: str = "bench") -> Iterator[str]:
    with connect(server.dsn("postgres")) as admin:
        admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())
        admin.execute(f'CREATE DATABASE "{name}" TEMPLATE template_bench'.encode())
    yield server.dsn(name)


def alternate(rounds: int = ROUNDS, **contenders: Measure) -> dict[str, list[float]]:
    """Each contender once a round, in turn, so that a slow minute of the machine hits all."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            values[name].append(measure())
    return values


def median(values: list[float]) -> float:
    return statistics.median(values)


def told(name: str, values: list[float], unit: str) -> None:
    raw = ", ".join(f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in values)
    print(f"  {name:<34} {median(values):>12,.1f} {unit}   ({raw})", flush=True)


def verdict(what: str, value: float, target: float, *, at_most: bool = False) -> None:
    met = value <= target if at_most else value >= target
    sign = "at most" if at_most else "at least"
    print(f"  => {what}: {value:.2f}, target {sign} {target:g}: {'met' if met else 'MISSED'}", flush=True)
