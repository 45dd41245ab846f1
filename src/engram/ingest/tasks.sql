-- name: create
-- A document, or the one that has these bytes already, and a new task for it with its first
-- transition and, where Kafka is told of it, its event.
WITH document AS (
    INSERT INTO ingest.knowledge_document AS d
        (id, owner, title, filename, media_type, sha256, bytes, artifact_key)
    VALUES (%(document_id)s, %(owner)s, COALESCE(%(title)s::text, %(filename)s), %(filename)s,
            %(media_type)s, %(sha256)s, %(bytes)s, %(artifact_key)s)
    ON CONFLICT (owner, sha256) DO UPDATE
    SET title = COALESCE(%(title)s::text, d.title), media_type = EXCLUDED.media_type,
        status = CASE d.status WHEN 'FAILED' THEN 'PENDING' ELSE d.status END, updated_at = now()
    RETURNING id, owner
), task AS (
    -- The same id again is the same request again, resumed: what it made is found, not made twice.
    INSERT INTO ingest.ingest_task AS t (id, document_id, owner)
    SELECT %(task_id)s, id, owner FROM document
    ON CONFLICT (id) DO UPDATE SET updated_at = t.updated_at
    RETURNING id, document_id, status, attempt_count, (xmax = 0) AS fresh
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, NULL, status, attempt_count, 'uploaded' FROM task WHERE fresh
)
SELECT id, document_id, status, fresh,
       CASE WHEN fresh AND %(emits)s THEN ingest.emit(id, document_id, gen_random_uuid()) END AS event_id
FROM task;

-- name: create_many
-- Many documents and tasks at once: what `create` does, for loads and benchmarks.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(task_ids)s::uuid[], %(document_ids)s::uuid[], %(sha256s)s::text[])
        AS g (task_id, document_id, sha256)
), document AS (
    INSERT INTO ingest.knowledge_document
        (id, owner, title, filename, media_type, sha256, bytes, artifact_key)
    SELECT document_id, %(owner)s, sha256, sha256, %(media_type)s, sha256, 0, sha256 FROM given
    RETURNING id
), task AS (
    INSERT INTO ingest.ingest_task (id, document_id, owner)
    SELECT task_id, document_id, %(owner)s FROM given JOIN document ON document.id = given.document_id
    RETURNING id, status, attempt_count
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, NULL, status, attempt_count, 'uploaded' FROM task
)
SELECT id FROM task;

-- name: put_on_stream
-- Record the entries that tasks have on the stream; one that was recorded meanwhile stays.
UPDATE ingest.ingest_task t
SET stream_id = asked.stream_id
FROM unnest(%(task_ids)s::uuid[], %(stream_ids)s::text[]) AS asked (task_id, stream_id)
WHERE t.id = asked.task_id
  AND t.stream_id IS NULL
RETURNING t.id;

-- name: off_the_stream
-- Forget entries that vanished: from now on the next entry that is read is their task's.
UPDATE ingest.ingest_task t
SET stream_id = NULL
FROM unnest(%(task_ids)s::uuid[], %(stream_ids)s::text[]) AS asked (task_id, stream_id)
WHERE t.id = asked.task_id
  AND t.stream_id = asked.stream_id
  AND t.status IN ('QUEUED', 'RUNNING', 'RETRYING')
RETURNING t.id;

-- name: start
-- Lease the tasks that entries stand for, if they may run now; an entry that nobody recorded is theirs.
WITH asked AS MATERIALIZED (
    SELECT task_id, array_agg(stream_id) AS stream_ids
    FROM unnest(%(task_ids)s::uuid[], %(stream_ids)s::text[]) AS a (task_id, stream_id)
    GROUP BY task_id
), due AS MATERIALIZED (
    SELECT t.id, t.status, COALESCE(t.stream_id, asked.stream_ids[1]) AS stream_id FROM asked
    JOIN ingest.ingest_task t ON t.id = asked.task_id
    WHERE t.status IN ('QUEUED', 'RETRYING')
      AND (t.next_retry_at IS NULL OR t.next_retry_at <= now())
      AND (t.stream_id IS NULL OR t.stream_id = ANY(asked.stream_ids))
    ORDER BY t.id
    FOR UPDATE OF t
), started AS (
    UPDATE ingest.ingest_task t
    SET status = 'RUNNING', next_retry_at = NULL, stream_id = due.stream_id,
        locked_by = %(worker_id)s, locked_at = now(), lease_seconds = %(lease_seconds)s,
        lease_token = nextval('logbook.lease_token_seq'), updated_at = now()
    FROM due WHERE t.id = due.id
    RETURNING t.*, due.status AS from_status
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, from_status, status, attempt_count, 'started by ' || locked_by FROM started
)
SELECT s.id, s.document_id, s.owner, s.attempt_count, s.stream_id, s.lease_token,
       d.title, d.media_type, d.artifact_key
FROM started s JOIN ingest.knowledge_document d ON d.id = s.document_id;

-- name: start_due
-- Lease retries whose time has come, the longest due first.
WITH due AS MATERIALIZED (
    SELECT id, status FROM ingest.ingest_task
    WHERE status = 'RETRYING' AND (next_retry_at IS NULL OR next_retry_at <= now())
    ORDER BY next_retry_at NULLS FIRST
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), started AS (
    UPDATE ingest.ingest_task t
    SET status = 'RUNNING', next_retry_at = NULL,
        locked_by = %(worker_id)s, locked_at = now(), lease_seconds = %(lease_seconds)s,
        lease_token = nextval('logbook.lease_token_seq'), updated_at = now()
    FROM due WHERE t.id = due.id
    RETURNING t.*, due.status AS from_status
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, from_status, status, attempt_count, 'started by ' || locked_by FROM started
)
SELECT s.id, s.document_id, s.owner, s.attempt_count, s.stream_id, s.lease_token,
       d.title, d.media_type, d.artifact_key
FROM started s JOIN ingest.knowledge_document d ON d.id = s.document_id;

-- name: renew
-- Start held leases anew. Late is allowed as long as nobody has taken the task.
UPDATE ingest.ingest_task t
SET locked_at = now()
FROM unnest(%(task_ids)s::uuid[], %(lease_tokens)s::bigint[]) AS asked (task_id, lease_token)
WHERE t.id = asked.task_id
  AND t.status = 'RUNNING'
  AND t.lease_token = asked.lease_token
RETURNING t.id;

-- name: progress
-- How far a task is; this renews its lease too.
UPDATE ingest.ingest_task
SET processed_segments = %(processed)s, total_segments = %(total)s, locked_at = now(), updated_at = now()
WHERE id = %(task_id)s
  AND status = 'RUNNING'
  AND lease_token = %(lease_token)s
RETURNING id;

-- name: succeed
-- Finish tasks whose lease is held and live; their documents can be searched now. A document that was
-- made something else by a later upload is left to that one's task.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(task_ids)s::uuid[], %(lease_tokens)s::bigint[], %(media_types)s::text[],
                         %(titles)s::text[], %(segments)s::integer[])
        AS a (task_id, lease_token, media_type, title, segments)
), settled AS (
    UPDATE ingest.ingest_task t
    SET status = 'SUCCEEDED', processed_segments = asked.segments, total_segments = asked.segments,
        last_error = NULL, error_message = NULL,
        locked_by = NULL, locked_at = NULL, lease_seconds = NULL, updated_at = now()
    FROM asked
    WHERE t.id = asked.task_id
      AND t.status = 'RUNNING'
      AND t.lease_token = asked.lease_token
      AND t.locked_at + make_interval(secs => t.lease_seconds) > now()
    RETURNING t.id, t.document_id, t.attempt_count, t.total_segments, asked.media_type, asked.title
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, 'RUNNING', 'SUCCEEDED', attempt_count, total_segments || ' segments' FROM settled
), document AS (
    UPDATE ingest.knowledge_document d
    SET status = 'READY', segments = settled.total_segments, updated_at = now()
    FROM settled
    WHERE d.id = settled.document_id AND d.media_type = settled.media_type AND d.title = settled.title
)
SELECT id FROM settled;

-- name: fail
-- Count a failure: to be retried, or dead once it was the last. A lease that ran out is one as well.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(task_ids)s::uuid[], %(lease_tokens)s::bigint[], %(errors)s::text[],
                         %(delays)s::float8[], %(final)s::bool[])
        AS a (task_id, lease_token, error, delay, final)
), settled AS (
    UPDATE ingest.ingest_task t
    SET attempt_count = t.attempt_count + 1,
        status = CASE WHEN asked.final OR t.attempt_count + 1 >= %(max_attempts)s THEN 'DEAD' ELSE 'RETRYING' END,
        next_retry_at = CASE WHEN asked.final OR t.attempt_count + 1 >= %(max_attempts)s THEN NULL
                             ELSE now() + make_interval(secs => asked.delay) END,
        last_error = asked.error, error_message = asked.error,
        locked_by = NULL, locked_at = NULL, lease_seconds = NULL, updated_at = now()
    FROM asked
    WHERE t.id = asked.task_id
      AND t.status = 'RUNNING'
      AND t.lease_token = asked.lease_token
      AND (t.locked_at + make_interval(secs => t.lease_seconds) > now()) <> %(lapsed)s
    RETURNING t.id, t.document_id, t.status, t.attempt_count, t.last_error, t.stream_id
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, 'RUNNING', status, attempt_count, last_error FROM settled
), document AS (
    UPDATE ingest.knowledge_document d
    SET status = CASE d.status WHEN 'READY' THEN d.status ELSE 'FAILED' END, updated_at = now()
    FROM settled WHERE d.id = settled.document_id AND settled.status = 'DEAD'
)
SELECT id, status, attempt_count, last_error, stream_id FROM settled;

-- name: hand_back
-- Let go of tasks that a stopping worker could not finish: no attempt is counted, they are due now.
WITH settled AS (
    UPDATE ingest.ingest_task t
    SET status = 'RETRYING', next_retry_at = now(),
        locked_by = NULL, locked_at = NULL, lease_seconds = NULL, updated_at = now()
    FROM unnest(%(task_ids)s::uuid[], %(lease_tokens)s::bigint[]) AS asked (task_id, lease_token)
    WHERE t.id = asked.task_id
      AND t.status = 'RUNNING'
      AND t.lease_token = asked.lease_token
    RETURNING t.id, t.attempt_count
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, 'RUNNING', 'RETRYING', attempt_count, 'handed back by a worker that was stopped' FROM settled
)
SELECT id FROM settled;

-- name: lapsed
-- Running tasks whose lease is over.
SELECT id, lease_token, attempt_count, locked_by FROM ingest.ingest_task
WHERE status = 'RUNNING' AND locked_at + make_interval(secs => lease_seconds) <= now()
LIMIT %(limit)s;

-- name: judge
-- What is known of the tasks that entries stand for.
SELECT id, status, stream_id, attempt_count, last_error, lease_token, document_id, owner,
       status = 'RETRYING' AND next_retry_at > now() AS waits
FROM ingest.ingest_task WHERE id = ANY(%(task_ids)s::uuid[]);

-- name: unfinished
-- Unfinished tasks by id, a page at a time, that have been there for a moment.
SELECT id, stream_id FROM ingest.ingest_task
WHERE status IN ('QUEUED', 'RUNNING', 'RETRYING')
  AND (%(after)s::uuid IS NULL OR id > %(after)s)
  AND updated_at <= now() - make_interval(secs => %(settled_seconds)s)
ORDER BY id LIMIT %(limit)s;

-- name: not_on_the_stream
-- Unfinished tasks that were never put on the stream, the oldest first.
SELECT id FROM ingest.ingest_task
WHERE stream_id IS NULL AND status IN ('QUEUED', 'RUNNING', 'RETRYING')
  AND updated_at <= now() - make_interval(secs => %(settled_seconds)s)
ORDER BY created_at LIMIT %(limit)s;

-- name: retry
-- A dead task once more, with all its attempts, or one of which Kafka could not be told; its old
-- entry is nobody's.
WITH dead AS MATERIALIZED (
    SELECT id, document_id, status FROM ingest.ingest_task t
    WHERE id = %(task_id)s AND owner = %(owner)s
      AND (status = 'DEAD' OR (status IN ('QUEUED', 'RETRYING') AND 'DEAD' = (
          SELECT e.status FROM ingest.outbox_event e WHERE e.task_id = t.id ORDER BY e.seq DESC LIMIT 1
      )))
    FOR UPDATE
), queued AS (
    UPDATE ingest.ingest_task t
    SET status = 'QUEUED', attempt_count = 0, last_error = NULL, error_message = NULL,
        processed_segments = 0, total_segments = NULL, stream_id = NULL, next_retry_at = NULL,
        updated_at = now()
    FROM dead WHERE t.id = dead.id
    RETURNING t.id, t.document_id, t.status, t.attempt_count, dead.status AS from_status
), transition AS (
    INSERT INTO ingest.ingest_task_transition (task_id, from_status, to_status, attempt_count, message)
    SELECT id, from_status, status, attempt_count, 'retried by ' || %(owner)s FROM queued
), document AS (
    UPDATE ingest.knowledge_document d
    SET status = CASE d.status WHEN 'FAILED' THEN 'PENDING' ELSE d.status END, updated_at = now()
    FROM queued WHERE d.id = queued.document_id
)
SELECT id, document_id, status,
       CASE WHEN %(emits)s THEN ingest.emit(id, document_id, gen_random_uuid()) END AS event_id
FROM queued;

-- name: get
-- One task of its owner.
SELECT * FROM ingest.ingest_task WHERE id = %(task_id)s AND owner = %(owner)s;

-- name: transitions
-- What became of a task, in order.
SELECT from_status, to_status, attempt_count, message, created_at
FROM ingest.ingest_task_transition WHERE task_id = %(task_id)s ORDER BY id;

-- name: list
-- An owner's tasks, the newest first, a page at a time.
SELECT t.*, d.title FROM ingest.ingest_task t
JOIN ingest.knowledge_document d ON d.id = t.document_id
WHERE t.owner = %(owner)s
  AND (%(status)s::text IS NULL OR t.status = %(status)s)
  AND (%(document_id)s::uuid IS NULL OR t.document_id = %(document_id)s)
  AND (%(before_at)s::timestamptz IS NULL OR (t.created_at, t.id) < (%(before_at)s, %(before_id)s::uuid))
ORDER BY t.created_at DESC, t.id DESC LIMIT %(limit)s;

-- name: documents
-- An owner's documents, the newest first, a page at a time.
SELECT * FROM ingest.knowledge_document
WHERE owner = %(owner)s
  AND (%(before_at)s::timestamptz IS NULL OR (created_at, id) < (%(before_at)s, %(before_id)s::uuid))
ORDER BY created_at DESC, id DESC LIMIT %(limit)s;

-- name: document
-- One document of its owner.
SELECT * FROM ingest.knowledge_document WHERE id = %(document_id)s AND owner = %(owner)s;

-- name: delete_document
-- Remove a document with its tasks and segments; says where its bytes are.
DELETE FROM ingest.knowledge_document WHERE id = %(document_id)s AND owner = %(owner)s
RETURNING artifact_key;

-- name: is_referred_to
-- Whether anything still needs the bytes under a key.
SELECT EXISTS (SELECT FROM ingest.knowledge_document WHERE artifact_key = %(artifact_key)s)
    OR EXISTS (SELECT FROM logbook.attachments WHERE artifact_key = %(artifact_key)s) AS yes;
