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

-- name: invariants
-- The sums that must agree at any moment.
SELECT name, "left", "right", ok FROM governance.invariants;
