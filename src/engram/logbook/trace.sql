-- name: find
-- What an id may stand for. A request's id stands for each content that it wrote.
SELECT 'outbox' AS kind, outbox_id AS id, target_space, payload_sha, correlation_id, memory_id
FROM logbook.outbox_memory WHERE outbox_id = %(outbox_id)s
UNION ALL
SELECT 'memory', memory_record_id, target_space, payload_sha, correlation_id, memory_id
FROM logbook.memories WHERE memory_record_id = %(memory_record_id)s
UNION ALL
(SELECT 'memory_id', memory_record_id, target_space, payload_sha, correlation_id, memory_id
 FROM logbook.memories WHERE memory_id = %(memory_id)s
 ORDER BY memory_record_id LIMIT %(limit)s)
UNION ALL
SELECT 'audit', audit_id, target_space, payload_sha, correlation_id, memory_id
FROM governance.write_audit WHERE audit_id = %(audit_id)s
UNION ALL
(SELECT 'correlation', min(audit_id), target_space, payload_sha, correlation_id, max(memory_id)
 FROM governance.write_audit WHERE correlation_id = %(correlation_id)s
 GROUP BY target_space, payload_sha, correlation_id
 ORDER BY 2 LIMIT %(limit)s);

-- name: story
-- All that is known of one content in one space, at one moment: outbox rows, memory records, audits.
--
-- Only indexes are walked: from the id that was asked for to the live row and
-- record of the same content, to what audits of the same request name, and from
-- each row back to the dead one it tries anew. Who asked for forgetting is found by
-- the time, which the record and its audit have in common. What is joined would be
-- scanned whole, since nobody can tell beforehand how little it is; hence the arrays.
WITH RECURSIVE beside AS MATERIALIZED (
    SELECT memory_record_id, outbox_id FROM logbook.memories
    WHERE memory_record_id = %(memory_record_id)s
    UNION
    SELECT memory_record_id, outbox_id FROM logbook.memories
    WHERE outbox_id = %(outbox_id)s
    UNION
    SELECT memory_record_id, outbox_id FROM logbook.memories
    WHERE memory_id = %(memory_id)s AND target_space = %(target_space)s AND payload_sha = %(payload_sha)s
    UNION
    SELECT memory_record_id, outbox_id FROM logbook.memories
    WHERE target_space = %(target_space)s AND payload_sha = %(payload_sha)s
      AND (state <> 'forgotten' OR erase_locked_at IS NOT NULL)
), named (outbox_id) AS MATERIALIZED (
    SELECT %(outbox_id)s::bigint
    UNION
    SELECT outbox_id FROM beside
    UNION
    SELECT outbox_id FROM logbook.outbox_memory
    WHERE target_space = %(target_space)s AND payload_sha = %(payload_sha)s
      AND status <> 'dead' AND forgotten_at IS NULL
    UNION
    -- A script may have written anything there.
    SELECT CASE WHEN evidence_refs_json ->> 'outbox_id' ~ '^[0-9]{1,18}$'
                THEN (evidence_refs_json ->> 'outbox_id')::bigint END
    FROM governance.write_audit
    WHERE (correlation_id = %(correlation_id)s OR audit_id = %(audit_id)s)
      AND target_space = %(target_space)s AND payload_sha = %(payload_sha)s
), tries AS (
    SELECT outbox_id, requeued_from FROM logbook.outbox_memory
    WHERE outbox_id = ANY(ARRAY(SELECT outbox_id FROM named))
    UNION
    SELECT earlier.outbox_id, earlier.requeued_from
    FROM tries CROSS JOIN LATERAL (
        SELECT o.outbox_id, o.requeued_from FROM logbook.outbox_memory o
        WHERE o.outbox_id = tries.requeued_from OFFSET 0
    ) AS earlier
), queued AS MATERIALIZED (
    SELECT outbox_id, target_space, left(payload_md, %(chars)s) AS excerpt, status, retry_count,
           -- A script may have said "never" or "long ago", which no program's calendar has.
           LEAST(GREATEST(next_attempt_at, '0001-01-02 UTC'), '9999-12-30 UTC') AS next_attempt_at,
           locked_by, locked_at, locked_at + make_interval(secs => lease_seconds) AS lease_ends_at,
           last_error, memory_id, ambiguous, requeued_from, forgotten_at, correlation_id, actor_user_id,
           created_at, updated_at
    FROM logbook.outbox_memory
    WHERE outbox_id = ANY(ARRAY(SELECT outbox_id FROM tries))
), kept AS MATERIALIZED (
    SELECT memory_record_id, target_space, payload_sha, left(payload_md, %(chars)s) AS excerpt,
           state, memory_id, audit_id, outbox_id, correlation_id, actor_user_id,
           intent_at, intent_at + make_interval(secs => intent_seconds) AS intent_ends_at,
           intent_at + %(times)s * make_interval(secs => intent_seconds) AS park_due_at,
           forgotten_at, erase_due_at,
           erase_locked_at + make_interval(secs => %(erase_lease_seconds)s) AS erase_ends_at,
           erase_tries, created_at, updated_at
    FROM logbook.memories
    WHERE memory_record_id = ANY(ARRAY(
        SELECT memory_record_id FROM beside
        UNION
        SELECT memory_record_id FROM logbook.memories
        WHERE outbox_id = ANY(ARRAY(SELECT outbox_id FROM tries))))
), decided AS MATERIALIZED (
    SELECT %(audit_id)s::bigint AS audit_id
    UNION
    SELECT audit_id FROM kept
    UNION
    SELECT audit_id FROM governance.write_audit
    WHERE target_space = %(target_space)s AND payload_sha = %(payload_sha)s
      AND correlation_id = ANY(ARRAY(
          SELECT %(correlation_id)s::text
          UNION SELECT correlation_id FROM queued
          UNION SELECT correlation_id FROM kept))
    UNION
    SELECT audit_id FROM governance.write_audit
    WHERE evidence_refs_json ? 'outbox_id'
      AND evidence_refs_json ->> 'outbox_id' = ANY(ARRAY(SELECT outbox_id::text FROM queued))
    UNION
    SELECT audit_id FROM governance.write_audit
    WHERE created_at = ANY(ARRAY(SELECT forgotten_at FROM kept)) AND payload_sha = %(payload_sha)s
), audit AS (
    SELECT audit_id, created_at, finalized_at, actor_user_id, requested_space, target_space,
           action, reason, status, memory_id, correlation_id,
           evidence_refs_json ->> 'outbox_id' AS outbox_id,
           jsonb_path_query_first(evidence_refs_json, '$.extra') AS extra
    FROM governance.write_audit
    WHERE audit_id = ANY(ARRAY(SELECT audit_id FROM decided))
    -- Of very many, the newest; but always the one asked for, and those of parking.
    ORDER BY audit_id IS NOT DISTINCT FROM %(audit_id)s DESC, action = 'redirect' DESC, audit_id DESC
    LIMIT %(limit)s
)
SELECT now() AS now,
       (SELECT max(updated_at) FROM logbook.kv
        WHERE namespace = %(heartbeats)s AND starts_with(key, 'outbox:')) AS worker_seen_at,
       (SELECT COALESCE(jsonb_agg(to_jsonb(queued) ORDER BY outbox_id), '[]') FROM queued) AS rows,
       (SELECT COALESCE(jsonb_agg(to_jsonb(kept) ORDER BY memory_record_id), '[]') FROM kept) AS memories,
       (SELECT count(*) FROM governance.write_audit
        WHERE audit_id = ANY(ARRAY(SELECT audit_id FROM decided))) AS audits_in_all,
       (SELECT COALESCE(jsonb_agg(to_jsonb(audit) ORDER BY audit_id), '[]') FROM audit) AS audits;
