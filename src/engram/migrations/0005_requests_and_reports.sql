-- A repeated request makes an item or an event once: the id that its idempotency
-- key stands for is unique. The same bytes are one attachment of their owner, in
-- one space and item. Items and events are found by words, and page by page in
-- each space, however many there are elsewhere.
ALTER TABLE logbook.items
    ADD COLUMN request_id text,
    ADD COLUMN words tsvector NOT NULL DEFAULT '';
UPDATE logbook.items SET words = to_tsvector('simple', item_type || ' ' || title);
CREATE UNIQUE INDEX items_by_request ON logbook.items (request_id) WHERE request_id IS NOT NULL;
CREATE INDEX items_by_words ON logbook.items USING gin (words);

ALTER TABLE logbook.events ADD COLUMN request_id text;
CREATE UNIQUE INDEX events_by_request ON logbook.events (request_id) WHERE request_id IS NOT NULL;
CREATE INDEX events_by_space ON logbook.events (target_space, event_id);

CREATE UNIQUE INDEX attachments_once ON logbook.attachments (target_space, sha256, owner, item_id)
    NULLS NOT DISTINCT;

-- The same sums, but each table is counted once, and no URI twice: with a million
-- audits the view took 12 seconds.
CREATE OR REPLACE FUNCTION governance.artifact_uris(refs jsonb) RETURNS SETOF text LANGUAGE sql IMMUTABLE AS $$
    SELECT value #>> '{}' FROM jsonb_path_query(refs, 'strict $.**.artifact_uri') AS value
$$;

CREATE OR REPLACE VIEW governance.invariants AS
WITH audits AS (
    SELECT count(*) AS written,
           count(*) FILTER (WHERE action = 'redirect') AS redirects,
           count(*) FILTER (WHERE action IN
               ('pending', 'allow', 'redirect', 'reject', 'error', 'dedup', 'retry', 'conflict', 'stale')) AS known
    FROM governance.write_audit
), uris AS (
    -- A hash is measured by its length: a pattern that counts to 64 is slow.
    SELECT count(*) AS written,
           count(*) FILTER (WHERE length(split_part(uri, '/', -1)) = 64
                              AND (uri ~ '^memory://patch_blobs/[^/]+/[^/]+/[0-9a-f]+$'
                                   OR uri ~ '^memory://attachments/[0-9]+/[0-9a-f]+$')) AS parsed
    FROM governance.write_audit, governance.artifact_uris(evidence_refs_json) AS uri
), outbox AS (
    SELECT count(*) AS queued,
           count(*) FILTER (WHERE status IN ('pending', 'sent', 'dead')) AS known,
           count(*) FILTER (WHERE status = 'sent' AND forgotten_at IS NULL) AS sent
    FROM logbook.outbox_memory
)
SELECT name, "left", "right", "left" = "right" AS ok
FROM (
    SELECT 'redirects equal outbox rows' AS name, audits.redirects AS "left", outbox.known AS "right"
    FROM audits, outbox
    UNION ALL
    SELECT 'every outbox row has its redirect audit', outbox.queued,
           (SELECT count(DISTINCT o.outbox_id)
            FROM logbook.outbox_memory o
            JOIN governance.write_audit a
              ON a.evidence_refs_json ->> 'outbox_id' = o.outbox_id::text
             AND a.evidence_refs_json ? 'outbox_id' AND a.action = 'redirect')
    FROM outbox
    UNION ALL
    SELECT 'report counts every audit by a known action', audits.written, audits.known FROM audits
    UNION ALL
    SELECT 'evidence URIs can be parsed', uris.written, uris.parsed FROM uris
    UNION ALL
    SELECT 'content is sent once per space', outbox.sent,
           (SELECT count(*) FROM (SELECT DISTINCT target_space, payload_sha FROM logbook.outbox_memory
                                  WHERE status = 'sent' AND forgotten_at IS NULL) AS contents)
    FROM outbox
    UNION ALL
    SELECT 'sent rows have their memory stored', outbox.sent,
           (SELECT count(*) FROM logbook.outbox_memory o
            JOIN logbook.memories m USING (target_space, payload_sha)
            WHERE o.status = 'sent' AND o.forgotten_at IS NULL AND m.state = 'stored')
    FROM outbox
    UNION ALL
    SELECT 'every intent has its pending audit',
           (SELECT count(*) FROM logbook.memories WHERE state = 'intent'),
           (SELECT count(*) FROM logbook.memories m JOIN governance.write_audit a USING (audit_id)
            WHERE m.state = 'intent' AND a.status = 'pending')
) AS sums;
