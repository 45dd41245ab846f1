-- name: search
-- Words in the memories of the given spaces and states, best first.
SELECT memory_record_id, target_space, payload_md, kind, meta_json, actor_user_id, state,
       memory_id, outbox_id, created_at,
       ts_rank(words, %(asked)s::tsquery)::float8 AS score
FROM logbook.memories
WHERE target_space = ANY(%(spaces)s)
  AND state = ANY(%(states)s)
  AND words @@ %(asked)s::tsquery
ORDER BY score DESC, memory_record_id DESC
LIMIT %(limit)s;

-- name: by_memory_ids
-- What engram knows of the memory server's hits, within the spaces the caller may read.
SELECT memory_record_id, memory_id, target_space, payload_md, kind, meta_json, actor_user_id, created_at
FROM logbook.memories
WHERE memory_id = ANY(%(memory_ids)s)
  AND target_space = ANY(%(spaces)s)
  AND state = 'stored'
ORDER BY memory_record_id;

-- name: stored_content
-- The stored memory with this content, if another write brought it there.
SELECT memory_record_id, memory_id FROM logbook.memories
WHERE target_space = %(target_space)s AND payload_sha = %(payload_sha)s AND state = 'stored';

-- name: record_of_outbox
-- The memory an outbox row stands for.
SELECT outbox_id, memory_record_id FROM logbook.memories WHERE outbox_id = ANY(%(outbox_ids)s);
