-- The durable core: what was asked (write_audit), what engram knows of every
-- memory (memories), and what is still to be delivered (outbox_memory).

CREATE SCHEMA logbook;
CREATE SCHEMA governance;

CREATE TABLE governance.settings (
    project_key        text PRIMARY KEY,
    team_write_enabled boolean NOT NULL DEFAULT false,
    policy_json        jsonb NOT NULL DEFAULT '{}',
    updated_by         text,
    updated_at         timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE governance.write_audit (
    audit_id           bigserial PRIMARY KEY,
    created_at         timestamptz NOT NULL DEFAULT now(),
    actor_user_id      text,
    requested_space    text,
    target_space       text NOT NULL,
    action             text NOT NULL,
    reason             text,
    status             text NOT NULL,
    payload_sha        text,
    memory_id          text,
    correlation_id     text,
    evidence_refs_json jsonb NOT NULL DEFAULT '{}',
    finalized_at       timestamptz,
    CONSTRAINT write_audit_action_known CHECK (action IN
        ('pending', 'allow', 'redirect', 'reject', 'error', 'dedup', 'retry', 'conflict', 'stale')),
    CONSTRAINT write_audit_status_known CHECK (status IN ('pending', 'success', 'redirected', 'failed')),
    CONSTRAINT write_audit_pending_is_pending CHECK ((action = 'pending') = (status = 'pending')),
    CONSTRAINT write_audit_redirect_is_parked CHECK ((action = 'redirect') = (status = 'redirected')),
    CONSTRAINT write_audit_final_has_time CHECK ((status = 'pending') = (finalized_at IS NULL))
);
CREATE INDEX write_audit_pending ON governance.write_audit (created_at) WHERE status = 'pending';
CREATE INDEX write_audit_by_time ON governance.write_audit (created_at);
CREATE INDEX write_audit_by_correlation ON governance.write_audit (correlation_id);
CREATE INDEX write_audit_by_outbox ON governance.write_audit ((evidence_refs_json ->> 'outbox_id'))
    WHERE evidence_refs_json ? 'outbox_id';

CREATE FUNCTION governance.keep_final_audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.status = 'pending' THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'governance.write_audit: % refused, the audit trail is append-only', TG_OP
        USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER write_audit_is_append_only BEFORE UPDATE OR DELETE ON governance.write_audit
    FOR EACH ROW EXECUTE FUNCTION governance.keep_final_audit();
CREATE TRIGGER write_audit_is_never_emptied BEFORE TRUNCATE ON governance.write_audit
    FOR EACH STATEMENT EXECUTE FUNCTION governance.keep_final_audit();

CREATE SEQUENCE logbook.lease_token_seq;

CREATE TABLE logbook.outbox_memory (
    outbox_id          bigserial PRIMARY KEY,
    target_space       text NOT NULL,
    payload_sha        text NOT NULL,
    payload_md         text NOT NULL,
    item_id            bigint,
    status             text NOT NULL DEFAULT 'pending',
    retry_count        integer NOT NULL DEFAULT 0,
    next_attempt_at    timestamptz NOT NULL DEFAULT now(),
    locked_at          timestamptz,
    locked_by          text,
    lease_seconds      integer,
    lease_token        bigint,
    last_error         text,
    memory_id          text,
    ambiguous          boolean NOT NULL DEFAULT false,
    requeued_from      bigint REFERENCES logbook.outbox_memory,
    forgotten_at       timestamptz,
    correlation_id     text,
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
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);
CREATE UNIQUE INDEX outbox_live_content ON logbook.outbox_memory (target_space, payload_sha)
    WHERE status <> 'dead' AND forgotten_at IS NULL;
CREATE INDEX outbox_due ON logbook.outbox_memory (next_attempt_at, outbox_id) WHERE status = 'pending';

CREATE TABLE logbook.memories (
    memory_record_id   bigserial PRIMARY KEY,
    delivery_key       uuid NOT NULL DEFAULT gen_random_uuid(),
    target_space       text NOT NULL,
    payload_sha        text NOT NULL,
    payload_md         text NOT NULL,
    kind               text,
    meta_json          jsonb NOT NULL DEFAULT '{}',
    evidence_refs_json jsonb NOT NULL DEFAULT '{}',
    actor_user_id      text,
    item_id            bigint,
    correlation_id     text,
    state              text NOT NULL,
    memory_id          text,
    audit_id           bigint,
    outbox_id          bigint,
    intent_at          timestamptz,
    intent_seconds     double precision,
    words              tsvector NOT NULL DEFAULT '',
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT memories_state_known CHECK (state IN ('intent', 'stored', 'parked', 'forgotten')),
    CONSTRAINT memories_sha_is_hex CHECK (payload_sha ~ '^[0-9a-f]{64}$'),
    CONSTRAINT memories_intent_has_audit CHECK
        (state <> 'intent' OR (audit_id IS NOT NULL AND intent_at IS NOT NULL AND intent_seconds > 0)),
    CONSTRAINT memories_parked_has_row CHECK (state <> 'parked' OR outbox_id IS NOT NULL)
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX memories_live_content ON logbook.memories (target_space, payload_sha)
    WHERE state <> 'forgotten';
CREATE INDEX memories_by_memory_id ON logbook.memories (memory_id) WHERE memory_id IS NOT NULL;
CREATE INDEX memories_by_outbox ON logbook.memories (outbox_id) WHERE outbox_id IS NOT NULL;
CREATE INDEX memories_by_audit ON logbook.memories (audit_id) WHERE state = 'intent';
CREATE INDEX memories_by_words ON logbook.memories USING gin (words);
