-- name: begin
-- Commit one of a store: pending audit and intent; or, for a repeat, the answer and its final audit.
WITH drawn AS MATERIALIZED (
    SELECT nextval('governance.write_audit_audit_id_seq') AS audit_id
), memory AS (
    INSERT INTO logbook.memories AS m
        (target_space, payload_sha, payload_md, kind, meta_json, evidence_refs_json, actor_user_id,
         item_id, correlation_id, state, audit_id, intent_at, intent_seconds, words)
    SELECT %(target_space)s, %(payload_sha)s, %(payload_md)s, %(kind)s, %(meta_json)s,
           %(evidence_refs_json)s, %(actor_user_id)s, %(item_id)s, %(correlation_id)s,
           'intent', audit_id, now(), %(deadline_seconds)s, %(words)s::tsvector
    FROM drawn
    ON CONFLICT (target_space, payload_sha) WHERE state <> 'forgotten' OR erase_locked_at IS NOT NULL
    -- Taken over and tried anew: content whose outbox row is dead, which counts as not
    -- stored; and forgotten content whose eraser is gone with its lease over.
    DO UPDATE SET (state, audit_id, intent_at, intent_seconds, correlation_id, memory_id, delivery_key,
                   forgotten_at, erase_due_at, erase_locked_at, outbox_id, kind, meta_json,
                   evidence_refs_json, actor_user_id, item_id, created_at) = (
        SELECT CASE WHEN anew THEN 'intent' ELSE m.state END,
               CASE WHEN anew THEN EXCLUDED.audit_id ELSE m.audit_id END,
               CASE WHEN anew THEN EXCLUDED.intent_at ELSE m.intent_at END,
               CASE WHEN anew THEN EXCLUDED.intent_seconds ELSE m.intent_seconds END,
               CASE WHEN anew THEN EXCLUDED.correlation_id ELSE m.correlation_id END,
               CASE WHEN anew THEN NULL ELSE m.memory_id END,
               -- The memory server may remember the old key, and answer with what was deleted.
               CASE WHEN anew AND m.state = 'forgotten' THEN EXCLUDED.delivery_key ELSE m.delivery_key END,
               CASE WHEN anew THEN NULL ELSE m.forgotten_at END,
               CASE WHEN anew THEN NULL ELSE m.erase_due_at END,
               CASE WHEN anew THEN NULL ELSE m.erase_locked_at END,
               CASE WHEN anew AND m.state = 'forgotten' THEN NULL ELSE m.outbox_id END,
               CASE WHEN anew THEN EXCLUDED.kind ELSE m.kind END,
               CASE WHEN anew THEN EXCLUDED.meta_json ELSE m.meta_json END,
               CASE WHEN anew THEN EXCLUDED.evidence_refs_json ELSE m.evidence_refs_json END,
               CASE WHEN anew THEN EXCLUDED.actor_user_id ELSE m.actor_user_id END,
               CASE WHEN anew THEN EXCLUDED.item_id ELSE m.item_id END,
               CASE WHEN anew THEN EXCLUDED.created_at ELSE m.created_at END
        FROM (SELECT CASE m.state
                  WHEN 'parked' THEN COALESCE(m.held_until <= now(), true)
                      AND EXISTS (SELECT FROM logbook.outbox_memory o
                                  WHERE o.outbox_id = m.outbox_id AND o.status = 'dead')
                  WHEN 'forgotten' THEN
                      m.erase_locked_at + make_interval(secs => %(erase_lease_seconds)s) <= now()
                  ELSE false END AS anew) AS given_up
    )
    -- An earlier delivery may have arrived, and so may a copy that was to be erased.
    RETURNING memory_record_id, delivery_key, state, audit_id, memory_id, outbox_id,
              erase_token IS NOT NULL OR COALESCE((
                  SELECT o.ambiguous FROM logbook.outbox_memory o
                  WHERE o.outbox_id = m.outbox_id), false) AS ambiguous,
              intent_at + make_interval(secs => intent_seconds) <= now() AS overdue,
              COALESCE(held_until > now(), false) AS held
), decided AS (
    SELECT memory.*, drawn.audit_id AS own_audit_id,
           CASE WHEN memory.audit_id = drawn.audit_id THEN 'fresh'
                WHEN memory.state = 'intent' THEN 'in_flight'
                WHEN memory.state = 'forgotten' OR (memory.state = 'parked' AND memory.held) THEN 'erasing'
                ELSE memory.state END AS disposition
    FROM memory, drawn
), audit AS (
    -- A twin in flight gets no audit yet: its outcome is not known. Nor does a write that must wait.
    INSERT INTO governance.write_audit
        (audit_id, actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
         memory_id, correlation_id, evidence_refs_json, finalized_at)
    SELECT own_audit_id, %(actor_user_id)s, %(requested_space)s, %(target_space)s,
           CASE disposition WHEN 'fresh' THEN 'pending' WHEN 'stored' THEN 'allow' ELSE 'dedup' END,
           CASE disposition WHEN 'fresh' THEN %(reason)s WHEN 'stored' THEN COALESCE(%(reason)s, 'already_stored')
                            ELSE 'already_parked' END,
           CASE disposition WHEN 'fresh' THEN 'pending' ELSE 'success' END,
           %(payload_sha)s, memory_id, %(correlation_id)s,
           CASE disposition WHEN 'parked'
                THEN %(evidence_refs_json)s || jsonb_build_object('outbox_id', outbox_id)
                ELSE %(evidence_refs_json)s END,
           CASE disposition WHEN 'fresh' THEN NULL ELSE now() END
    FROM decided WHERE disposition NOT IN ('in_flight', 'erasing')
)
SELECT disposition, memory_record_id, delivery_key, audit_id, memory_id, outbox_id, ambiguous, overdue FROM decided;

-- name: finish_stored
-- Commit two, the memory server has it: audit and memory become final together, once.
WITH audit AS MATERIALIZED (
    SELECT audit_id FROM governance.write_audit
    WHERE audit_id = %(audit_id)s AND status = 'pending'
    FOR UPDATE
), memory AS (
    UPDATE logbook.memories m
    SET state = 'stored', memory_id = %(memory_id)s, updated_at = now()
    FROM audit
    WHERE m.audit_id = audit.audit_id AND m.state = 'intent'
    RETURNING m.memory_record_id
), final AS (
    UPDATE governance.write_audit a
    SET action = 'allow', status = 'success', memory_id = %(memory_id)s, finalized_at = now()
    FROM audit
    WHERE a.audit_id = audit.audit_id
    RETURNING a.audit_id
)
SELECT audit_id FROM final;

-- name: park
-- Commit two, the memory server has not got it: outbox row, redirect audit and memory agree, or nothing happened.
WITH audit AS MATERIALIZED (
    SELECT a.audit_id FROM governance.write_audit a
    WHERE a.audit_id = %(audit_id)s AND a.status = 'pending'
    FOR UPDATE
), intent AS MATERIALIZED (
    SELECT m.*, nextval('logbook.outbox_memory_outbox_id_seq') AS drawn_id
    FROM audit JOIN logbook.memories m ON m.audit_id = audit.audit_id AND m.state = 'intent'
    WHERE NOT %(overdue_only)s OR m.intent_at + make_interval(secs => m.intent_seconds) <= now()
), queued AS (
    INSERT INTO logbook.outbox_memory AS o
        (outbox_id, target_space, payload_sha, payload_md, item_id, last_error, ambiguous,
         next_attempt_at, correlation_id, actor_user_id, kind, meta_json, evidence_refs_json)
    SELECT drawn_id, target_space, payload_sha, payload_md, item_id, %(error)s, %(ambiguous)s,
           -- The server may still be applying it: a look that comes too soon finds nothing.
           GREATEST(now() + make_interval(secs => %(delay_seconds)s),
                    CASE WHEN %(overdue_only)s THEN intent_at + 2 * make_interval(secs => intent_seconds) END),
           correlation_id, actor_user_id, kind, meta_json, evidence_refs_json
    FROM intent
    ON CONFLICT (target_space, payload_sha) WHERE status <> 'dead' AND forgotten_at IS NULL
    DO UPDATE SET ambiguous = o.ambiguous OR EXCLUDED.ambiguous
    RETURNING outbox_id, status, memory_id
), memory AS (
    UPDATE logbook.memories m
    SET state = CASE queued.status WHEN 'sent' THEN 'stored' ELSE 'parked' END,
        memory_id = queued.memory_id, outbox_id = queued.outbox_id, updated_at = now()
    FROM intent, queued
    WHERE m.memory_record_id = intent.memory_record_id
), final AS (
    UPDATE governance.write_audit a
    SET action = CASE WHEN queued.outbox_id = intent.drawn_id THEN 'redirect' ELSE 'dedup' END,
        status = CASE WHEN queued.outbox_id = intent.drawn_id THEN 'redirected' ELSE 'success' END,
        reason = %(reason)s,
        memory_id = queued.memory_id,
        evidence_refs_json = a.evidence_refs_json || jsonb_build_object('outbox_id', queued.outbox_id),
        finalized_at = now()
    FROM intent, queued
    WHERE a.audit_id = intent.audit_id
    RETURNING queued.outbox_id, queued.status, queued.memory_id, queued.outbox_id = intent.drawn_id AS fresh
)
SELECT outbox_id, status, memory_id, fresh FROM final;

-- name: outcome
-- What became of a write whose audit somebody else made final.
SELECT a.action, a.status, m.state, m.memory_id, m.outbox_id
FROM governance.write_audit a
LEFT JOIN logbook.memories m
       ON m.target_space = a.target_space AND m.payload_sha = a.payload_sha AND m.state <> 'forgotten'
WHERE a.audit_id = %(audit_id)s;

-- name: overdue
-- Intents whose gateway has had more than its time, oldest first.
SELECT audit_id, memory_record_id, target_space, correlation_id
FROM logbook.memories
WHERE state = 'intent' AND intent_at + %(times)s * make_interval(secs => intent_seconds) <= now()
ORDER BY intent_at
LIMIT %(limit)s;

-- name: reject
-- A write that policy refuses: its audit is final at once.
INSERT INTO governance.write_audit
    (actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
     correlation_id, evidence_refs_json, finalized_at)
VALUES (%(actor_user_id)s, %(requested_space)s, %(target_space)s, 'reject', %(reason)s, 'success',
        %(payload_sha)s, %(correlation_id)s, %(evidence_refs_json)s, now())
RETURNING audit_id;
