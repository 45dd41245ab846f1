-- The rest of the logbook: items and what happened to them, attachments, key-value
-- cursors, knowledge candidates; the history of governance; the invariants.

CREATE SCHEMA analysis;

CREATE TABLE governance.settings_history (
    history_id  bigserial PRIMARY KEY,
    project_key text NOT NULL,
    changed_at  timestamptz NOT NULL DEFAULT now(),
    changed_by  text,
    before      jsonb,
    after       jsonb NOT NULL
);
CREATE INDEX settings_history_by_project ON governance.settings_history (project_key, history_id);

CREATE FUNCTION governance.record_settings_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO governance.settings_history (project_key, changed_by, before, after)
    VALUES (NEW.project_key, NEW.updated_by,
            CASE WHEN TG_OP = 'UPDATE' THEN to_jsonb(OLD) END, to_jsonb(NEW));
    RETURN NULL;
END
$$;
CREATE TRIGGER settings_created AFTER INSERT ON governance.settings
    FOR EACH ROW EXECUTE FUNCTION governance.record_settings_change();
CREATE TRIGGER settings_changed AFTER UPDATE ON governance.settings
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*)
    EXECUTE FUNCTION governance.record_settings_change();

CREATE TABLE logbook.items (
    item_id       bigserial PRIMARY KEY,
    item_type     text NOT NULL,
    title         text NOT NULL,
    project_key   text NOT NULL,
    status        text NOT NULL DEFAULT 'open',
    owner_user_id text,
    meta_json     jsonb NOT NULL DEFAULT '{}',
    created_at    timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT items_status_known CHECK (status IN ('open', 'closed')),
    CONSTRAINT items_title_given CHECK (title <> '')
);
CREATE INDEX items_by_project ON logbook.items (project_key, item_id);

CREATE TABLE logbook.events (
    event_id      bigserial PRIMARY KEY,
    item_id       bigint REFERENCES logbook.items,
    event_type    text NOT NULL,
    target_space  text NOT NULL,
    actor_user_id text,
    content_md    text NOT NULL DEFAULT '',
    payload_json  jsonb NOT NULL DEFAULT '{}',
    words         tsvector NOT NULL DEFAULT '',
    created_at    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX events_by_item ON logbook.events (item_id, event_id);
CREATE INDEX events_by_words ON logbook.events USING gin (words);

CREATE TABLE logbook.attachments (
    attachment_id bigserial PRIMARY KEY,
    item_id       bigint REFERENCES logbook.items,
    kind          text NOT NULL,
    artifact_key  text NOT NULL,
    sha256        text NOT NULL,
    size_bytes    bigint NOT NULL,
    owner         text,
    meta_json     jsonb NOT NULL DEFAULT '{}',
    created_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT attachments_sha_is_hex CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    CONSTRAINT attachments_size_counted CHECK (size_bytes >= 0)
);
CREATE INDEX attachments_by_item ON logbook.attachments (item_id, attachment_id);
CREATE INDEX attachments_by_sha ON logbook.attachments (sha256);

CREATE TABLE logbook.kv (
    namespace  text NOT NULL,
    key        text NOT NULL,
    value_json jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (namespace, key)
);

CREATE TABLE analysis.knowledge_candidates (
    candidate_id       bigserial PRIMARY KEY,
    target_space       text NOT NULL,
    kind               text NOT NULL,
    title              text NOT NULL,
    content_md         text NOT NULL,
    confidence         double precision NOT NULL DEFAULT 0.5,
    evidence_refs_json jsonb NOT NULL DEFAULT '{}',
    words              tsvector NOT NULL DEFAULT '',
    created_at         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT candidates_confidence_is_a_share CHECK (confidence BETWEEN 0 AND 1)
);
CREATE INDEX candidates_by_words ON analysis.knowledge_candidates USING gin (words);

CREATE FUNCTION governance.artifact_uris(refs jsonb) RETURNS SETOF text LANGUAGE sql IMMUTABLE AS $$
    SELECT value #>> '{}' FROM jsonb_path_query(refs, 'lax $.**.artifact_uri') AS value
$$;

CREATE VIEW governance.invariants AS
SELECT name, "left", "right", "left" = "right" AS ok
FROM (
    SELECT 'redirects equal outbox rows' AS name,
           (SELECT count(*) FROM governance.write_audit WHERE action = 'redirect') AS "left",
           (SELECT count(*) FROM logbook.outbox_memory WHERE status IN ('pending', 'sent', 'dead')) AS "right"
    UNION ALL
    SELECT 'every outbox row has its redirect audit',
           (SELECT count(*) FROM logbook.outbox_memory),
           (SELECT count(DISTINCT o.outbox_id)
            FROM logbook.outbox_memory o
            JOIN governance.write_audit a
              ON a.evidence_refs_json ->> 'outbox_id' = o.outbox_id::text
             AND a.evidence_refs_json ? 'outbox_id' AND a.action = 'redirect')
    UNION ALL
    SELECT 'report counts every audit by a known action',
           (SELECT count(*) FROM governance.write_audit),
           (SELECT count(*) FROM governance.write_audit WHERE action IN
                ('pending', 'allow', 'redirect', 'reject', 'error', 'dedup', 'retry', 'conflict', 'stale'))
    UNION ALL
    SELECT 'evidence URIs can be parsed',
           (SELECT count(*) FROM governance.write_audit, governance.artifact_uris(evidence_refs_json)),
           (SELECT count(*) FROM governance.write_audit, governance.artifact_uris(evidence_refs_json) AS uri
            WHERE uri ~ '^memory://patch_blobs/[^/]+/[^/]+/[0-9a-f]{64}$'
               OR uri ~ '^memory://attachments/[0-9]+/[0-9a-f]{64}$')
    UNION ALL
    SELECT 'content is sent once per space',
           (SELECT count(*) FROM logbook.outbox_memory WHERE status = 'sent' AND forgotten_at IS NULL),
           (SELECT count(DISTINCT (target_space, payload_sha)) FROM logbook.outbox_memory
            WHERE status = 'sent' AND forgotten_at IS NULL)
    UNION ALL
    SELECT 'sent rows have their memory stored',
           (SELECT count(*) FROM logbook.outbox_memory WHERE status = 'sent' AND forgotten_at IS NULL),
           (SELECT count(*) FROM logbook.outbox_memory o
            JOIN logbook.memories m USING (target_space, payload_sha)
            WHERE o.status = 'sent' AND o.forgotten_at IS NULL AND m.state = 'stored')
    UNION ALL
    SELECT 'every intent has its pending audit',
           (SELECT count(*) FROM logbook.memories WHERE state = 'intent'),
           (SELECT count(*) FROM logbook.memories m JOIN governance.write_audit a USING (audit_id)
            WHERE m.state = 'intent' AND a.status = 'pending')
) AS sums;
