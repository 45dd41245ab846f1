"""A backup by `engram pg_dump` and `engram pg_restore`, as docs/operations.md says it."""

from __future__ import annotations

from pathlib import Path

from cli.conftest import Engram
from engram.cli.memory import call_tool
from engram.embedded import EmbeddedPostgres
from engram.postgres.pool import connect
from support.processes import environment, run_engram


def test_what_was_dumped_is_restored_beside_it(
    engram: Engram, gateway: str, dsn: str, postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    call_tool("memory_store", {"payload_md": "A fact."}, gateway)
    env, dump = environment(POSTGRES_DSN=dsn), str(tmp_path / "engram.dump")
    copied = f"restored_{tmp_path.name.replace('-', '_')}"
    assert run_engram("pg_dump", "-Fc", "-f", dump, env=env).returncode == 0
    postgres_server.ensure_database(copied)
    try:
        done = run_engram("pg_restore", "-d", copied, dump, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        with connect(f"{dsn} dbname={copied}") as copy:
            invariants = copy.execute("SELECT name, ok FROM governance.invariants").fetchall()
            audits = copy.execute("SELECT count(*) AS n FROM governance.write_audit").fetchone()
        assert invariants
        assert all(row["ok"] for row in invariants)
        assert audits == {"n": 1}
    finally:
        with connect(dsn) as connection:
            connection.execute(f'DROP DATABASE "{copied}"'.encode())


def test_without_a_database_it_says_what_to_start(tmp_path: Path) -> None:
    ran = run_engram("pg_dump", env=environment(ENGRAM_DATA_DIR=str(tmp_path)))
    assert ran.returncode == 1
    assert "start it with `engram up`" in ran.stderr
