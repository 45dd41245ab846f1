-- name: get_or_create_settings
-- A project's settings; the first to ask creates them closed.
INSERT INTO governance.settings AS s (project_key) VALUES (%(project_key)s)
ON CONFLICT (project_key) DO UPDATE SET project_key = s.project_key
RETURNING *;

-- name: read_settings
-- A project's settings without creating them.
SELECT * FROM governance.settings WHERE project_key = %(project_key)s;

-- name: upsert_settings
-- Change a project's settings; what is not given stays.
INSERT INTO governance.settings AS s (project_key, team_write_enabled, policy_json, updated_by)
VALUES (%(project_key)s, %(team_write_enabled)s, COALESCE(%(policy_json)s, '{}'::jsonb), %(updated_by)s)
ON CONFLICT (project_key) DO UPDATE
SET team_write_enabled = EXCLUDED.team_write_enabled,
    policy_json = COALESCE(%(policy_json)s, s.policy_json),
    updated_by = EXCLUDED.updated_by,
    updated_at = now()
RETURNING project_key;

-- name: counts
-- The numbers behind "every redirect has its outbox row".
SELECT (SELECT count(*) FROM governance.write_audit) AS total_writes,
       (SELECT count(*) FROM governance.write_audit WHERE action = 'redirect') AS redirects,
       (SELECT count(*) FROM governance.write_audit WHERE status = 'pending') AS pending_audits,
       (SELECT count(*) FROM logbook.outbox_memory) AS outbox_rows,
       (SELECT count(*) FROM logbook.outbox_memory WHERE status = 'pending') AS outbox_pending;
