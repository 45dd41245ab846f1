-- name: get_or_create_settings
-- A project's settings; the first to ask creates them closed.
INSERT INTO governance.settings AS s (project_key) VALUES (%(project_key)s)
ON CONFLICT (project_key) DO UPDATE SET project_key = s.project_key
RETURNING *;

-- name: read_settings
-- A project's settings without creating them.
SELECT * FROM governance.settings WHERE project_key = %(project_key)s;

-- name: upsert_settings
-- Change a project's settings; a policy that is not given stays. A trigger keeps the history.
INSERT INTO governance.settings AS s (project_key, team_write_enabled, policy_json, updated_by)
VALUES (%(project_key)s, %(team_write_enabled)s, COALESCE(%(policy_json)s, '{}'::jsonb), %(updated_by)s)
ON CONFLICT (project_key) DO UPDATE
SET team_write_enabled = EXCLUDED.team_write_enabled,
    policy_json = COALESCE(%(policy_json)s, s.policy_json),
    updated_by = EXCLUDED.updated_by,
    updated_at = now()
RETURNING project_key;

-- name: update_settings
-- Change what is given of a project's settings and leave the rest; what changes nothing leaves no trace.
INSERT INTO governance.settings AS s (project_key, team_write_enabled, policy_json, updated_by)
VALUES (%(project_key)s, COALESCE(%(team_write_enabled)s::boolean, false),
        COALESCE(%(policy_json)s::jsonb, '{}'::jsonb), %(updated_by)s)
ON CONFLICT (project_key) DO UPDATE
SET (team_write_enabled, policy_json, updated_by, updated_at) = (
    SELECT enabled, policy,
           CASE WHEN changed THEN %(updated_by)s ELSE s.updated_by END,
           CASE WHEN changed THEN now() ELSE s.updated_at END
    FROM (SELECT COALESCE(%(team_write_enabled)s::boolean, s.team_write_enabled) AS enabled,
                 COALESCE(%(policy_json)s::jsonb, s.policy_json) AS policy) AS wanted
    CROSS JOIN LATERAL (SELECT (enabled, policy) IS DISTINCT FROM (s.team_write_enabled, s.policy_json)
                            AS changed) AS compared
)
RETURNING *;

-- name: settings_history
-- Who changed a project's settings, from what to what, newest first.
SELECT * FROM governance.settings_history
WHERE project_key = %(project_key)s
ORDER BY history_id DESC
LIMIT %(limit)s;

-- name: insert_audit
-- One audit row; final at once unless it is pending.
INSERT INTO governance.write_audit
    (actor_user_id, requested_space, target_space, action, reason, status, payload_sha, memory_id,
     correlation_id, evidence_refs_json, finalized_at)
VALUES (%(actor_user_id)s, %(requested_space)s, %(target_space)s, %(action)s, %(reason)s, %(status)s,
        %(payload_sha)s, %(memory_id)s, %(correlation_id)s, %(evidence_refs_json)s,
        CASE WHEN %(status)s = 'pending' THEN NULL ELSE now() END)
RETURNING audit_id;

-- name: finalize_audit
-- A pending audit becomes final, once; what is not given stays.
UPDATE governance.write_audit
SET action = %(action)s,
    status = %(status)s,
    reason = COALESCE(%(reason)s, reason),
    memory_id = COALESCE(%(memory_id)s, memory_id),
    evidence_refs_json = evidence_refs_json || %(evidence_refs_json)s,
    finalized_at = now()
WHERE audit_id = %(audit_id)s AND status = 'pending'
RETURNING audit_id;

-- name: query_audit
-- Audits since a time, newest first, by actor, action, start of reason and correlation id.
SELECT * FROM governance.write_audit
WHERE (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
  AND (%(actor)s::text IS NULL OR actor_user_id = %(actor)s)
  AND (%(action)s::text IS NULL OR action = %(action)s)
  AND (%(reason)s::text IS NULL OR starts_with(reason, %(reason)s))
  AND (%(correlation_id)s::text IS NULL OR correlation_id = %(correlation_id)s)
ORDER BY created_at DESC, audit_id DESC
LIMIT %(limit)s;

-- name: audits_of_outbox
-- What was decided about an outbox row, in the order it happened.
SELECT audit_id, created_at, actor_user_id, action, reason, status, memory_id, correlation_id, finalized_at
FROM governance.write_audit
WHERE evidence_refs_json ? 'outbox_id' AND evidence_refs_json ->> 'outbox_id' = %(outbox_id)s::bigint::text
ORDER BY audit_id;

-- name: report
-- What became of the writes since a time, how the outbox stands, and the sums: one snapshot, so they agree.
--
-- A reason is shown only if it looks like one of engram's own words: a script may
-- have written anything there, and a report is read by everybody.
WITH audits AS MATERIALIZED (
    SELECT action, status, reason, count(*) AS writes,
           evidence_refs_json ?| ARRAY['patches', 'attachments']
               OR evidence_refs_json #> '{extra,external_refs}' IS NOT NULL AS evidenced
    FROM governance.write_audit
    WHERE created_at >= COALESCE(%(since)s::timestamptz, now() - make_interval(secs => %(last_seconds)s::float8),
                                 '-infinity')
    GROUP BY action, status, reason, evidenced
), stores AS (
    -- Decisions about a store, not about its delivery later on nor about forgetting.
    SELECT COALESCE(sum(writes), 0)::bigint AS decided,
           COALESCE(sum(writes) FILTER (WHERE evidenced), 0)::bigint AS evidenced
    FROM audits WHERE reason IS NULL OR NOT (starts_with(reason, 'outbox_') OR starts_with(reason, 'memory_forget'))
), reasons AS (
    SELECT CASE WHEN reason IS NULL THEN '(none)'
                WHEN reason ~ '^[a-z][a-z0-9_]{0,63}(:[A-Za-z0-9_.-]{1,63})?$' THEN reason
                ELSE '(other)' END AS name,
           sum(writes) AS writes
    FROM audits GROUP BY name
), ranked AS (
    SELECT CASE WHEN row_number() OVER (ORDER BY name = '(other)', writes DESC, name) <= %(most_reasons)s
                THEN name ELSE '(other)' END AS name, writes
    FROM reasons
), outbox AS (
    SELECT count(*) FILTER (WHERE forgotten_at IS NULL AND status = 'pending') AS pending,
           count(*) FILTER (WHERE forgotten_at IS NULL AND status = 'pending' AND next_attempt_at <= now()) AS due,
           count(*) FILTER (WHERE forgotten_at IS NULL AND status = 'sent') AS sent,
           count(*) FILTER (WHERE forgotten_at IS NULL AND status = 'dead') AS dead,
           count(*) FILTER (WHERE forgotten_at IS NOT NULL) AS forgotten,
           percentile_cont(ARRAY[0.5, 0.95, 1])
               WITHIN GROUP (ORDER BY EXTRACT(epoch FROM now() - created_at)::float8)
               FILTER (WHERE forgotten_at IS NULL AND status = 'pending') AS ages
    FROM logbook.outbox_memory
)
SELECT COALESCE(%(since)s::timestamptz, now() - make_interval(secs => %(last_seconds)s::float8)) AS since,
       (SELECT COALESCE(sum(writes), 0)::bigint FROM audits) AS total_writes,
       (SELECT jsonb_object_agg(action, writes)
        FROM (SELECT action, sum(writes) AS writes FROM audits GROUP BY action) AS actions) AS by_action,
       (SELECT jsonb_object_agg(status, writes)
        FROM (SELECT status, sum(writes) AS writes FROM audits GROUP BY status) AS statuses) AS by_status,
       (SELECT jsonb_agg(jsonb_build_array(name, writes) ORDER BY name = '(other)', writes DESC, name)
        FROM (SELECT name, sum(writes) AS writes FROM ranked GROUP BY name) AS named) AS by_reason,
       (SELECT to_jsonb(outbox) FROM outbox) AS outbox,
       (SELECT to_jsonb(stores) FROM stores) AS stores,
       (SELECT jsonb_agg(to_jsonb(i)) FROM governance.invariants AS i) AS invariants;

-- name: invariants
-- The sums that must agree at any moment.
SELECT name, "left", "right", ok FROM governance.invariants;
