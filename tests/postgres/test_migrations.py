"""Migrations: once each, in order, whole, by one process at a time, and never on a stranger's schema."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psycopg
import pytest

from engram.assembly.addresses import own_migrations
from engram.kernel.errors import DatabaseError, EngramError, SchemaError
from engram.postgres import migrations as module
from engram.postgres.migrations import Migration, load_migrations, migrate, pending
from engram.postgres.query import Row

Observer = psycopg.Connection[Row]
Eventually = Callable[[Callable[[], object]], None]

FIRST = Migration(1, "first", "CREATE TABLE first (a int); INSERT INTO first VALUES (1);")
SECOND = Migration(2, "second", "CREATE TABLE second (a int); INSERT INTO first VALUES (2);")
THIRD = Migration(3, "third", "CREATE TABLE third (a int);")


def tables(observer: Observer) -> set[str]:
    found = observer.execute(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
    ).fetchall()
    return {row["relname"] for row in found} - {"engram_schema_version"}


def versions(observer: Observer) -> list[int]:
    found = observer.execute("SELECT version FROM engram_schema_version ORDER BY version").fetchall()
    return [row["version"] for row in found]


def whole_schema(observer: Observer) -> list[Row]:
    return observer.execute(
        "SELECT relname, relkind::text, xmin::text FROM pg_class WHERE oid >= 16384 ORDER BY oid"
    ).fetchall()


# Applying


def test_they_are_applied_in_order_and_recorded(scratch_dsn: str, observer: Observer) -> None:
    told: list[str] = []
    assert migrate(scratch_dsn, [FIRST, SECOND], on_progress=told.append) == [FIRST, SECOND]
    assert told == ["applying 0001 first", "applying 0002 second"]
    assert tables(observer) == {"first", "second"}
    ledger = observer.execute(
        "SELECT version, name, checksum FROM engram_schema_version ORDER BY version"
    ).fetchall()
    assert ledger == [{"version": m.version, "name": m.name, "checksum": m.checksum} for m in (FIRST, SECOND)]


def test_each_is_applied_once(scratch_dsn: str, observer: Observer) -> None:
    migrate(scratch_dsn, [FIRST])
    before = whole_schema(observer)
    assert migrate(scratch_dsn, [FIRST]) == []
    assert whole_schema(observer) == before
    assert migrate(scratch_dsn, [FIRST, SECOND]) == [SECOND]
    assert observer.execute("SELECT a FROM first ORDER BY a").fetchall() == [{"a": 1}, {"a": 2}]


def test_nothing_to_apply_leaves_no_trace(scratch_dsn: str, observer: Observer) -> None:
    assert migrate(scratch_dsn, []) == []
    assert whole_schema(observer) == []


def test_the_plan_is_what_would_be_applied_and_changes_nothing(scratch_dsn: str, observer: Observer) -> None:
    assert pending(scratch_dsn, [FIRST, SECOND]) == [FIRST, SECOND]
    assert whole_schema(observer) == []
    migrate(scratch_dsn, [FIRST])
    before = whole_schema(observer)
    assert pending(scratch_dsn, [FIRST, SECOND]) == [SECOND]
    assert pending(scratch_dsn, [FIRST]) == []
    assert whole_schema(observer) == before


def test_a_percent_sign_in_a_file_is_just_that(scratch_dsn: str, observer: Observer) -> None:
    migrate(scratch_dsn, [Migration(1, "percent", "CREATE TABLE t AS SELECT '100%' AS a, 7 % 4 AS b")])
    assert observer.execute("SELECT a, b FROM t").fetchall() == [{"a": "100%", "b": 3}]


def test_they_may_take_longer_than_a_statement_may(scratch_dsn: str) -> None:
    slow = Migration(1, "slow", "CREATE TABLE t AS SELECT current_setting('statement_timeout') AS v")
    migrate(scratch_dsn, [slow])
    with psycopg.connect(scratch_dsn) as connection:
        assert connection.execute("SELECT v FROM t").fetchone() == ("0",)


def test_engrams_own_apply_to_an_empty_database(scratch_dsn: str, observer: Observer) -> None:
    own = own_migrations()
    assert migrate(scratch_dsn, own) == own
    assert versions(observer) == [m.version for m in own]
    assert pending(scratch_dsn, own) == []


# Refusing


def test_a_newer_database_is_refused_and_left_alone(scratch_dsn: str, observer: Observer) -> None:
    migrate(scratch_dsn, [FIRST, SECOND])
    before = whole_schema(observer)
    for act in (migrate, pending):
        with pytest.raises(SchemaError) as refused:
            act(scratch_dsn, [FIRST])
        assert refused.value.message == "the database is at version 2, this engram knows 1"
        assert "nothing was changed" in str(refused.value.hint)
    assert whole_schema(observer) == before
    assert versions(observer) == [1, 2]


def test_changed_contents_are_refused_and_left_alone(scratch_dsn: str, observer: Observer) -> None:
    migrate(scratch_dsn, [FIRST])
    changed = Migration(1, "first", FIRST.sql + " -- one comment more")
    for act in (migrate, pending):
        with pytest.raises(SchemaError, match="0001 first was applied with other contents"):
            act(scratch_dsn, [changed, SECOND])
    assert tables(observer) == {"first"}
    assert versions(observer) == [1]


def test_a_ledger_with_a_hole_is_refused(scratch_dsn: str, observer: Observer) -> None:
    migrate(scratch_dsn, [FIRST, SECOND])
    observer.execute("DELETE FROM engram_schema_version WHERE version = 1")
    with pytest.raises(SchemaError):
        migrate(scratch_dsn, [FIRST, SECOND, THIRD])
    assert "third" not in tables(observer)


# Failing half-way


BROKEN = Migration(2, "broken", "CREATE TABLE second (a int); INSERT INTO first VALUES (2); SELECT 1 / 0;")


def test_a_failing_file_leaves_the_version_before_it(scratch_dsn: str, observer: Observer) -> None:
    with pytest.raises(DatabaseError, match="division by zero"):
        migrate(scratch_dsn, [FIRST, BROKEN, THIRD])
    assert versions(observer) == [1]
    assert tables(observer) == {"first"}
    assert observer.execute("SELECT a FROM first").fetchall() == [{"a": 1}]
    assert migrate(scratch_dsn, [FIRST, SECOND, THIRD]) == [SECOND, THIRD]


def test_a_failure_frees_the_lock(scratch_dsn: str, observer: Observer, eventually: Eventually) -> None:
    with pytest.raises(EngramError):
        migrate(scratch_dsn, [FIRST, BROKEN])
    eventually(lambda: took_the_lock(observer))


def took_the_lock(observer: Observer) -> bool:
    row = observer.execute("SELECT pg_try_advisory_lock(%s) AS got", [module._LOCK_KEY]).fetchone()
    return row == {"got": True}


def test_an_exception_between_files_keeps_what_is_whole(scratch_dsn: str, observer: Observer) -> None:
    def fail(text: str) -> None:
        if "second" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate(scratch_dsn, [FIRST, SECOND], on_progress=fail)
    assert versions(observer) == [1]
    assert tables(observer) == {"first"}


KILLED = """
import sys
from engram.postgres.migrations import Migration, migrate
migrate(sys.argv[1], [
    Migration(1, "first", sys.argv[2]),
    Migration(2, "second", "CREATE TABLE second (a int); SELECT pg_advisory_lock(1); CREATE TABLE third (a int);"),
])
print("done")
"""


@pytest.mark.crash
def test_a_killed_process_leaves_the_version_before(
    scratch_dsn: str, observer: Observer, eventually: Eventually
) -> None:
    observer.execute("SELECT pg_advisory_lock(1)")
    process = subprocess.Popen([sys.executable, "-c", KILLED, scratch_dsn, FIRST.sql])
    eventually(lambda: observer.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -9
    # Its backend is let go, finishes the file, and finds nobody to commit it.
    observer.execute("SELECT pg_advisory_unlock(1)")
    eventually(
        lambda: (
            not observer.execute(
                "SELECT FROM pg_stat_activity WHERE application_name = 'engram-migrate'"
                " AND datname = current_database()"
            ).fetchall()
        )
    )
    assert versions(observer) == [1]
    assert tables(observer) == {"first"}
    assert migrate(scratch_dsn, [FIRST, SECOND]) == [SECOND]
    assert tables(observer) == {"first", "second"}


# The command


def engram(dsn: str, *arguments: str) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("ENGRAM_")}
    return subprocess.Popen(
        [sys.executable, "-m", "engram", *arguments],
        env={**environ, "POSTGRES_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err.strip()


def test_two_processes_at_once_one_does_it_and_both_succeed(scratch_dsn: str, observer: Observer) -> None:
    """Both are held back at the lock until both are there."""
    observer.execute("SELECT pg_advisory_lock(%s)", [module._LOCK_KEY])
    both = [engram(scratch_dsn, "migrate") for _ in range(2)]
    for process in both:
        assert first_line(process.stderr) == "another process is migrating; waiting for it"
    assert whole_schema(observer) == []
    observer.execute("SELECT pg_advisory_unlock(%s)", [module._LOCK_KEY])

    results = [ended(process) for process in both]
    count = len(own_migrations())
    assert [code for code, _, _ in results] == [0, 0]
    assert sorted(out for _, out, _ in results) == [f"applied {count} migration(s)", "up to date"]
    assert versions(observer) == list(range(1, count + 1))


def first_line(stream: IO[str] | None) -> str:
    assert stream
    return stream.readline().strip()


def test_the_plan_by_command(scratch_dsn: str, observer: Observer) -> None:
    code, out, _ = ended(engram(scratch_dsn, "migrate", "--plan"))
    assert code == 0
    assert out.splitlines() == [f"would apply {m}" for m in own_migrations()]
    assert whole_schema(observer) == []
    migrate(scratch_dsn, own_migrations())
    assert ended(engram(scratch_dsn, "migrate", "--plan"))[:2] == (0, "up to date")


def test_a_refusal_by_command_is_one_line_and_a_next_step(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO engram_schema_version VALUES (9999, 'from_the_future', 'x')")
    code, out, err = ended(engram(dsn, "migrate"))
    assert (code, out) == (1, "")
    assert err.splitlines()[0].startswith("engram: the database is at version 9999")
    assert "nothing was changed" in err
    assert "Traceback" not in err


# Finding the files


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Make an importable folder with the given files."""
    name = f"migrations_of_{tmp_path.name}".replace("-", "_")

    def make(*names: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for filename in ("__init__.py", *names):
            (folder / filename).write_text("-- " if filename.endswith(".sql") else "")
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    sys.modules.pop(name, None)


def test_files_are_found_in_the_order_of_their_numbers(package: Callable[..., str]) -> None:
    found = load_migrations(package("0002_b.sql", "0001_z.sql", "0003_a.sql", "schema.sql", "notes.txt"))
    assert [str(m) for m in found] == ["0001 z", "0002 b", "0003 a"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["0001_a.sql", "0003_c.sql"], id="a gap"),
        pytest.param(["0002_b.sql"], id="no first"),
        pytest.param(["0000_a.sql", "0001_b.sql"], id="from zero"),
        pytest.param(["0001_a.sql", "0001_b.sql"], id="a number twice"),
    ],
)
def test_bad_numbers_are_refused(package: Callable[..., str], names: list[str]) -> None:
    with pytest.raises(ValueError, match="not numbered 0001, 0002"):
        load_migrations(package(*names))


@pytest.mark.parametrize("stranger", ["0002-add-index.sql", "2_b.sql", "0002_b.SQL", "00002_b.sql"])
def test_strangers_are_refused(package: Callable[..., str], stranger: str) -> None:
    with pytest.raises(ValueError):
        load_migrations(package("0001_a.sql", stranger))


def test_the_checksum_is_of_the_contents() -> None:
    assert FIRST.checksum == Migration(9, "other", FIRST.sql).checksum
    assert FIRST.checksum != Migration(1, "first", FIRST.sql + "\n").checksum


def test_the_checksum_does_not_depend_on_the_checkouts_line_ends(package: Callable[..., str]) -> None:
    name = package("0001_a.sql")
    (path,) = (Path(p) for p in __import__(name).__path__)
    sums = set()
    for ends in ("\n", "\r\n"):
        (path / "0001_a.sql").write_bytes(f"SELECT 1;{ends}SELECT 2;{ends}".encode())
        sums.add(load_migrations(name)[0].checksum)
    assert len(sums) == 1
