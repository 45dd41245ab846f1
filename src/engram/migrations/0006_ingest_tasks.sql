-- Documents and the tasks that bring them in. The database is the truth: the
-- stream that workers read from can be made anew from these rows.
CREATE SCHEMA ingest;

CREATE TABLE ingest.knowledge_document (
    id           uuid PRIMARY KEY,
    owner        text NOT NULL,
    title        text NOT NULL,
    filename     text NOT NULL,
    media_type   text NOT NULL,
    sha256       text NOT NULL,
    bytes        bigint NOT NULL,
    artifact_key text NOT NULL,
    status       text NOT NULL DEFAULT 'PENDING',
    segments     integer NOT NULL DEFAULT 0,
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT document_once_per_owner UNIQUE (owner, sha256),
    CONSTRAINT document_status_known CHECK (status IN ('PENDING', 'READY', 'FAILED')),
    CONSTRAINT document_hash_is_hex CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    CONSTRAINT document_counts_are_counts CHECK (bytes >= 0 AND segments >= 0)
);
CREATE INDEX document_by_owner ON ingest.knowledge_document (owner, created_at DESC, id DESC);
CREATE INDEX document_by_artifact ON ingest.knowledge_document (artifact_key);

CREATE TABLE ingest.ingest_task (
    id                 uuid PRIMARY KEY,
    document_id        uuid NOT NULL REFERENCES ingest.knowledge_document ON DELETE CASCADE,
    owner              text NOT NULL,
    status             text NOT NULL DEFAULT 'QUEUED',
    attempt_count      integer NOT NULL DEFAULT 0,
    next_retry_at      timestamptz,
    last_error         text,
    error_message      text,
    processed_segments integer NOT NULL DEFAULT 0,
    total_segments     integer,
    stream_id          text,
    locked_by          text,
    locked_at          timestamptz,
    lease_seconds      double precision,
    lease_token        bigint,
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
CREATE INDEX task_by_owner ON ingest.ingest_task (owner, created_at DESC, id DESC);
CREATE INDEX task_by_document ON ingest.ingest_task (document_id);
CREATE INDEX task_retrying ON ingest.ingest_task (next_retry_at) WHERE status = 'RETRYING';
CREATE INDEX task_running ON ingest.ingest_task (id) WHERE status = 'RUNNING';
CREATE INDEX task_unfinished ON ingest.ingest_task (id) WHERE status IN ('QUEUED', 'RUNNING', 'RETRYING');
CREATE INDEX task_not_on_the_stream ON ingest.ingest_task (created_at)
    WHERE stream_id IS NULL AND status IN ('QUEUED', 'RUNNING', 'RETRYING');

CREATE TABLE ingest.ingest_task_transition (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id       uuid NOT NULL REFERENCES ingest.ingest_task ON DELETE CASCADE,
    from_status   text,
    to_status     text NOT NULL,
    attempt_count integer NOT NULL,
    message       text,
    created_at    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX transition_by_task ON ingest.ingest_task_transition (task_id, id);

-- So that `FROM ingest_task` works as it is written down. Whoever may not set it writes the schema's name.
DO $$
BEGIN
    EXECUTE format('ALTER DATABASE %I SET search_path = "$user", public, ingest', current_database());
EXCEPTION WHEN insufficient_privilege THEN
    RAISE NOTICE 'the search path of % is left as it is', current_database();
END
$$;
