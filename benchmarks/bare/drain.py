"""The bare claim/settle loop: two statements a batch, no tokens, no checks."""

from __future__ import annotations

import psycopg
from psycopg.rows import dict_row

CLAIM = """
UPDATE logbook.outbox_memory o
SET locked_by = %(worker)s, locked_at = now(), lease_seconds = 60, lease_token = 1, updated_at = now()
FROM (SELECT outbox_id FROM logbook.outbox_memory
      WHERE status = 'pending' AND next_attempt_at <= now() AND locked_at IS NULL
      ORDER BY next_attempt_at, outbox_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED) due
WHERE o.outbox_id = due.outbox_id
RETURNING o.*
"""
SETTLE = """
WITH settled AS (
    UPDATE logbook.outbox_memory SET status = 'sent', memory_id = 'm', last_error = 'memory_id=m',
           locked_at = NULL, locked_by = NULL, updated_at = now()
    WHERE outbox_id = ANY(%(ids)s) RETURNING *
), memory AS (
    UPDATE logbook.memories m SET state = 'stored', memory_id = 'm', updated_at = now()
    FROM settled WHERE m.outbox_id = settled.outbox_id
)"""
WITHOUT_AUDIT = SETTLE + " SELECT outbox_id FROM settled"
WITH_AUDIT = (
    SETTLE
    + """, audit AS (
    INSERT INTO governance.write_audit (actor_user_id, requested_space, target_space, action, reason,
        status, payload_sha, memory_id, correlation_id, evidence_refs_json, finalized_at)
    SELECT actor_user_id, target_space, target_space, 'allow', 'outbox_flush_success', 'success',
        payload_sha, memory_id, correlation_id, jsonb_build_object('outbox_id', outbox_id), now()
    FROM settled
) SELECT outbox_id FROM settled"""
)


def drain(dsn: str, batch: int, *, audited: bool) -> int:
    done = 0
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as connection:
        settle = WITH_AUDIT if audited else WITHOUT_AUDIT
        while rows := connection.execute(CLAIM, {"worker": "bare", "limit": batch}).fetchall():
            connection.execute(settle, {"ids": [row["outbox_id"] for row in rows]}).fetchall()
            done += len(rows)
    return done
