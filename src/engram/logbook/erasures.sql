-- name: due
-- Forgotten memories whose copy is to be deleted now, longest waiting first.
SELECT memory_record_id FROM logbook.memories
WHERE erase_due_at <= now()
  AND (erase_locked_at IS NULL OR erase_locked_at + make_interval(secs => %(lease_seconds)s) <= now())
ORDER BY erase_due_at
LIMIT %(limit)s;

-- name: claim
-- Lease the erasing of one copy, unless the same content is on its way again: then it is due later.
--
-- The lease puts the record back into memories_live_content, where a write of the
-- same content meets it, or it meets the write. Where that content lives on in
-- another record the index has no room: one that is stored has a copy of its own,
-- and one that was given up is kept from being written anew for as long.
WITH asked AS MATERIALIZED (
    SELECT m.memory_record_id, twin.memory_record_id AS twin_id,
           COALESCE(twin.state = 'intent' OR (twin.state = 'parked' AND EXISTS (
               SELECT FROM logbook.outbox_memory o
               WHERE o.outbox_id = twin.outbox_id AND o.status <> 'dead')), false) AS on_its_way
    FROM logbook.memories m
    LEFT JOIN logbook.memories twin
           ON twin.target_space = m.target_space AND twin.payload_sha = m.payload_sha
          AND twin.state <> 'forgotten'
    WHERE m.memory_record_id = %(memory_record_id)s
), kept AS (
    UPDATE logbook.memories twin
    SET held_until = now() + make_interval(secs => %(lease_seconds)s)
    FROM asked
    WHERE twin.memory_record_id = asked.twin_id AND NOT asked.on_its_way AND twin.state = 'parked'
)
UPDATE logbook.memories m
SET erase_token = CASE WHEN on_its_way THEN m.erase_token ELSE nextval('logbook.lease_token_seq') END,
    erase_tries = m.erase_tries + CASE WHEN on_its_way THEN 0 ELSE 1 END,
    erase_locked_at = CASE WHEN asked.twin_id IS NULL THEN now() END,
    erase_due_at = CASE WHEN on_its_way THEN now() + make_interval(secs => %(later_seconds)s)
                        WHEN asked.twin_id IS NULL THEN m.erase_due_at
                        ELSE now() + make_interval(secs => %(lease_seconds)s) END,
    updated_at = now()
FROM asked
WHERE m.memory_record_id = asked.memory_record_id
  AND m.state = 'forgotten'
  AND m.erase_due_at <= now()
  AND (m.erase_locked_at IS NULL OR m.erase_locked_at + make_interval(secs => %(lease_seconds)s) <= now())
RETURNING m.memory_record_id, m.erase_token, m.erase_tries, m.target_space, m.payload_sha, m.payload_md,
          m.delivery_key, on_its_way,
          COALESCE(m.memory_id, (SELECT o.memory_id FROM logbook.outbox_memory o
                                 WHERE o.outbox_id = m.outbox_id)) AS memory_id;

-- name: finish
-- The copy is gone, or was never there.
UPDATE logbook.memories
SET erase_due_at = NULL, erase_locked_at = NULL, updated_at = now()
WHERE memory_record_id = %(memory_record_id)s AND erase_token = %(erase_token)s AND state = 'forgotten'
RETURNING memory_record_id;

-- name: postpone
-- It could not be deleted now; it is due again after the delay.
UPDATE logbook.memories
SET erase_due_at = now() + make_interval(secs => %(delay_seconds)s), erase_locked_at = NULL,
    updated_at = now()
WHERE memory_record_id = %(memory_record_id)s AND erase_token = %(erase_token)s AND state = 'forgotten'
RETURNING memory_record_id;

-- name: still_used
-- Which of these ids of the memory server's a memory that is not forgotten has.
SELECT DISTINCT memory_id FROM logbook.memories
WHERE memory_id = ANY(%(memory_ids)s) AND state <> 'forgotten';

-- name: waiting
-- How many copies are still to be deleted, and since when.
SELECT count(*) AS waiting,
       COALESCE(EXTRACT(epoch FROM now() - min(forgotten_at)), 0)::float8 AS oldest_seconds
FROM logbook.memories WHERE erase_due_at IS NOT NULL;
