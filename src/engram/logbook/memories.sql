-- name: search
-- Memories of the given spaces and states: the rarest words choose the candidates, all words rank them.
--
-- Ranking every row that has a common word is slow, so no word brings in more
-- than `enough` rows, and a common word brings in none once rarer ones have
-- brought enough. Each look-up is MATERIALIZED because a LIMIT in sight makes
-- the planner walk the table.
WITH found AS MATERIALIZED (
    SELECT word, hit.memory_record_id
    FROM unnest(%(asked)s::tsquery[]) AS word
    CROSS JOIN LATERAL (
        WITH every AS MATERIALIZED (
            SELECT memory_record_id FROM logbook.memories
            WHERE words @@ word AND target_space = ANY(%(spaces)s) AND state = ANY(%(states)s)
              AND (%(kinds)s::text[] IS NULL OR lower(kind) = ANY(%(kinds)s))
              AND (%(actor)s::text IS NULL OR actor_user_id = %(actor)s)
              AND (%(item_id)s::bigint IS NULL OR item_id = %(item_id)s)
              AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
              AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
              AND (%(meta)s::jsonb IS NULL OR meta_json @> %(meta)s)
        )
        SELECT memory_record_id FROM every LIMIT %(enough)s
    ) AS hit
), weighed AS MATERIALIZED (
    SELECT word, 1 / ln(2 + count(*)) AS weight,
           sum(count(*)) OVER (ORDER BY count(*), word) - count(*) AS rows_of_rarer
    FROM found GROUP BY word
), candidate AS (
    SELECT DISTINCT found.memory_record_id
    FROM found JOIN weighed USING (word)
    WHERE weighed.rows_of_rarer < %(enough)s
), ranked AS (
    SELECT m.memory_record_id, sum(weighed.weight * ts_rank(m.words, weighed.word)) AS score
    FROM candidate JOIN logbook.memories m USING (memory_record_id) CROSS JOIN weighed
    GROUP BY m.memory_record_id
    ORDER BY score DESC, m.memory_record_id DESC
    LIMIT %(limit)s
)
SELECT m.memory_record_id, m.target_space, m.payload_md, m.kind, m.meta_json, m.actor_user_id, m.state,
       m.memory_id, m.outbox_id, m.created_at, ranked.score::float8 AS score
FROM ranked JOIN logbook.memories m USING (memory_record_id)
ORDER BY ranked.score DESC, m.memory_record_id DESC;

-- name: search_unasked
-- What the memory server cannot be asked for: parked memories, and stored ones whose id is not known.
--
-- There are few of them, so that all their words may choose and rank at once.
WITH candidate AS MATERIALIZED (
    SELECT memory_record_id FROM logbook.memories
    WHERE words @@ %(asked)s::tsquery
      AND (state = 'parked' OR (state = 'stored' AND memory_id IS NULL))
      AND target_space = ANY(%(spaces)s)
      AND (%(kinds)s::text[] IS NULL OR lower(kind) = ANY(%(kinds)s))
      AND (%(actor)s::text IS NULL OR actor_user_id = %(actor)s)
      AND (%(item_id)s::bigint IS NULL OR item_id = %(item_id)s)
      AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
      AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
      AND (%(meta)s::jsonb IS NULL OR meta_json @> %(meta)s)
    LIMIT %(enough)s
)
SELECT m.memory_record_id, m.target_space, m.payload_md, m.kind, m.meta_json, m.actor_user_id, m.state,
       m.memory_id, m.outbox_id, m.created_at, ts_rank(m.words, %(asked)s::tsquery)::float8 AS score
FROM candidate JOIN logbook.memories m USING (memory_record_id)
ORDER BY score DESC, m.memory_record_id DESC
LIMIT %(limit)s;

-- name: by_memory_ids
-- What engram knows of the memory server's hits, within the spaces the caller may read.
SELECT memory_record_id, memory_id, target_space, payload_md, kind, meta_json, actor_user_id, created_at
FROM logbook.memories
WHERE memory_id = ANY(%(memory_ids)s)
  AND target_space = ANY(%(spaces)s)
  AND state = 'stored'
  AND (%(kinds)s::text[] IS NULL OR lower(kind) = ANY(%(kinds)s))
  AND (%(actor)s::text IS NULL OR actor_user_id = %(actor)s)
  AND (%(item_id)s::bigint IS NULL OR item_id = %(item_id)s)
  AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
  AND (%(meta)s::jsonb IS NULL OR meta_json @> %(meta)s)
ORDER BY memory_record_id;

-- name: by_content
-- The memory with this content in this space, unless it was forgotten.
SELECT memory_record_id, delivery_key, target_space, payload_sha, kind, meta_json, actor_user_id, state,
       memory_id, audit_id, outbox_id, created_at, updated_at,
       COALESCE(EXTRACT(epoch FROM intent_at + make_interval(secs => intent_seconds) - now()), 0)::float8
           AS intent_left_seconds
FROM logbook.memories
WHERE target_space = %(target_space)s AND payload_sha = %(payload_sha)s AND state <> 'forgotten';

-- name: to_forget
-- The memories that an id of the memory server's, or of the outbox, stands for; forgotten ones too.
SELECT memory_record_id, target_space, actor_user_id, state, memory_id, outbox_id, audit_id,
       COALESCE(intent_at + make_interval(secs => intent_seconds) <= now(), false) AS overdue
FROM logbook.memories
WHERE memory_id = %(memory_id)s OR outbox_id = %(outbox_id)s
ORDER BY memory_record_id;

-- name: forget
-- A memory becomes unreadable at once, its outbox row is never sent, and the audit says who asked.
--
-- What the memory server has of it, or may have, is due to be erased: not before
-- the lease of a worker that may be delivering it this moment is over.
WITH asked AS MATERIALIZED (
    SELECT memory_record_id, outbox_id, target_space, payload_sha FROM logbook.memories
    WHERE memory_record_id = %(memory_record_id)s AND state IN ('stored', 'parked')
), its_rows AS MATERIALIZED (
    SELECT outbox_id FROM asked WHERE outbox_id IS NOT NULL
    UNION
    SELECT o.outbox_id FROM asked JOIN logbook.outbox_memory o USING (target_space, payload_sha)
    WHERE o.status <> 'dead' AND o.forgotten_at IS NULL
    ORDER BY outbox_id
), stamped AS (
    UPDATE logbook.outbox_memory o
    SET forgotten_at = now(), updated_at = now()
    FROM its_rows
    WHERE o.outbox_id = its_rows.outbox_id AND o.forgotten_at IS NULL
    RETURNING o.lease_token IS NOT NULL OR o.ambiguous AS was_tried,
              -- A call that timed out may still be applied, as long as it is not looked for.
              GREATEST(o.locked_at + make_interval(secs => o.lease_seconds),
                       CASE WHEN o.ambiguous THEN o.next_attempt_at END) AS not_before
), tried AS MATERIALIZED (
    SELECT COALESCE(bool_or(was_tried), false) AS was_tried, max(not_before) AS not_before FROM stamped
), forgotten AS (
    UPDATE logbook.memories m
    SET state = 'forgotten', forgotten_at = now(), updated_at = now(),
        erase_due_at = CASE WHEN m.memory_id IS NOT NULL OR m.erase_token IS NOT NULL
                              OR tried.was_tried
                            THEN GREATEST(now(), tried.not_before) END
    FROM asked, tried
    WHERE m.memory_record_id = asked.memory_record_id AND m.state IN ('stored', 'parked')
      -- Requeued meanwhile: its new row is not stamped, so this has to be asked again.
      AND m.outbox_id IS NOT DISTINCT FROM asked.outbox_id
    RETURNING m.*
), audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, reason, status, payload_sha, memory_id,
         correlation_id, evidence_refs_json, finalized_at)
    SELECT %(actor_user_id)s, target_space, target_space, 'allow', %(reason)s, 'success', payload_sha,
           memory_id, %(correlation_id)s,
           jsonb_build_object('extra', jsonb_build_object('correlation_id', %(correlation_id)s::text,
                                                          'asked_because', %(because)s::text)), now()
    FROM forgotten
)
SELECT memory_record_id, target_space, memory_id, outbox_id, erase_due_at IS NOT NULL AS to_erase FROM forgotten;
