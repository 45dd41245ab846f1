-- name: emit
-- Events for tasks that have none waiting; answers each task's.
SELECT t.id AS task_id, ingest.emit(t.id, t.document_id, gen_random_uuid()) AS id
FROM ingest.ingest_task t
WHERE t.id = ANY(%(task_ids)s::uuid[])
ORDER BY t.document_id, t.id;

-- name: claim
-- Lease lanes whose head is due, the longest waiting first, with the first events of each.
--
-- Few lanes with work get longer runs, so that one long lane is not published one by one.
WITH due AS MATERIALIZED (
    SELECT id FROM ingest.outbox_lane
    WHERE head_seq < next_seq AND due_at <= now()
      AND (locked_at IS NULL OR locked_at + make_interval(secs => lease_seconds) <= now())
    ORDER BY due_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), leased AS (
    UPDATE ingest.outbox_lane l
    SET locked_by = %(worker_id)s, locked_at = now(), lease_seconds = %(lease_seconds)s,
        lease_token = nextval('logbook.lease_token_seq')
    FROM due WHERE l.id = due.id
    RETURNING l.id, l.head_seq, l.lease_token
)
SELECT e.id, e.aggregatetype, e.aggregateid, e.type, e.payload::text AS payload, e.lane_id, e.attempt_count,
       leased.lease_token
FROM leased
CROSS JOIN (SELECT %(batch)s::bigint / greatest(count(*), 1) AS length FROM due) AS run
CROSS JOIN LATERAL (
    SELECT * FROM ingest.outbox_event
    WHERE lane_id = leased.id AND seq >= leased.head_seq
    ORDER BY seq LIMIT greatest(run.length, 1)
) AS e
ORDER BY e.lane_id, e.seq;

-- name: settle
-- Write down what became of published events, lane by lane, and let the lanes go.
--
-- Of a lane whose lease was lost nothing is written. A dead event frees its lane, and
-- its task says so.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(event_ids)s::uuid[], %(lane_ids)s::bigint[], %(lease_tokens)s::bigint[],
                         %(errors)s::text[], %(delays)s::float8[])
        AS a (event_id, lane_id, lease_token, error, delay)
), held AS MATERIALIZED (
    -- Lane by lane: joined as a whole, the planner would compare every lane with every other.
    SELECT lane.id FROM (SELECT DISTINCT lane_id, lease_token FROM asked ORDER BY lane_id) AS a
    CROSS JOIN LATERAL (
        SELECT l.id FROM ingest.outbox_lane l
        WHERE l.id = a.lane_id AND l.lease_token = a.lease_token AND l.locked_by = %(worker_id)s
          AND l.locked_at + make_interval(secs => l.lease_seconds) > now()
        FOR UPDATE
    ) AS lane
), settled AS (
    UPDATE ingest.outbox_event e
    SET status = CASE WHEN a.error IS NULL THEN 'SENT'
                      WHEN e.attempt_count + 1 >= %(max_attempts)s THEN 'DEAD' ELSE 'RETRYING' END,
        attempt_count = e.attempt_count + CASE WHEN a.error IS NULL THEN 0 ELSE 1 END,
        sent_at = CASE WHEN a.error IS NULL THEN clock_timestamp() END,
        next_retry_at = CASE WHEN a.error IS NOT NULL AND e.attempt_count + 1 < %(max_attempts)s
                             THEN clock_timestamp() + make_interval(secs => a.delay) END,
        last_error = a.error
    FROM asked a JOIN held ON held.id = a.lane_id
    WHERE e.id = a.event_id AND e.status IN ('NEW', 'RETRYING')
    RETURNING e.id, e.lane_id, e.seq, e.status, e.next_retry_at, e.last_error, e.task_id,
              extract(epoch FROM e.sent_at - e.created_at)::float8 AS waited
), moved AS (
    UPDATE ingest.outbox_lane l
    SET head_seq = coalesce(lane.passed + 1, l.head_seq),
        due_at = coalesce(lane.due_at, clock_timestamp()),
        locked_by = NULL, locked_at = NULL, lease_seconds = NULL
    FROM (
        SELECT lane_id AS id, max(seq) FILTER (WHERE status IN ('SENT', 'DEAD')) AS passed,
               max(next_retry_at) AS due_at
        FROM settled GROUP BY lane_id
    ) AS lane
    WHERE l.id = lane.id
), told AS (
    UPDATE ingest.ingest_task t
    SET last_error = 'not published: ' || s.last_error, error_message = 'not published: ' || s.last_error
    FROM settled s
    WHERE s.status = 'DEAD' AND t.id = s.task_id AND t.status IN ('QUEUED', 'RETRYING')
)
SELECT id, status, waited FROM settled;

-- name: release
-- Let go of lanes of which nothing was sent.
UPDATE ingest.outbox_lane l
SET locked_by = NULL, locked_at = NULL, lease_seconds = NULL
FROM unnest(%(lane_ids)s::bigint[], %(lease_tokens)s::bigint[]) AS asked (lane_id, lease_token)
WHERE l.id = asked.lane_id AND l.lease_token = asked.lease_token AND l.locked_by = %(worker_id)s
RETURNING l.id;

-- name: backlog
-- How many events wait to be published.
SELECT count(*) AS waiting FROM ingest.outbox_event WHERE status IN ('NEW', 'RETRYING');

-- name: list
-- Events, the newest first.
SELECT id, aggregatetype, aggregateid, type, task_id, status, attempt_count, next_retry_at, last_error,
       created_at, sent_at
FROM ingest.outbox_event
WHERE %(status)s::text IS NULL OR status = %(status)s
ORDER BY created_at DESC LIMIT %(limit)s;

-- name: of_task
-- A task's events, the newest first.
SELECT id, aggregateid, type, status, attempt_count, next_retry_at, last_error, created_at, sent_at
FROM ingest.outbox_event WHERE task_id = %(task_id)s ORDER BY seq DESC LIMIT %(limit)s;

-- name: owed
-- Tasks that should have an event by now and have none since they came to wait; with `lost`,
-- also those whose event was sent, for a topic that has lost its messages. By id, a page at a time.
SELECT t.id FROM ingest.ingest_task t
WHERE t.status IN ('QUEUED', 'RETRYING')
  AND (%(after)s::uuid IS NULL OR t.id > %(after)s)
  AND (t.next_retry_at IS NULL OR t.next_retry_at <= now())
  AND NOT EXISTS (
      SELECT FROM ingest.outbox_event e
      WHERE e.task_id = t.id
        AND (e.status IN ('NEW', 'RETRYING') OR (NOT %(lost)s AND e.created_at >= t.updated_at))
  )
ORDER BY t.id LIMIT %(limit)s;

-- name: story
-- A task with its events and transitions, by its own id, its document's or an event's; the newest of several.
SELECT t.id, t.document_id, t.owner, t.status, t.attempt_count, t.next_retry_at, t.last_error, t.locked_by,
       t.updated_at, t.stream_id, d.title, now() AS now,
       locked_at + make_interval(secs => lease_seconds) AS lease_ends_at,
       (SELECT coalesce(jsonb_agg(to_jsonb(s) ORDER BY s.at), '[]') FROM (
            SELECT created_at AS at, coalesce(from_status || ' → ', '') || to_status AS said, message
            FROM ingest.ingest_task_transition WHERE task_id = t.id ORDER BY id DESC LIMIT 50
        ) AS s) AS transitions,
       (SELECT coalesce(jsonb_agg(to_jsonb(s) ORDER BY s.seq), '[]') FROM (
            SELECT id, seq, status, attempt_count, next_retry_at, last_error, created_at, sent_at
            FROM ingest.outbox_event WHERE task_id = t.id ORDER BY seq DESC LIMIT 20
        ) AS s) AS events
FROM ingest.ingest_task t
JOIN ingest.knowledge_document d ON d.id = t.document_id
WHERE t.id = %(id)s::uuid OR t.document_id = %(id)s::uuid
   OR t.id = (SELECT task_id FROM ingest.outbox_event WHERE id = %(id)s::uuid)
ORDER BY t.created_at DESC LIMIT 1;
