-- name: settled_without_audit
-- Settled rows of a page that lack the audit of their settling. Either flush reason satisfies a sent row.
SELECT o.outbox_id, o.updated_at
FROM (SELECT * FROM logbook.outbox_memory
      WHERE outbox_id > %(after_id)s ORDER BY outbox_id LIMIT %(limit)s) AS o
WHERE o.status <> 'pending'
  AND o.updated_at <= now() - make_interval(secs => %(grace_seconds)s)
  AND NOT EXISTS (
      SELECT FROM governance.write_audit a
      WHERE a.evidence_refs_json ->> 'outbox_id' = o.outbox_id::text
        AND a.evidence_refs_json ? 'outbox_id'
        AND CASE o.status WHEN 'sent' THEN a.reason IN ('outbox_flush_success', 'outbox_flush_dedup_hit')
                          ELSE a.reason = 'outbox_flush_dead' END);

-- name: write_settled_audits
-- Write the audits that such rows lack; one that has got its audit meanwhile is left alone.
--
-- A row is repaired as it was seen or not at all: of two reconciles, one finds it
-- changed by the other.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(seen_at)s::timestamptz[]) AS t (outbox_id, seen_at)
), held AS (
    UPDATE logbook.outbox_memory o SET updated_at = now()
    FROM asked
    WHERE o.outbox_id = asked.outbox_id AND o.updated_at = asked.seen_at
    RETURNING o.*
)
INSERT INTO governance.write_audit
    (actor_user_id, requested_space, target_space, action, reason, status, payload_sha, memory_id,
     correlation_id, evidence_refs_json, finalized_at)
SELECT actor_user_id, target_space, target_space,
       CASE status WHEN 'sent' THEN 'allow' ELSE 'reject' END,
       CASE status WHEN 'sent' THEN 'outbox_flush_success' ELSE 'outbox_flush_dead' END,
       'success', payload_sha, memory_id, correlation_id,
       evidence_refs_json || jsonb_build_object('outbox_id', outbox_id, 'extra',
           COALESCE(evidence_refs_json -> 'extra', '{}') || '{"written_by": "reconcile"}'), now()
FROM held
WHERE NOT EXISTS (
    SELECT FROM governance.write_audit a
    WHERE a.evidence_refs_json ->> 'outbox_id' = held.outbox_id::text
      AND a.evidence_refs_json ? 'outbox_id'
      AND CASE held.status WHEN 'sent' THEN a.reason IN ('outbox_flush_success', 'outbox_flush_dedup_hit')
                           ELSE a.reason = 'outbox_flush_dead' END)
RETURNING (evidence_refs_json ->> 'outbox_id')::bigint AS outbox_id;

-- name: parked_without_audit
-- Rows of a page that were put in the outbox bare, without their redirect audit.
SELECT o.outbox_id, o.updated_at
FROM (SELECT * FROM logbook.outbox_memory
      WHERE outbox_id > %(after_id)s ORDER BY outbox_id LIMIT %(limit)s) AS o
WHERE o.created_at <= now() - make_interval(secs => %(grace_seconds)s)
  AND NOT EXISTS (
    SELECT FROM governance.write_audit a
    WHERE a.evidence_refs_json ->> 'outbox_id' = o.outbox_id::text
      AND a.evidence_refs_json ? 'outbox_id' AND a.action = 'redirect');

-- name: write_redirect_audits
-- Write the redirect audits that such rows lack.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(seen_at)s::timestamptz[]) AS t (outbox_id, seen_at)
), held AS (
    UPDATE logbook.outbox_memory o SET updated_at = now()
    FROM asked
    WHERE o.outbox_id = asked.outbox_id AND o.updated_at = asked.seen_at
    RETURNING o.*
)
INSERT INTO governance.write_audit
    (actor_user_id, requested_space, target_space, action, reason, status, payload_sha, correlation_id,
     evidence_refs_json, finalized_at)
SELECT actor_user_id, target_space, target_space, 'redirect', 'outbox_enqueued', 'redirected', payload_sha,
       correlation_id,
       evidence_refs_json || jsonb_build_object('outbox_id', outbox_id, 'extra',
           COALESCE(evidence_refs_json -> 'extra', '{}') || '{"written_by": "reconcile"}'), now()
FROM held
WHERE NOT EXISTS (
    SELECT FROM governance.write_audit a
    WHERE a.evidence_refs_json ->> 'outbox_id' = held.outbox_id::text
      AND a.evidence_refs_json ? 'outbox_id' AND a.action = 'redirect')
RETURNING (evidence_refs_json ->> 'outbox_id')::bigint AS outbox_id;

-- name: last_of_page
-- Where the page ends; NULL when there is none.
SELECT max(outbox_id) AS last_id
FROM (SELECT outbox_id FROM logbook.outbox_memory
      WHERE outbox_id > %(after_id)s ORDER BY outbox_id LIMIT %(limit)s) AS page;

-- name: stale_locks
-- Due rows whose holder has been gone for a second lease length.
SELECT outbox_id, lease_token, locked_by, locked_at
FROM (SELECT * FROM logbook.outbox_memory
      WHERE status = 'pending' AND next_attempt_at <= now()
      ORDER BY next_attempt_at, outbox_id LIMIT %(limit)s) AS due
WHERE locked_at + 2 * make_interval(secs => lease_seconds) <= now();

-- name: clear_stale_locks
-- Take such locks away, by their token, and say so in an audit. The rows are due at once.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(lease_tokens)s::bigint[]) AS t (outbox_id, lease_token)
), held AS MATERIALIZED (
    SELECT o.* FROM logbook.outbox_memory o JOIN asked USING (outbox_id, lease_token)
    WHERE o.status = 'pending'
      AND o.locked_at + 2 * make_interval(secs => o.lease_seconds) <= now()
    ORDER BY o.outbox_id
    FOR UPDATE OF o
), cleared AS (
    UPDATE logbook.outbox_memory o
    -- With a new token: what the old holder may still try is refused as somebody else's, and audited.
    SET locked_by = NULL, locked_at = NULL, lease_token = nextval('logbook.lease_token_seq'),
        ambiguous = true, next_attempt_at = now(), updated_at = now()
    FROM held WHERE o.outbox_id = held.outbox_id
    RETURNING o.outbox_id
), audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, reason, status, payload_sha, correlation_id,
         evidence_refs_json, finalized_at)
    SELECT actor_user_id, target_space, target_space, 'stale', 'outbox_stale', 'success', payload_sha,
           correlation_id,
           evidence_refs_json || jsonb_build_object('outbox_id', outbox_id, 'extra',
               COALESCE(evidence_refs_json -> 'extra', '{}') || jsonb_build_object('locked_by', locked_by)),
           now()
    FROM held
)
SELECT outbox_id FROM cleared;

-- name: redirects_without_row
-- Redirect audits whose outbox row is not there: nothing can repair that, somebody removed it.
SELECT a.audit_id, a.target_space, a.created_at, a.correlation_id,
       a.evidence_refs_json ->> 'outbox_id' AS outbox_id
FROM governance.write_audit a
WHERE a.action = 'redirect'
  AND NOT EXISTS (SELECT FROM logbook.outbox_memory o
                  WHERE o.outbox_id::text = a.evidence_refs_json ->> 'outbox_id')
ORDER BY a.audit_id
LIMIT %(limit)s;
