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
CREATE INDEX write_audit_by_correlation ON governance.write_audit (correlation_id)
    WHERE correlation_id IS NOT NULL;
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
    CONSTRAINT memories_sha_is_hex CHECK (payload_sha ~ '^[0-9a-f]+$' AND length(payload_sha) = 64),
    CONSTRAINT memories_intent_has_audit CHECK
        (state <> 'intent' OR (audit_id IS NOT NULL AND intent_at IS NOT NULL AND intent_seconds > 0)),
    CONSTRAINT memories_parked_has_row CHECK (state <> 'parked' OR outbox_id IS NOT NULL),
    CONSTRAINT memories_forgotten_has_time CHECK ((state = 'forgotten') = (forgotten_at IS NOT NULL)),
    CONSTRAINT memories_erased_before_written_anew CHECK
        (state = 'forgotten' OR (erase_due_at IS NULL AND erase_locked_at IS NULL)),
    CONSTRAINT memories_erasing_is_whole CHECK
        (erase_locked_at IS NULL OR (erase_due_at IS NOT NULL AND erase_token IS NOT NULL))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0); -- room on each page for the one or two updates that a row gets

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
    CONSTRAINT outbox_sha_is_hex CHECK (payload_sha ~ '^[0-9a-f]+$' AND length(payload_sha) = 64),
    CONSTRAINT outbox_retries_counted CHECK (retry_count >= 0),
    CONSTRAINT outbox_lock_is_whole CHECK
        ((locked_at IS NULL) = (locked_by IS NULL)
         AND (locked_at IS NULL OR (lease_seconds > 0 AND lease_token IS NOT NULL))),
    CONSTRAINT outbox_settled_is_unlocked CHECK (status = 'pending' OR locked_at IS NULL)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02, fillfactor = 45, autovacuum_vacuum_cost_delay = 0);
-- A row is updated several times: claimed, renewed, settled; and hundreds at once, side by
-- side, all before an old version may go: with room on the page none needs new index entries.
-- A claim passes by what was settled and not vacuumed yet: the vacuum takes no pauses.

-- The same content waits, or was sent, once per space; a dead or forgotten row
-- does not stand in the way of another.
CREATE UNIQUE INDEX outbox_live_content ON logbook.outbox_memory (target_space, payload_sha)
    WHERE status <> 'dead' AND forgotten_at IS NULL;

-- What a worker claims, in its order: what is pending. A planner that knows nothing of
-- the table yet takes "=" for rare, and would sort all that is due, but "<>" for common.
CREATE INDEX outbox_due ON logbook.outbox_memory (next_attempt_at, outbox_id)
    WHERE status <> 'sent' AND status <> 'dead';

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
    CONSTRAINT attachments_sha_is_hex CHECK (sha256 ~ '^[0-9a-f]+$' AND length(sha256) = 64),
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
    CONSTRAINT idempotency_key_well_formed CHECK (key ~ '^[a-zA-Z0-9_-]+$' AND length(key) <= 128),
    CONSTRAINT idempotency_fingerprint_is_hex CHECK
        (request_fingerprint ~ '^[0-9a-f]+$' AND length(request_fingerprint) = 64),
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
    source_ref         text, -- the fact it comes from, which it is kept once for; null: none
    CONSTRAINT candidates_confidence_is_a_share CHECK (confidence BETWEEN 0 AND 1)
);

-- A search that works while the memory server is away.
CREATE INDEX candidates_by_words ON analysis.knowledge_candidates USING gin (words);
CREATE UNIQUE INDEX candidates_by_source ON analysis.knowledge_candidates (target_space, source_ref)
    WHERE source_ref IS NOT NULL;


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


-- Documents and the tasks that bring them in. The database is the truth: the
-- stream that workers read from can be made anew from these rows.
CREATE SCHEMA ingest;

-- A document of one owner. The same bytes are one document of theirs, however often they are uploaded.
CREATE TABLE ingest.knowledge_document (
    id           uuid PRIMARY KEY,
    owner        text NOT NULL,                     -- who may see it; nobody else knows that it is there
    title        text NOT NULL,
    filename     text NOT NULL,                     -- as it was sent, for people; never used as a path
    media_type   text NOT NULL,                     -- found by content
    sha256       text NOT NULL,
    bytes        bigint NOT NULL,
    artifact_key text NOT NULL,                     -- where the bytes are in the artifact store
    status       text NOT NULL DEFAULT 'PENDING',   -- READY: it can be searched; FAILED: it never could
    segments     integer NOT NULL DEFAULT 0,
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT document_once_per_owner UNIQUE (owner, sha256),
    CONSTRAINT document_status_known CHECK (status IN ('PENDING', 'READY', 'FAILED')),
    CONSTRAINT document_hash_is_hex CHECK (sha256 ~ '^[0-9a-f]+$' AND length(sha256) = 64),
    CONSTRAINT document_counts_are_counts CHECK (bytes >= 0 AND segments >= 0)
);

-- One owner's documents, the newest first; and who else has these bytes.
CREATE INDEX document_by_owner ON ingest.knowledge_document (owner, created_at DESC, id DESC);
CREATE INDEX document_by_artifact ON ingest.knowledge_document (artifact_key);

-- One try after another to bring a document in; `engram.ingest.lifecycle` has the ways between states.
CREATE TABLE ingest.ingest_task (
    id                 uuid PRIMARY KEY,
    document_id        uuid NOT NULL REFERENCES ingest.knowledge_document ON DELETE CASCADE,
    owner              text NOT NULL,
    status             text NOT NULL DEFAULT 'QUEUED',
    attempt_count      integer NOT NULL DEFAULT 0,  -- failures
    next_retry_at      timestamptz,                 -- NULL is due
    last_error         text,
    error_message      text,                        -- the same, for whoever asks from outside
    processed_segments integer NOT NULL DEFAULT 0,
    total_segments     integer,                     -- NULL until it is known
    stream_id          text,                        -- its entry on the stream; NULL until it has one
    locked_by          text,                        -- the worker that runs it,
    locked_at          timestamptz,                 --   since when the lease runs, and
    lease_seconds      double precision,            --   its length; over is computed, never stored
    lease_token        bigint,                      -- of the last lease; it stays when the task is settled
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT task_status_known CHECK (status IN ('QUEUED', 'RUNNING', 'RETRYING', 'SUCCEEDED', 'DEAD')),
    CONSTRAINT task_attempts_counted CHECK (attempt_count >= 0),
    CONSTRAINT task_lease_is_whole CHECK
        ((status = 'RUNNING') = (locked_by IS NOT NULL)
         AND (locked_by IS NULL) = (locked_at IS NULL)
         AND (locked_by IS NULL) = (lease_seconds IS NULL)),
    CONSTRAINT task_lease_has_token CHECK
        (locked_by IS NULL OR (lease_token IS NOT NULL AND lease_seconds > 0)),
    CONSTRAINT task_waits_only_to_be_retried CHECK (next_retry_at IS NULL OR status = 'RETRYING'),
    CONSTRAINT task_death_has_a_reason CHECK (status <> 'DEAD' OR (last_error IS NOT NULL AND attempt_count > 0)),
    CONSTRAINT task_error_is_told CHECK (error_message IS NOT DISTINCT FROM last_error),
    CONSTRAINT task_success_is_complete CHECK
        (status <> 'SUCCEEDED'
         OR (total_segments IS NOT NULL AND processed_segments = total_segments AND last_error IS NULL)),
    CONSTRAINT task_segments_are_counts CHECK
        (processed_segments >= 0 AND (total_segments IS NULL OR total_segments >= processed_segments))
) WITH (fillfactor = 70);

-- Lists; retries by when they are due; leases that may be over; what the sweep looks at.
CREATE INDEX task_by_owner ON ingest.ingest_task (owner, created_at DESC, id DESC);
CREATE INDEX task_by_document ON ingest.ingest_task (document_id);
CREATE INDEX task_retrying ON ingest.ingest_task (next_retry_at) WHERE status = 'RETRYING';
CREATE INDEX task_running ON ingest.ingest_task (id) WHERE status = 'RUNNING';
CREATE INDEX task_unfinished ON ingest.ingest_task (id) WHERE status IN ('QUEUED', 'RUNNING', 'RETRYING');
CREATE INDEX task_not_on_the_stream ON ingest.ingest_task (created_at)
    WHERE stream_id IS NULL AND status IN ('QUEUED', 'RUNNING', 'RETRYING');

-- Every change of a task's state, the first included, written by the statement that changed it.
CREATE TABLE ingest.ingest_task_transition (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id       uuid NOT NULL REFERENCES ingest.ingest_task ON DELETE CASCADE,
    from_status   text,                             -- NULL: the task was made
    to_status     text NOT NULL,
    attempt_count integer NOT NULL,
    message       text,
    created_at    timestamptz NOT NULL DEFAULT now()
);

-- A task's history, in order.
CREATE INDEX transition_by_task ON ingest.ingest_task_transition (task_id, id);

-- So that `FROM ingest_task` works as it is written down. Whoever may not set it writes the schema's name.
DO $$
BEGIN
    EXECUTE format('ALTER DATABASE %I SET search_path = "$user", public, ingest', current_database());
EXCEPTION WHEN insufficient_privilege THEN
    RAISE NOTICE 'the search path of % is left as it is', current_database();
END
$$;

-- Sandboxes: places of their own in which an agent's commands run. The row is there before the folder,
-- so a folder without a living row is nobody's. ended_at: since when it is failed, expired or deleted.
CREATE SCHEMA sandboxes;

-- number is the order in which they were asked for; host is where the folder is.
CREATE TABLE sandboxes.sandboxes (
    id         text PRIMARY KEY,
    number     bigint GENERATED ALWAYS AS IDENTITY,
    owner      text NOT NULL,
    profile    text NOT NULL,
    env        jsonb NOT NULL DEFAULT '{}',
    host       text NOT NULL,
    status     text NOT NULL DEFAULT 'creating',
    reason     text,
    created_at timestamptz NOT NULL DEFAULT now(),
    begun_at   timestamptz NOT NULL DEFAULT now(),
    ready_at   timestamptz,
    expires_at timestamptz NOT NULL,
    ended_at   timestamptz,
    CONSTRAINT sandbox_id_well_formed CHECK (id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'),
    CONSTRAINT sandbox_status_known CHECK
        (status IN ('creating', 'ready', 'failed', 'stopped', 'expired', 'deleted')),
    CONSTRAINT sandbox_ready_has_time CHECK (status NOT IN ('ready', 'stopped') OR ready_at IS NOT NULL),
    CONSTRAINT sandbox_ended_has_time CHECK
        ((ended_at IS NOT NULL) = (status IN ('failed', 'expired', 'deleted'))),
    CONSTRAINT sandbox_failed_has_reason CHECK (status <> 'failed' OR reason IS NOT NULL)
);
CREATE INDEX sandboxes_of_owner ON sandboxes.sandboxes (owner, number);
CREATE INDEX sandboxes_alive ON sandboxes.sandboxes (expires_at)
    WHERE status IN ('creating', 'ready', 'stopped');
CREATE INDEX sandboxes_alive_of_owner ON sandboxes.sandboxes (owner, expires_at)
    WHERE status IN ('creating', 'ready', 'stopped');
CREATE INDEX sandboxes_ended ON sandboxes.sandboxes (ended_at) WHERE ended_at IS NOT NULL;

-- Whether an owner may have one more. Those who ask at once wait for each other, and each
-- counts after it has waited: a plain count would let them all in.
CREATE FUNCTION sandboxes.has_room(of_owner text, besides text, at_most integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('sandboxes.' || of_owner, 0));
    RETURN at_most > (SELECT count(*) FROM sandboxes.sandboxes
                      WHERE owner = of_owner AND id <> besides AND expires_at > now()
                        AND status IN ('creating', 'ready', 'stopped'));
END
$$;

-- Source control: what git, Subversion and GitLab say happened. Watermarks are in
-- logbook.kv (`scm.sync`), moved by the statement that writes the rows they stand for.
-- `changed_seq` grows with every change of a row; whoever follows the facts keeps the
-- last one it has seen.
CREATE SCHEMA scm;
CREATE SEQUENCE scm.changed_seq;

-- Fencing: every lease of a repository draws a fresh token.
CREATE SEQUENCE scm.lease_tokens;

-- A repository that is followed. Whoever syncs it holds its lease; the token of the last
-- holder stays.
CREATE TABLE scm.repos (
    repo_id       bigserial PRIMARY KEY,
    project_key   text NOT NULL,
    kind          text NOT NULL,
    url           text NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    locked_by     text,
    locked_at     timestamptz,
    lease_seconds integer,
    lease_token   bigint,
    CONSTRAINT repos_kind_known CHECK (kind IN ('git', 'svn', 'gitlab')),
    CONSTRAINT repos_lease_whole CHECK (num_nulls(locked_by, locked_at, lease_seconds) IN (0, 3)),
    CONSTRAINT repos_once UNIQUE (project_key, kind, url)
);

-- A commit never changes, but it may be left behind by a force-push: then it is superseded.
-- `pass` is the run that saw it last. GitLab does not list paths: they come with the patch.
CREATE TABLE scm.git_commits (
    repo_id         bigint NOT NULL REFERENCES scm.repos,
    commit_sha      text NOT NULL,
    parents         text[] NOT NULL,
    author_name     text NOT NULL,
    author_email    text NOT NULL,
    authored_at     timestamptz,
    committer_name  text NOT NULL,
    committer_email text NOT NULL,
    committed_at    timestamptz,
    message         text NOT NULL,
    files           integer,
    additions       bigint,
    deletions       bigint,
    paths_json      jsonb NOT NULL DEFAULT '[]',
    bulk_reason     text,
    superseded      boolean NOT NULL DEFAULT false,
    pass            bigint NOT NULL,
    changed_seq     bigint NOT NULL,
    PRIMARY KEY (repo_id, commit_sha),
    CONSTRAINT commits_sha_is_hex CHECK (commit_sha ~ '^[0-9a-f]+$' AND length(commit_sha) IN (40, 64))
);
CREATE INDEX commits_by_change ON scm.git_commits (repo_id, changed_seq);

-- A revision; it may lack its author and its date.
CREATE TABLE scm.svn_revisions (
    repo_id      bigint NOT NULL REFERENCES scm.repos,
    rev_num      bigint NOT NULL,
    author_name  text,
    committed_at timestamptz,
    message      text NOT NULL,
    files        integer NOT NULL,
    paths_json   jsonb NOT NULL DEFAULT '[]',
    bulk_reason  text,
    changed_seq  bigint NOT NULL,
    PRIMARY KEY (repo_id, rev_num),
    CONSTRAINT revisions_count_from_one CHECK (rev_num > 0)
);
CREATE INDEX revisions_by_change ON scm.svn_revisions (repo_id, changed_seq);

-- A merge request, as it was when it was last read; its paths come with its patch.
CREATE TABLE scm.mrs (
    repo_id          bigint NOT NULL REFERENCES scm.repos,
    mr_iid           bigint NOT NULL,
    state            text NOT NULL,
    title            text NOT NULL,
    description      text NOT NULL,
    author_name      text NOT NULL,
    source_branch    text NOT NULL,
    target_branch    text NOT NULL,
    merge_commit_sha text,
    web_url          text NOT NULL,
    created_at       timestamptz,
    updated_at       timestamptz,
    merged_at        timestamptz,
    files            integer,
    paths_json       jsonb NOT NULL DEFAULT '[]',
    changed_seq      bigint NOT NULL,
    PRIMARY KEY (repo_id, mr_iid)
);
CREATE INDEX mrs_by_change ON scm.mrs (repo_id, changed_seq);

-- What a fact changed. The bytes are in the artifact store; `missing`: they could not be had
-- yet, `none`: it changed no file.
CREATE TABLE scm.patch_blobs (
    repo_id      bigint NOT NULL REFERENCES scm.repos,
    source_type  text NOT NULL,
    source_id    text NOT NULL,
    uri          text NOT NULL DEFAULT '',
    artifact_key text,
    sha256       text,
    size_bytes   bigint,
    form         text NOT NULL,
    attempts     integer NOT NULL DEFAULT 1,
    last_error   text,
    updated_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (repo_id, source_type, source_id),
    CONSTRAINT patches_form_known CHECK (form IN ('diff', 'diffstat', 'none', 'missing')),
    CONSTRAINT patches_uri_has_bytes CHECK (
        (uri <> '') = (form IN ('diff', 'diffstat'))
        AND num_nulls(artifact_key, sha256, size_bytes) = CASE WHEN uri <> '' THEN 0 ELSE 3 END)
);
CREATE INDEX patches_missing ON scm.patch_blobs (repo_id) WHERE form = 'missing';

-- What could not be written, to be tried again by every sync.
CREATE TABLE scm.skipped (
    repo_id     bigint NOT NULL REFERENCES scm.repos,
    source_type text NOT NULL,
    source_id   text NOT NULL,
    reason      text NOT NULL,
    tries       integer NOT NULL DEFAULT 1,
    first_at    timestamptz NOT NULL DEFAULT now(),
    last_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (repo_id, source_type, source_id)
);

-- Every sync, and how it ended. `abandoned`: its process died.
CREATE TABLE scm.sync_runs (
    run_id      bigserial PRIMARY KEY,
    repo_id     bigint NOT NULL REFERENCES scm.repos,
    mode        text NOT NULL,
    status      text NOT NULL DEFAULT 'running',
    started_at  timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    read        bigint NOT NULL DEFAULT 0,
    written     bigint NOT NULL DEFAULT 0,
    skipped     bigint NOT NULL DEFAULT 0,
    superseded  bigint NOT NULL DEFAULT 0,
    error       text,
    CONSTRAINT runs_mode_known CHECK (mode IN ('strict', 'best_effort')),
    CONSTRAINT runs_status_known CHECK (status IN ('running', 'done', 'failed', 'abandoned')),
    CONSTRAINT runs_end_when_finished CHECK ((finished_at IS NULL) = (status = 'running'))
);
CREATE INDEX runs_by_repo ON scm.sync_runs (repo_id, run_id);


-- The passages of documents, in the order they are read. A worker writes them while it holds the
-- lease of a task of their document, and no other way.
CREATE TABLE ingest.knowledge_segment (
    document_id uuid NOT NULL REFERENCES ingest.knowledge_document ON DELETE CASCADE,
    ordinal     integer NOT NULL,                   -- the passage's place, from 0
    tags        text[] NOT NULL,                    -- owner:… and document:…, for the index
    heading     text NOT NULL,                      -- the headings above it, from the outermost
    page        integer,                            -- or slide, where there are any
    content     text NOT NULL,
    words       tsvector NOT NULL,                  -- of title, heading and content, by engram.search
    embedding   real[],                             -- halfvec(n) once use_vectors() ran
    to_embed    boolean NOT NULL DEFAULT true,      -- no vector yet: found by its words
    PRIMARY KEY (document_id, ordinal),
    CONSTRAINT segment_in_order CHECK (ordinal >= 0),
    CONSTRAINT segment_size CHECK (char_length(content) BETWEEN 1 AND 10000 AND char_length(heading) <= 2000),
    CONSTRAINT segment_pages_from_one CHECK (page >= 1),
    CONSTRAINT segment_is_of_its_document CHECK
        (cardinality(tags) = 2 AND starts_with(tags[1], 'owner:') AND tags[2] = 'document:' || document_id)
);

-- One index, so that a rare tag lets the scan skip through a common word's rows.
CREATE INDEX segment_words ON ingest.knowledge_segment USING gin (words, tags);
CREATE INDEX segment_to_embed ON ingest.knowledge_segment (document_id, ordinal) WHERE to_embed;

-- Which model made the vectors that are there: vectors of two cannot be compared.
CREATE TABLE ingest.embedding_model (
    only_one   boolean PRIMARY KEY DEFAULT true,
    model      text NOT NULL,
    dimensions integer NOT NULL,
    since      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT embedding_model_only_one CHECK (only_one),
    CONSTRAINT embedding_model_can_be_indexed CHECK (dimensions BETWEEN 1 AND 4000)
);

-- Make the table ready for vectors of this model. Answers NULL, or why it cannot be: then everything
-- is as it was. Another model's vectors are dropped, and every passage waits for a new one.
CREATE FUNCTION ingest.use_vectors(asked_model text, asked_dimensions integer) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM ingest.embedding_model WHERE model = asked_model AND dimensions = asked_dimensions
    ) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('ingest.use_vectors'));
    IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'vector') THEN
        IF NOT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'vector') THEN
            RETURN 'this PostgreSQL has no pgvector';
        END IF;
        BEGIN
            CREATE EXTENSION vector;
        EXCEPTION WHEN insufficient_privilege THEN
            RETURN 'this role may not run CREATE EXTENSION vector';
        END;
    END IF;
    IF EXISTS (
        SELECT FROM pg_extension
        WHERE extname = 'vector' AND substring(extversion from '^\d+\.\d+')::numeric < 0.8
    ) THEN
        RETURN 'pgvector is older than 0.8';
    END IF;
    IF to_regtype('halfvec') IS NULL THEN
        RETURN 'pgvector is in a schema outside the search_path';
    END IF;
    IF asked_dimensions > 4000 THEN
        RETURN format('vectors of %s dimensions cannot be indexed; 4000 can', asked_dimensions);
    END IF;
    -- Somebody may have done it while this call waited for the lock.
    IF EXISTS (
        SELECT FROM ingest.embedding_model WHERE model = asked_model AND dimensions = asked_dimensions
    ) THEN
        RETURN NULL;
    END IF;
    ALTER TABLE ingest.knowledge_segment DROP COLUMN embedding, DROP COLUMN to_embed;
    EXECUTE format('ALTER TABLE ingest.knowledge_segment ADD COLUMN embedding halfvec(%s),'
                   ' ADD COLUMN to_embed boolean NOT NULL DEFAULT true', asked_dimensions);
    CREATE INDEX segment_to_embed ON ingest.knowledge_segment (document_id, ordinal) WHERE to_embed;
    INSERT INTO ingest.embedding_model (model, dimensions) VALUES (asked_model, asked_dimensions)
    ON CONFLICT (only_one) DO UPDATE SET model = excluded.model, dimensions = excluded.dimensions, since = now();
    RETURN NULL;
END
$$;


-- Events that wait to be published to Kafka. The columns id, aggregatetype,
-- aggregateid, type and payload are those of Debezium's outbox event router, which
-- may take the publisher's place.
--
-- Events of one aggregate are published in order, however many publishers there
-- are: each aggregate has a lane, which numbers its events and is leased as a
-- whole. What is waiting in a long lane costs a claim nothing.
CREATE TABLE ingest.outbox_lane (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    aggregatetype text NOT NULL,
    aggregateid   text NOT NULL,
    next_seq      bigint NOT NULL DEFAULT 1,
    head_seq      bigint NOT NULL DEFAULT 1,
    due_at        timestamptz NOT NULL DEFAULT now(),
    locked_by     text,
    locked_at     timestamptz,
    lease_seconds double precision,
    lease_token   bigint,
    CONSTRAINT lane_once UNIQUE (aggregatetype, aggregateid),
    CONSTRAINT lane_head_is_within CHECK (head_seq BETWEEN 1 AND next_seq),
    CONSTRAINT lane_lease_is_whole CHECK
        ((locked_by IS NULL) = (locked_at IS NULL) AND (locked_by IS NULL) = (lease_seconds IS NULL)
         AND (locked_by IS NULL OR (lease_token IS NOT NULL AND lease_seconds > 0)))
) WITH (fillfactor = 70);
-- A claim takes the longest waiting; a lane without work is not looked at.
CREATE INDEX lane_with_work ON ingest.outbox_lane (due_at) WHERE head_seq < next_seq;

-- One event, with what became of it. `task_id` is for those that tell of a task.
CREATE TABLE ingest.outbox_event (
    id            uuid PRIMARY KEY,
    aggregatetype text NOT NULL,
    aggregateid   text NOT NULL,
    type          text NOT NULL,
    payload       jsonb NOT NULL,
    task_id       uuid,
    lane_id       bigint NOT NULL,
    seq           bigint NOT NULL,
    status        text NOT NULL DEFAULT 'NEW',
    attempt_count integer NOT NULL DEFAULT 0,
    next_retry_at timestamptz,
    last_error    text,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at       timestamptz,
    CONSTRAINT event_place UNIQUE (lane_id, seq),
    CONSTRAINT event_status_known CHECK (status IN ('NEW', 'RETRYING', 'SENT', 'DEAD')),
    CONSTRAINT event_waits_only_to_be_retried CHECK ((status = 'RETRYING') = (next_retry_at IS NOT NULL)),
    CONSTRAINT event_sent_has_its_time CHECK ((status = 'SENT') = (sent_at IS NOT NULL)),
    CONSTRAINT event_failure_has_a_reason CHECK ((status IN ('RETRYING', 'DEAD')) = (last_error IS NOT NULL)),
    CONSTRAINT event_new_was_not_tried CHECK (status <> 'NEW' OR attempt_count = 0)
) WITH (fillfactor = 80);
-- How many wait is counted by this.
CREATE INDEX event_backlog ON ingest.outbox_event (created_at) WHERE status IN ('NEW', 'RETRYING');
-- The dead ones are listed by this.
CREATE INDEX event_dead ON ingest.outbox_event (created_at) WHERE status = 'DEAD';
-- A task's newest event.
CREATE INDEX event_by_task ON ingest.outbox_event (task_id, seq DESC) WHERE task_id IS NOT NULL;
-- A task is told of once at a time.
CREATE UNIQUE INDEX event_unsettled_once_per_task ON ingest.outbox_event (task_id)
    WHERE status IN ('NEW', 'RETRYING');

-- Tell Kafka that a task is to be worked on: an event at the end of its document's
-- lane, by the transaction that calls. A task has one unsettled event at most: if it
-- has one, that one is the answer. The lane is locked until the transaction ends,
-- so numbers are given in the order of commits and none is left out.
CREATE FUNCTION ingest.emit(asked_task uuid, asked_document uuid, new_event uuid) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    lane  ingest.outbox_lane;
    event uuid;
BEGIN
    INSERT INTO ingest.outbox_lane AS l (aggregatetype, aggregateid)
    VALUES ('ingest_task', asked_document::text)
    ON CONFLICT (aggregatetype, aggregateid) DO UPDATE SET next_seq = l.next_seq
    RETURNING l.* INTO lane;
    SELECT id INTO event FROM ingest.outbox_event
    WHERE task_id = asked_task AND status IN ('NEW', 'RETRYING');
    IF event IS NOT NULL THEN
        RETURN event;
    END IF;
    INSERT INTO ingest.outbox_event (id, aggregatetype, aggregateid, type, payload, task_id, lane_id, seq)
    VALUES (new_event, lane.aggregatetype, lane.aggregateid, 'IngestTaskQueued',
            jsonb_build_object('taskId', asked_task, 'documentId', asked_document),
            asked_task, lane.id, lane.next_seq);
    UPDATE ingest.outbox_lane
    SET next_seq = lane.next_seq + 1,
        due_at = CASE WHEN lane.head_seq = lane.next_seq THEN clock_timestamp() ELSE due_at END
    WHERE id = lane.id;
    RETURN new_event;
END
$$;
