-- engram's database, to be read.
--
-- This is the schema that the numbered migrations beside this file produce, all
-- of them together; a test proves the two equal. Nothing runs this file:
-- `engram migrate` runs the migrations and notes each in
-- public.engram_schema_version.
--
-- One write, followed through the tables:
--
--   1. Somebody asks for a memory to be stored. In one statement, before anybody
--      else is called, engram writes an audit (`pending`) and the whole memory
--      (`intent`).
--   2. The memory server is called. No transaction is open meanwhile.
--   3. It took the memory: the audit becomes `allow`, the memory `stored`.
--      It did not, or nobody knows: the audit becomes `redirect`, the memory
--      `parked`, and a row in the outbox stands for what is still to be delivered.
--   4. A worker leases the outbox row, delivers it, and settles it as `sent`
--      (the memory becomes `stored`) or, having tried often enough, as `dead`.
--
-- Steps 1 and 3 are one statement each, so a crash finds a write before or after
-- them and never between. Locks are taken in the order audit, outbox, memory.
-- Wherever a decision depends on time it is this server's now().

-- Who may write where, and what became of every write.
CREATE SCHEMA governance;

-- The writes themselves, and the record of what a team does.
CREATE SCHEMA logbook;

-- What was made of that record.
CREATE SCHEMA analysis;


-- What each project allows. A project without a row is closed.
CREATE TABLE governance.settings (
    project_key        text PRIMARY KEY,
    team_write_enabled boolean NOT NULL DEFAULT false, -- false diverts writes to shared spaces to the writer's own
    policy_json        jsonb NOT NULL DEFAULT '{}',    -- finer rules; an absent one does not restrict
    updated_by         text,
    updated_at         timestamptz NOT NULL DEFAULT now()
);


-- Who changed a project's settings, from what to what. Written by triggers, so
-- no change escapes it, not even one made by hand.
CREATE TABLE governance.settings_history (
    history_id  bigserial PRIMARY KEY,
    project_key text NOT NULL,
    changed_at  timestamptz NOT NULL DEFAULT now(),
    changed_by  text,          -- updated_by of the new row
    before      jsonb,         -- the whole row; NULL when it was created
    after       jsonb NOT NULL
);

-- One project's history, oldest first.
CREATE INDEX settings_history_by_project ON governance.settings_history (project_key, history_id);

-- Writes the history row.
CREATE FUNCTION governance.record_settings_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO governance.settings_history (project_key, changed_by, before, after)
    VALUES (NEW.project_key, NEW.updated_by,
            CASE WHEN TG_OP = 'UPDATE' THEN to_jsonb(OLD) END, to_jsonb(NEW));
    RETURN NULL;
END
$$;

-- An update that changes nothing is no change.
CREATE TRIGGER settings_created AFTER INSERT ON governance.settings
    FOR EACH ROW EXECUTE FUNCTION governance.record_settings_change();
CREATE TRIGGER settings_changed AFTER UPDATE ON governance.settings
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*)
    EXECUTE FUNCTION governance.record_settings_change();


-- The audit trail: one row for every decision about a write. A row is written as
-- `pending` and made final once, or is final from the start; final rows can be
-- neither changed nor deleted.
CREATE TABLE governance.write_audit (
    audit_id           bigserial PRIMARY KEY,
    created_at         timestamptz NOT NULL DEFAULT now(),
    actor_user_id      text,          -- who asked
    requested_space    text,          -- where it was asked to go: private:<actor>, team:<project> or org:<name> ...
    target_space       text NOT NULL, -- ... and where policy let it go
    action             text NOT NULL, -- what was decided:
                                      --   pending   not known yet
                                      --   allow     the memory server has it
                                      --   redirect  parked in the outbox, and nothing else
                                      --   reject    policy refused it, or its delivery was given up
                                      --   error     an attempt failed
                                      --   dedup     the outbox had this content already
                                      --   retry     a delivery failed and will be tried again
                                      --   conflict  a worker came to settle a row whose lease it had lost
                                      --   stale     a lease was found abandoned
    reason             text,          -- one word and perhaps a class: policy_redirect:<rule>, outbox_flush_retry, ...
    status             text NOT NULL, -- pending, or final: success, redirected, failed
    payload_sha        text,          -- lower-case hex SHA-256 of the UTF-8 payload
    memory_id          text,          -- the memory server's id, where there is one
    correlation_id     text,          -- the same id as in the reply, the logs and the outbox row
    evidence_refs_json jsonb NOT NULL DEFAULT '{}', -- what the write rests on; `outbox_id` at the top where it was parked
    finalized_at       timestamptz,   -- NULL exactly while pending
    CONSTRAINT write_audit_action_known CHECK (action IN
        ('pending', 'allow', 'redirect', 'reject', 'error', 'dedup', 'retry', 'conflict', 'stale')),
    CONSTRAINT write_audit_status_known CHECK (status IN ('pending', 'success', 'redirected', 'failed')),
    CONSTRAINT write_audit_pending_is_pending CHECK ((action = 'pending') = (status = 'pending')),
    -- A redirect is a parked write and nothing else, so redirects can be counted against outbox rows.
    CONSTRAINT write_audit_redirect_is_parked CHECK ((action = 'redirect') = (status = 'redirected')),
    CONSTRAINT write_audit_final_has_time CHECK ((status = 'pending') = (finalized_at IS NULL))
);

-- To find writes that nobody finished, to report on a period, to follow one
-- request, and to find the audits of an outbox row.
CREATE INDEX write_audit_pending ON governance.write_audit (created_at) WHERE status = 'pending';
CREATE INDEX write_audit_by_time ON governance.write_audit (created_at);
CREATE INDEX write_audit_by_correlation ON governance.write_audit (correlation_id);
CREATE INDEX write_audit_by_outbox ON governance.write_audit ((evidence_refs_json ->> 'outbox_id'))
    WHERE evidence_refs_json ? 'outbox_id';

-- Lets a pending audit be changed, and refuses every other change, whoever asks.
CREATE FUNCTION governance.keep_final_audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.status = 'pending' THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'governance.write_audit: % refused, the audit trail is append-only', TG_OP
        USING ERRCODE = 'restrict_violation';
END
$$;

-- A pending audit may not be deleted either: it is the only trace of its write.
CREATE TRIGGER write_audit_is_append_only BEFORE UPDATE OR DELETE ON governance.write_audit
    FOR EACH ROW EXECUTE FUNCTION governance.keep_final_audit();
CREATE TRIGGER write_audit_is_never_emptied BEFORE TRUNCATE ON governance.write_audit
    FOR EACH STATEMENT EXECUTE FUNCTION governance.keep_final_audit();


-- What engram itself knows of every memory: enough to answer a query when the
-- memory server cannot, and to deliver the memory when nobody else has it.
CREATE TABLE logbook.memories (
    memory_record_id   bigserial PRIMARY KEY, -- engram's own id
    delivery_key       uuid NOT NULL DEFAULT gen_random_uuid(), -- the idempotency key of every delivery of this memory
    target_space       text NOT NULL,
    payload_sha        text NOT NULL,         -- lower-case hex SHA-256 of payload_md in UTF-8
    payload_md         text NOT NULL,
    kind               text,
    meta_json          jsonb NOT NULL DEFAULT '{}',
    evidence_refs_json jsonb NOT NULL DEFAULT '{}',
    actor_user_id      text,
    item_id            bigint,                -- the logbook item it belongs to, if any
    correlation_id     text,
    state              text NOT NULL,         -- intent, stored, parked or forgotten
    memory_id          text,                  -- the memory server's id, once it is known
    audit_id           bigint,                -- the audit of the write that made it an intent
    outbox_id          bigint,                -- the outbox row that delivers it, or did
    intent_at          timestamptz,           -- an intent is overdue once intent_at + intent_seconds has passed:
    intent_seconds     double precision,      --   its gateway is gone, and others may park it
    words              tsvector NOT NULL DEFAULT '', -- made by engram, not by to_tsvector, so that CJK text is found
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),
    forgotten_at       timestamptz,           -- set exactly when forgotten: unreadable from then on
    erase_due_at       timestamptz,           -- from then on the memory server's copy is to be deleted; NULL: nothing to do
    erase_locked_at    timestamptz,           -- start of the lease of whoever is deleting it ...
    erase_token        bigint,                -- ... and its token, as in the outbox
    erase_tries        integer NOT NULL DEFAULT 0,
    held_until         timestamptz,           -- not to be written anew before: an old copy of it is being deleted
    CONSTRAINT memories_state_known CHECK (state IN ('intent', 'stored', 'parked', 'forgotten')),
    CONSTRAINT memories_sha_is_hex CHECK (payload_sha ~ '^[0-9a-f]{64}$'),
    CONSTRAINT memories_intent_has_audit CHECK
        (state <> 'intent' OR (audit_id IS NOT NULL AND intent_at IS NOT NULL AND intent_seconds > 0)),
    CONSTRAINT memories_parked_has_row CHECK (state <> 'parked' OR outbox_id IS NOT NULL),
    CONSTRAINT memories_forgotten_has_time CHECK ((state = 'forgotten') = (forgotten_at IS NOT NULL)),
    CONSTRAINT memories_erased_before_written_anew CHECK
        (state = 'forgotten' OR (erase_due_at IS NULL AND erase_locked_at IS NULL)),
    CONSTRAINT memories_erasing_is_whole CHECK
        (erase_locked_at IS NULL OR (erase_due_at IS NOT NULL AND erase_token IS NOT NULL))
) WITH (fillfactor = 80); -- room on each page for the one or two updates that a row gets

-- The same content is in a space once; forgotten, it may come again. While its
-- old copy is being deleted from the memory server it may not: the new one could
-- be taken for the old and deleted with it.
CREATE UNIQUE INDEX memories_live_content ON logbook.memories (target_space, payload_sha)
    WHERE state <> 'forgotten' OR erase_locked_at IS NOT NULL;

-- To filter the memory server's hits, to settle along with the outbox row, to
-- finish an intent along with its audit, and to search words.
CREATE INDEX memories_by_memory_id ON logbook.memories (memory_id) WHERE memory_id IS NOT NULL;
CREATE INDEX memories_by_outbox ON logbook.memories (outbox_id) WHERE outbox_id IS NOT NULL;
CREATE INDEX memories_by_audit ON logbook.memories (audit_id) WHERE state = 'intent';
CREATE INDEX memories_by_words ON logbook.memories USING gin (words);

-- Every query also searches what the memory server cannot be asked for, which is
-- little: it need not pass by everything else.
CREATE INDEX memories_parked_words ON logbook.memories USING gin (words)
    WHERE state = 'parked' OR (state = 'stored' AND memory_id IS NULL);

-- Copies that are still to be deleted.
CREATE INDEX memories_to_erase ON logbook.memories (erase_due_at) WHERE erase_due_at IS NOT NULL;


-- The outbox: memories that are still to reach the memory server, and those that
-- did it this way. A row is `pending` until the holder of its lease settles it.
CREATE TABLE logbook.outbox_memory (
    outbox_id          bigserial PRIMARY KEY,
    target_space       text NOT NULL,
    payload_sha        text NOT NULL,                      -- lower-case hex SHA-256 of payload_md in UTF-8
    payload_md         text NOT NULL,
    item_id            bigint,                             -- the logbook item it belongs to, if any
    status             text NOT NULL DEFAULT 'pending',    -- pending; final: sent, dead
    retry_count        integer NOT NULL DEFAULT 0,         -- failed tries; an outage of the server does not count
    next_attempt_at    timestamptz NOT NULL DEFAULT now(), -- not due before this
    locked_at          timestamptz,                        -- start of the lease, NULL if nobody has one ...
    locked_by          text,                               -- ... whose it is ...
    lease_seconds      integer,                            -- ... and how long it lasts; the end is always computed
    lease_token        bigint,                             -- drawn by each claim: a worker that lost its lease and
                                                           --   came back has the old one. Kept after settling, so
                                                           --   that a worker knows its own settle again
    last_error         text,                               -- of the last try; memory_id=<id> once sent
    memory_id          text,                               -- the memory server's id, once sent
    ambiguous          boolean NOT NULL DEFAULT false,     -- an earlier try may have arrived: look before repeating it
    requeued_from      bigint REFERENCES logbook.outbox_memory, -- the dead row that this one tries anew
    forgotten_at       timestamptz,                        -- forgotten meanwhile: must not be delivered
    correlation_id     text,                               -- of the request that was parked
    actor_user_id      text,
    kind               text,
    meta_json          jsonb NOT NULL DEFAULT '{}',
    evidence_refs_json jsonb NOT NULL DEFAULT '{}',
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT outbox_status_known CHECK (status IN ('pending', 'sent', 'dead')),
    CONSTRAINT outbox_sha_is_hex CHECK (payload_sha ~ '^[0-9a-f]{64}$'),
    CONSTRAINT outbox_retries_counted CHECK (retry_count >= 0),
    CONSTRAINT outbox_lock_is_whole CHECK
        ((locked_at IS NULL) = (locked_by IS NULL)
         AND (locked_at IS NULL OR (lease_seconds > 0 AND lease_token IS NOT NULL))),
    CONSTRAINT outbox_settled_is_unlocked CHECK (status = 'pending' OR locked_at IS NULL)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02); -- a row is updated several times: claimed, renewed, settled

-- The same content waits, or was sent, once per space; a dead or forgotten row
-- does not stand in the way of another.
CREATE UNIQUE INDEX outbox_live_content ON logbook.outbox_memory (target_space, payload_sha)
    WHERE status <> 'dead' AND forgotten_at IS NULL;

-- What a worker claims, in its order.
CREATE INDEX outbox_due ON logbook.outbox_memory (next_attempt_at, outbox_id) WHERE status = 'pending';

-- Where lease tokens are drawn from: never the same twice, whichever the worker.
CREATE SEQUENCE logbook.lease_token_seq;


-- Things that a team works on: a task, an incident, a review. Memories, events
-- and attachments may belong to one.
CREATE TABLE logbook.items (
    item_id       bigserial PRIMARY KEY,
    item_type     text NOT NULL,
    title         text NOT NULL,
    project_key   text NOT NULL,
    status        text NOT NULL DEFAULT 'open', -- open, closed
    owner_user_id text,
    meta_json     jsonb NOT NULL DEFAULT '{}',
    created_at    timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now(),
    request_id    text,                         -- of the idempotency key it was asked for with, if any
    words         tsvector NOT NULL DEFAULT '', -- of type and title, made by engram; see memories
    CONSTRAINT items_status_known CHECK (status IN ('open', 'closed')),
    CONSTRAINT items_title_given CHECK (title <> '')
);

-- A project's items, page by page; and by words. A repeated request makes one item.
CREATE INDEX items_by_project ON logbook.items (project_key, item_id);
CREATE INDEX items_by_words ON logbook.items USING gin (words);
CREATE UNIQUE INDEX items_by_request ON logbook.items (request_id) WHERE request_id IS NOT NULL;


-- What happened, to an item or in general. Rows are only added.
CREATE TABLE logbook.events (
    event_id      bigserial PRIMARY KEY,
    item_id       bigint REFERENCES logbook.items,
    event_type    text NOT NULL,
    target_space  text NOT NULL,              -- who may read it, as for memories
    actor_user_id text,
    content_md    text NOT NULL DEFAULT '',   -- for people ...
    payload_json  jsonb NOT NULL DEFAULT '{}', -- ... and for programs
    words         tsvector NOT NULL DEFAULT '', -- of content_md, made by engram; see memories
    created_at    timestamptz NOT NULL DEFAULT now(),
    request_id    text                        -- of the idempotency key it was asked for with, if any
);

-- An item's events in order, a space's page by page, and a search that works
-- while the memory server is away. A repeated request makes one event.
CREATE INDEX events_by_item ON logbook.events (item_id, event_id);
CREATE INDEX events_by_space ON logbook.events (target_space, event_id);
CREATE INDEX events_by_words ON logbook.events USING gin (words);
CREATE UNIQUE INDEX events_by_request ON logbook.events (request_id) WHERE request_id IS NOT NULL;


-- Files that belong to an item, as evidence. The bytes are in the artifact store;
-- a reference to one is memory://attachments/<attachment_id>/<sha256>.
CREATE TABLE logbook.attachments (
    attachment_id bigserial PRIMARY KEY,
    item_id       bigint REFERENCES logbook.items,
    kind          text NOT NULL,
    artifact_key  text NOT NULL, -- where the artifact store has it; names the content, never a path from outside
    sha256        text NOT NULL, -- of the bytes, lower-case hex: what a reader verifies
    size_bytes    bigint NOT NULL,
    owner         text,
    meta_json     jsonb NOT NULL DEFAULT '{}',
    created_at    timestamptz NOT NULL DEFAULT now(),
    target_space  text NOT NULL, -- who may read it, as for memories
    CONSTRAINT attachments_sha_is_hex CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    CONSTRAINT attachments_size_counted CHECK (size_bytes >= 0)
);

-- An item's attachments, and every attachment with the same content; which is one
-- attachment of its owner, in one space and item.
CREATE INDEX attachments_by_item ON logbook.attachments (item_id, attachment_id);
CREATE INDEX attachments_by_sha ON logbook.attachments (sha256);
CREATE UNIQUE INDEX attachments_once ON logbook.attachments (target_space, sha256, owner, item_id)
    NULLS NOT DISTINCT;


-- Small values by name: watermarks and cursors, moved by compare-and-set.
CREATE TABLE logbook.kv (
    namespace  text NOT NULL, -- one per user of the table, so that keys do not meet
    key        text NOT NULL,
    value_json jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (namespace, key)
);


-- What a repeated request is answered with. A key is reserved before the effect
-- and completed with its answer after it, so a repeat has no second effect.
CREATE TABLE logbook.idempotency_keys (
    owner               text NOT NULL,              -- keys of different owners have nothing to do with each other
    key                 text NOT NULL,
    request_fingerprint text NOT NULL,              -- SHA-256 of the request: the key stands for this one only
    resource_id         text NOT NULL,              -- of what is to be made; who resumes goes on with the same id
    attempts            integer NOT NULL DEFAULT 1,
    locked_at           timestamptz,                -- start of the lease while the effect runs, and
    lease_seconds       double precision,           --   its length; both NULL when nobody has it
    lease_token         bigint NOT NULL,            -- of the last lease, as in the outbox
    status_code         integer,                    -- NULL until completed
    response_snapshot   text,                       -- the body of the answer
    created_at          timestamptz NOT NULL DEFAULT now(),
    expires_at          timestamptz NOT NULL,       -- past this the key is as good as new
    PRIMARY KEY (owner, key),
    CONSTRAINT idempotency_key_well_formed CHECK (key ~ '^[a-zA-Z0-9_-]{1,128}$'),
    CONSTRAINT idempotency_fingerprint_is_hex CHECK (request_fingerprint ~ '^[0-9a-f]{64}$'),
    CONSTRAINT idempotency_attempts_counted CHECK (attempts > 0),
    CONSTRAINT idempotency_lease_is_whole CHECK
        ((locked_at IS NULL) = (lease_seconds IS NULL) AND (lease_seconds IS NULL OR lease_seconds > 0)),
    CONSTRAINT idempotency_completed_has_answer CHECK ((status_code IS NULL) = (response_snapshot IS NULL)),
    CONSTRAINT idempotency_completed_is_unlocked CHECK (status_code IS NULL OR locked_at IS NULL),
    -- An answer that asks for another try is not stored: it would answer that try too.
    CONSTRAINT idempotency_answer_is_final CHECK
        (status_code BETWEEN 100 AND 499 AND status_code NOT IN (408, 425, 429))
);

-- For the sweep of what has expired.
CREATE INDEX idempotency_by_expiry ON logbook.idempotency_keys (expires_at);


-- Knowledge that was distilled from the record and may become a memory.
CREATE TABLE analysis.knowledge_candidates (
    candidate_id       bigserial PRIMARY KEY,
    target_space       text NOT NULL, -- who may read it, as for memories
    kind               text NOT NULL,
    title              text NOT NULL,
    content_md         text NOT NULL,
    confidence         double precision NOT NULL DEFAULT 0.5, -- 0 to 1
    evidence_refs_json jsonb NOT NULL DEFAULT '{}',
    words              tsvector NOT NULL DEFAULT '', -- of the text, made by engram; see memories
    created_at         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT candidates_confidence_is_a_share CHECK (confidence BETWEEN 0 AND 1)
);

-- A search that works while the memory server is away.
CREATE INDEX candidates_by_words ON analysis.knowledge_candidates USING gin (words);


-- Every artifact_uri in a tree of evidence, however deep.
CREATE FUNCTION governance.artifact_uris(refs jsonb) RETURNS SETOF text LANGUAGE sql IMMUTABLE AS $$
    SELECT value #>> '{}' FROM jsonb_path_query(refs, 'strict $.**.artifact_uri') AS value
$$;

-- What must always hold, as pairs of counts that are equal: anybody can ask, at
-- any time, and need not believe engram's own counters.
CREATE VIEW governance.invariants AS
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
