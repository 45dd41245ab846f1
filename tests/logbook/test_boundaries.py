"""What the logbook promises to those outside: light to import, and the documents' own SQL runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engram.logbook import outbox
from engram.logbook.config import Config
from engram.postgres.pool import connect

MODULES = ["outbox", "governance", "memories", "items", "kv", "uri", "artifacts", "writes", "idempotency"]
HEAVY = {"fastapi", "starlette", "uvicorn", "mcp", "httpx2", "pydantic", "confluent_kafka", "redis", "wordllama",
         "numpy", "prometheus_client", "typer", "rich"}  # fmt: skip


def test_importing_the_logbook_brings_no_web_no_kafka_and_no_embeddings() -> None:
    code = f"import sys\nimport {', '.join('engram.logbook.' + m for m in MODULES)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & HEAVY == set()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT(*) FROM governance.write_audit WHERE action = 'redirect'",
        "SELECT COUNT(*) FROM logbook.outbox_memory WHERE status IN ('pending', 'sent', 'dead')",
        "SELECT * FROM logbook.outbox_memory WHERE status = 'pending'",
        "SELECT evidence_refs_json->>'outbox_id' FROM governance.write_audit",
        "SELECT outbox_id, status, retry_count, next_attempt_at, locked_at, locked_by, last_error, payload_sha,"
        " target_space FROM logbook.outbox_memory",
        'SELECT name, "left", "right", ok FROM governance.invariants',
    ],
)
def test_the_documents_sql_runs_as_written(dsn: str, sql: str) -> None:
    with connect(dsn) as connection:
        assert connection.execute(sql.encode()).description


def test_rows_are_listed_by_the_short_name_too(config: Config) -> None:
    outbox_id = outbox.enqueue_memory("a fact", "team:a", config=config)
    assert [row["outbox_id"] for row in outbox.list(status="pending", config=config)] == [outbox_id]
    with pytest.raises(AttributeError):
        outbox.nothing  # noqa: B018
