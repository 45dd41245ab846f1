-- name: enqueue
-- Put content in the outbox, or find the live row that has it; the memory follows, never from 'stored'.
WITH drawn AS MATERIALIZED (
    SELECT nextval('logbook.outbox_memory_outbox_id_seq') AS outbox_id
), queued AS (
    INSERT INTO logbook.outbox_memory AS o
        (outbox_id, target_space, payload_sha, payload_md, item_id, last_error)
    SELECT outbox_id, %(target_space)s, %(payload_sha)s, %(payload_md)s, %(item_id)s, %(last_error)s
    FROM drawn
    ON CONFLICT (target_space, payload_sha) WHERE status <> 'dead' AND forgotten_at IS NULL
    DO UPDATE SET updated_at = o.updated_at
    RETURNING outbox_id, status
), memory AS (
    INSERT INTO logbook.memories AS m
        (target_space, payload_sha, payload_md, item_id, state, outbox_id, words)
    SELECT %(target_space)s, %(payload_sha)s, %(payload_md)s, %(item_id)s, 'parked', outbox_id,
           %(words)s::tsvector
    FROM queued WHERE status = 'pending'
    ON CONFLICT (target_space, payload_sha) WHERE state <> 'forgotten' OR erase_locked_at IS NOT NULL
    -- Content that is being erased this moment is refused by memories_erased_before_written_anew.
    DO UPDATE SET outbox_id = CASE WHEN m.state = 'stored' THEN m.outbox_id ELSE EXCLUDED.outbox_id END,
                  state = CASE WHEN m.state = 'forgotten' THEN 'parked' ELSE m.state END
)
SELECT outbox_id FROM queued;

-- name: check_dedup
-- The sent row that already has this content.
SELECT * FROM logbook.outbox_memory
WHERE target_space = %(target_space)s AND payload_sha = %(payload_sha)s
  AND status = 'sent' AND forgotten_at IS NULL;

-- name: claim
-- Lease due rows, oldest first. A lease is over once its own length has passed.
WITH due AS MATERIALIZED (
    SELECT outbox_id FROM logbook.outbox_memory
    -- That is: pending, not forgotten, and unlocked or over. On a table not analysed yet
    -- the planner takes "=" and "IS NULL" for rare and would sort every due row; "<>" it
    -- takes for common, so it walks outbox_due in order and stops at the limit.
    WHERE status <> 'sent' AND status <> 'dead'
      AND next_attempt_at <= now()
      AND num_nonnulls(forgotten_at) <> 1
      AND CASE WHEN locked_at + make_interval(secs => lease_seconds) > now() THEN 1 ELSE 0 END <> 1
    ORDER BY next_attempt_at, outbox_id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE logbook.outbox_memory o
SET locked_by = %(worker_id)s,
    locked_at = now(),
    lease_seconds = %(lease_seconds)s,
    lease_token = nextval('logbook.lease_token_seq'),
    -- A time that somebody else's statement wrote and Python cannot read would hold up all the others.
    next_attempt_at = GREATEST(o.next_attempt_at, 'epoch'),
    -- Taking over from a holder that never settled: it may have delivered.
    ambiguous = o.ambiguous OR o.locked_at IS NOT NULL,
    updated_at = now()
WHERE o.outbox_id = ANY(ARRAY(SELECT outbox_id FROM due))
RETURNING o.*;

-- name: renew
-- Start the lease anew. Late is allowed as long as nobody has taken the row.
UPDATE logbook.outbox_memory
SET locked_at = now(), updated_at = now()
WHERE outbox_id = %(outbox_id)s
  AND status = 'pending'
  AND locked_by = %(worker_id)s
  AND (%(lease_token)s::bigint IS NULL OR lease_token = %(lease_token)s)
RETURNING outbox_id;

-- name: renew_many
-- Start held leases anew, as renew does, and tell what is known of each memory in this moment.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(lease_tokens)s::bigint[])
        AS t (outbox_id, lease_token)
), renewed AS (
    UPDATE logbook.outbox_memory o
    SET locked_at = now(), updated_at = now()
    FROM asked
    WHERE o.outbox_id = asked.outbox_id
      AND o.outbox_id = ANY(%(outbox_ids)s::bigint[])
      -- In one CASE, here and in the settles: taken one by one, the planner multiplies its guesses
      -- until it expects a single row, and finds that by reading all that is pending.
      AND CASE WHEN o.status = 'pending'
                AND o.locked_by = %(worker_id)s
                AND (asked.lease_token IS NULL OR o.lease_token = asked.lease_token)
          THEN true ELSE false END
    RETURNING o.outbox_id, o.target_space, o.payload_sha, o.forgotten_at
)
SELECT renewed.outbox_id, renewed.forgotten_at IS NOT NULL AS forgotten, m.delivery_key, m.state, m.memory_id,
       COALESCE(EXTRACT(epoch FROM m.intent_at + make_interval(secs => m.intent_seconds) - now()), 0)::float8
           AS intent_left_seconds
FROM renewed
LEFT JOIN logbook.memories m
       ON m.target_space = renewed.target_space AND m.payload_sha = renewed.payload_sha
      AND m.state <> 'forgotten';

-- name: release_many
-- Hand leased rows back without counting a try, each after its own delay and, with a reason, its audit.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(lease_tokens)s::bigint[], %(errors)s::text[],
                         %(delays)s::float8[], %(ambiguous)s::bool[], %(reasons)s::text[])
        AS t (outbox_id, lease_token, error, delay, ambiguous, reason)
), released AS (
    UPDATE logbook.outbox_memory o
    SET locked_by = NULL,
        locked_at = NULL,
        next_attempt_at = LEAST(GREATEST(o.next_attempt_at, now() + make_interval(secs => asked.delay), 'epoch'),
                                '9999-01-01 00:00Z'),
        ambiguous = o.ambiguous OR asked.ambiguous,
        last_error = COALESCE(asked.error, o.last_error),
        updated_at = now()
    FROM asked
    WHERE o.outbox_id = asked.outbox_id
      AND o.outbox_id = ANY(%(outbox_ids)s::bigint[])
      AND CASE WHEN o.status = 'pending'
                AND o.locked_by = %(worker_id)s
                AND (asked.lease_token IS NULL OR o.lease_token = asked.lease_token)
          THEN true ELSE false END
    RETURNING o.outbox_id, o.actor_user_id, o.target_space, o.payload_sha, o.correlation_id,
              o.evidence_refs_json, asked.reason
), audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
         correlation_id, evidence_refs_json, finalized_at)
    SELECT actor_user_id, target_space, target_space, 'retry', reason, 'success', payload_sha,
           correlation_id, evidence_refs_json || jsonb_build_object('outbox_id', outbox_id), now()
    FROM released WHERE reason IS NOT NULL
)
SELECT outbox_id FROM released;

-- name: ack_many
-- Settle delivered rows whose lease is held and live; each with its memory and, if asked, its audit.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(lease_tokens)s::bigint[],
                         %(memory_ids)s::text[], %(reasons)s::text[])
        AS t (outbox_id, lease_token, memory_id, reason)
), settled AS (
    UPDATE logbook.outbox_memory o
    SET status = 'sent',
        memory_id = asked.memory_id,
        last_error = COALESCE('memory_id=' || asked.memory_id, o.last_error),
        locked_at = NULL,
        locked_by = NULL,
        updated_at = now()
    FROM asked
    WHERE o.outbox_id = asked.outbox_id
      AND o.outbox_id = ANY(%(outbox_ids)s::bigint[])
      AND CASE WHEN o.status = 'pending'
                AND o.locked_by = %(worker_id)s
                AND o.locked_at + make_interval(secs => o.lease_seconds) > now()
                AND (asked.lease_token IS NULL OR o.lease_token = asked.lease_token)
          THEN true ELSE false END
    RETURNING o.outbox_id, o.actor_user_id, o.target_space, o.payload_sha, o.memory_id, o.correlation_id,
              o.evidence_refs_json, asked.reason
), memory AS (
    -- By content, and by what the row is once it is locked: it may be parked this moment.
    UPDATE logbook.memories m
    SET state = CASE m.state WHEN 'parked' THEN 'stored' ELSE m.state END,
        memory_id = CASE m.state WHEN 'parked' THEN settled.memory_id ELSE m.memory_id END,
        updated_at = now()
    FROM settled
    WHERE m.target_space = settled.target_space AND m.payload_sha = settled.payload_sha
      AND m.state <> 'forgotten'
), audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
         memory_id, correlation_id, evidence_refs_json, finalized_at)
    SELECT actor_user_id, target_space, target_space, 'allow', reason, 'success', payload_sha,
           memory_id, correlation_id, evidence_refs_json || jsonb_build_object('outbox_id', outbox_id), now()
    FROM settled WHERE %(audited)s
)
SELECT outbox_id FROM settled;

-- name: fail_many
-- Give held rows back for a later try; each counts one and, if asked, has its audit.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(lease_tokens)s::bigint[], %(errors)s::text[],
                         %(next_attempts)s::timestamptz[], %(delays)s::float8[], %(ambiguous)s::bool[],
                         %(reasons)s::text[])
        AS t (outbox_id, lease_token, error, next_attempt_at, delay, ambiguous, reason)
), settled AS (
    UPDATE logbook.outbox_memory o
    SET retry_count = o.retry_count + 1,
        next_attempt_at = LEAST(GREATEST(
            COALESCE(asked.next_attempt_at, now() + make_interval(secs => asked.delay)), 'epoch'),
            '9999-01-01 00:00Z'),
        last_error = asked.error,
        ambiguous = o.ambiguous OR asked.ambiguous,
        locked_at = NULL,
        locked_by = NULL,
        updated_at = now()
    FROM asked
    WHERE o.outbox_id = asked.outbox_id
      AND o.outbox_id = ANY(%(outbox_ids)s::bigint[])
      AND CASE WHEN o.status = 'pending'
                AND o.locked_by = %(worker_id)s
                AND o.locked_at + make_interval(secs => o.lease_seconds) > now()
                AND (asked.lease_token IS NULL OR o.lease_token = asked.lease_token)
          THEN true ELSE false END
    RETURNING o.outbox_id, o.actor_user_id, o.target_space, o.payload_sha, o.correlation_id,
              o.evidence_refs_json, asked.reason
), audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
         correlation_id, evidence_refs_json, finalized_at)
    SELECT actor_user_id, target_space, target_space, 'retry', reason, 'success', payload_sha,
           correlation_id, evidence_refs_json || jsonb_build_object('outbox_id', outbox_id), now()
    FROM settled WHERE %(audited)s
)
SELECT outbox_id FROM settled;

-- name: dead_many
-- Give held rows up for good; each has, if asked, its audit.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(lease_tokens)s::bigint[],
                         %(errors)s::text[], %(ambiguous)s::bool[], %(reasons)s::text[])
        AS t (outbox_id, lease_token, error, ambiguous, reason)
), settled AS (
    UPDATE logbook.outbox_memory o
    SET status = 'dead',
        last_error = asked.error,
        ambiguous = o.ambiguous OR asked.ambiguous,
        locked_at = NULL,
        locked_by = NULL,
        updated_at = now()
    FROM asked
    WHERE o.outbox_id = asked.outbox_id
      AND o.outbox_id = ANY(%(outbox_ids)s::bigint[])
      AND CASE WHEN o.status = 'pending'
                AND o.locked_by = %(worker_id)s
                AND o.locked_at + make_interval(secs => o.lease_seconds) > now()
                AND (asked.lease_token IS NULL OR o.lease_token = asked.lease_token)
          THEN true ELSE false END
    RETURNING o.outbox_id, o.actor_user_id, o.target_space, o.payload_sha, o.correlation_id,
              o.evidence_refs_json, asked.reason
), audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
         correlation_id, evidence_refs_json, finalized_at)
    SELECT actor_user_id, target_space, target_space, 'reject', reason, 'success', payload_sha,
           correlation_id, evidence_refs_json || jsonb_build_object('outbox_id', outbox_id), now()
    FROM settled WHERE %(audited)s
)
SELECT outbox_id FROM settled;

-- name: record_conflicts
-- Audit the settles that were refused, with what the row looks like now; a row that this very
-- lease has settled already is no conflict.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(outbox_ids)s::bigint[], %(lease_tokens)s::bigint[])
        AS t (outbox_id, lease_token)
), lost AS (
    SELECT o.* FROM asked JOIN logbook.outbox_memory o USING (outbox_id)
    WHERE o.lease_token IS DISTINCT FROM asked.lease_token
       OR (o.status = 'pending' AND o.locked_by IS NOT NULL)
), audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
         correlation_id, evidence_refs_json, finalized_at)
    SELECT actor_user_id, target_space, target_space, 'conflict', 'outbox_flush_conflict', 'success',
           payload_sha, correlation_id,
           evidence_refs_json || jsonb_build_object(
               'outbox_id', outbox_id,
               'extra', COALESCE(evidence_refs_json -> 'extra', '{}') || jsonb_build_object(
                   'status', lost.status, 'locked_by', locked_by, 'worker_id', %(worker_id)s::text)),
           now()
    FROM lost
)
SELECT outbox_id FROM lost;

-- name: get
-- One row, whole.
SELECT * FROM logbook.outbox_memory WHERE outbox_id = %(outbox_id)s;

-- name: stats
-- How many rows are in each state, how many are due, and how old the oldest waiting one is.
-- A forgotten row waits for nothing.
SELECT count(*) FILTER (WHERE waiting) AS pending,
       count(*) FILTER (WHERE status = 'sent') AS sent,
       count(*) FILTER (WHERE status = 'dead') AS dead,
       count(*) FILTER (WHERE waiting AND next_attempt_at <= now()) AS due,
       COALESCE(EXTRACT(epoch FROM now() - min(created_at) FILTER (WHERE waiting)), 0)::float8
           AS oldest_pending_seconds
FROM (SELECT *, status = 'pending' AND forgotten_at IS NULL AS waiting FROM logbook.outbox_memory) AS o;

-- name: backlog
-- The waiting part of stats, from the index of pending rows: as cheap as the backlog is short.
SELECT count(*) AS pending,
       COALESCE(EXTRACT(epoch FROM now() - min(created_at)), 0)::float8 AS oldest_pending_seconds
FROM logbook.outbox_memory
WHERE status = 'pending' AND forgotten_at IS NULL;

-- name: enqueue_many
-- Put many contents in the outbox at once; each follows the rules of a single enqueue.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(target_spaces)s::text[], %(payload_shas)s::text[],
                         %(payloads)s::text[], %(words)s::tsvector[])
        AS t (target_space, payload_sha, payload_md, words)
), queued AS (
    INSERT INTO logbook.outbox_memory AS o (target_space, payload_sha, payload_md)
    SELECT target_space, payload_sha, payload_md FROM given
    ON CONFLICT (target_space, payload_sha) WHERE status <> 'dead' AND forgotten_at IS NULL
    DO UPDATE SET updated_at = o.updated_at
    RETURNING outbox_id, target_space, payload_sha, status
), memory AS (
    INSERT INTO logbook.memories AS m (target_space, payload_sha, payload_md, state, outbox_id, words)
    SELECT given.target_space, given.payload_sha, given.payload_md, 'parked', queued.outbox_id, given.words
    FROM given JOIN queued USING (target_space, payload_sha)
    WHERE queued.status = 'pending'
    ON CONFLICT (target_space, payload_sha) WHERE state <> 'forgotten' OR erase_locked_at IS NOT NULL
    -- Content that is being erased this moment is refused by memories_erased_before_written_anew.
    DO UPDATE SET outbox_id = CASE WHEN m.state = 'stored' THEN m.outbox_id ELSE EXCLUDED.outbox_id END,
                  state = CASE WHEN m.state = 'forgotten' THEN 'parked' ELSE m.state END
)
SELECT outbox_id, target_space, payload_sha FROM queued;

-- name: requeue
-- A dead row's content as a new row with its redirect audit; or the live row that has it already.
WITH dead AS MATERIALIZED (
    SELECT o.*, nextval('logbook.outbox_memory_outbox_id_seq') AS drawn_id,
           nextval('governance.write_audit_audit_id_seq') AS drawn_audit_id
    FROM logbook.outbox_memory o
    JOIN logbook.memories m
      ON m.target_space = o.target_space AND m.payload_sha = o.payload_sha AND m.state <> 'forgotten'
    WHERE o.outbox_id = %(outbox_id)s AND o.status = 'dead' AND o.forgotten_at IS NULL
    -- Content that is being forgotten this moment is not tried again.
    FOR UPDATE
), queued AS (
    INSERT INTO logbook.outbox_memory AS o
        (outbox_id, target_space, payload_sha, payload_md, item_id, ambiguous, requeued_from,
         correlation_id, actor_user_id, kind, meta_json, evidence_refs_json)
    SELECT drawn_id, target_space, payload_sha, payload_md, item_id, ambiguous, outbox_id,
           correlation_id, actor_user_id, kind, meta_json, evidence_refs_json
    FROM dead
    ON CONFLICT (target_space, payload_sha) WHERE status <> 'dead' AND forgotten_at IS NULL
    DO UPDATE SET updated_at = o.updated_at
    RETURNING outbox_id
), audit AS (
    INSERT INTO governance.write_audit
        (audit_id, actor_user_id, requested_space, target_space, action, reason, status, payload_sha,
         correlation_id, evidence_refs_json, finalized_at)
    SELECT drawn_audit_id, COALESCE(%(requested_by)s, actor_user_id), target_space, target_space,
           'redirect', 'outbox_requeued', 'redirected', payload_sha, correlation_id,
           evidence_refs_json || jsonb_build_object('outbox_id', queued.outbox_id), now()
    FROM dead JOIN queued ON queued.outbox_id = dead.drawn_id
), memory AS (
    UPDATE logbook.memories m
    SET outbox_id = queued.outbox_id, updated_at = now()
    FROM dead, queued
    WHERE m.target_space = dead.target_space AND m.payload_sha = dead.payload_sha AND m.state = 'parked'
)
SELECT queued.outbox_id, queued.outbox_id = dead.drawn_id AS fresh FROM queued, dead;

-- name: list
-- Rows by status, space, age and text, in the order they came.
SELECT * FROM logbook.outbox_memory
WHERE outbox_id > %(after_id)s
  AND (%(status)s::text IS NULL OR status = %(status)s)
  AND (%(target_space)s::text IS NULL OR target_space = %(target_space)s)
  AND (%(older_than_seconds)s::float8 IS NULL
       OR created_at <= now() - make_interval(secs => %(older_than_seconds)s))
  AND (%(text)s::text IS NULL
       OR strpos(lower(payload_md), lower(%(text)s)) > 0
       OR strpos(lower(COALESCE(last_error, '')), lower(%(text)s)) > 0)
ORDER BY outbox_id
LIMIT %(limit)s;
