-- name: search
-- Candidates and events of the given spaces that have any of the words, best first.
--
-- As in the search of memories no word brings in more than `enough` rows, and each
-- look-up is MATERIALIZED, so that a LIMIT in sight does not make the planner walk.
WITH candidate AS MATERIALIZED (
    SELECT DISTINCT hit.candidate_id
    FROM unnest(%(asked)s::tsquery[]) AS word
    CROSS JOIN LATERAL (
        WITH every AS MATERIALIZED (
            SELECT candidate_id FROM analysis.knowledge_candidates
            WHERE words @@ word AND target_space = ANY(%(spaces)s)
              AND (%(kinds)s::text[] IS NULL OR lower(kind) = ANY(%(kinds)s))
              AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
              AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
        )
        SELECT candidate_id FROM every LIMIT %(enough)s
    ) AS hit
), event AS MATERIALIZED (
    SELECT DISTINCT hit.event_id
    FROM unnest(%(asked)s::tsquery[]) AS word
    CROSS JOIN LATERAL (
        WITH every AS MATERIALIZED (
            SELECT event_id FROM logbook.events
            WHERE words @@ word AND target_space = ANY(%(spaces)s)
              AND (%(kinds)s::text[] IS NULL OR lower(event_type) = ANY(%(kinds)s))
              AND (%(actor)s::text IS NULL OR actor_user_id = %(actor)s)
              AND (%(item_id)s::bigint IS NULL OR item_id = %(item_id)s)
              AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
              AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
        )
        SELECT event_id FROM every LIMIT %(enough)s
    ) AS hit
)
SELECT * FROM (
    SELECT 'candidates' AS source, c.candidate_id AS id, c.target_space, c.title || E'\n\n' || c.content_md AS content,
           c.kind, '{}'::jsonb AS meta_json, NULL::text AS actor_user_id, c.created_at,
           (SELECT sum(ts_rank(c.words, word)) FROM unnest(%(asked)s::tsquery[]) AS word)::float8 AS score
    FROM candidate JOIN analysis.knowledge_candidates c USING (candidate_id)
    -- A candidate is nobody's own and belongs to no item.
    WHERE %(actor)s::text IS NULL AND %(item_id)s::bigint IS NULL
    UNION ALL
    SELECT 'events', e.event_id, e.target_space, e.content_md, e.event_type, e.payload_json, e.actor_user_id,
           e.created_at, (SELECT sum(ts_rank(e.words, word)) FROM unnest(%(asked)s::tsquery[]) AS word)::float8
    FROM event JOIN logbook.events e USING (event_id)
) AS found
WHERE %(meta)s::jsonb IS NULL OR meta_json @> %(meta)s
ORDER BY score DESC, created_at DESC, id DESC
LIMIT %(limit)s;

-- name: add_candidate
-- Something distilled from the record that may become a memory; that of one fact is kept once, as it is now.
INSERT INTO analysis.knowledge_candidates
    (target_space, kind, title, content_md, confidence, evidence_refs_json, words, source_ref)
VALUES (%(target_space)s, %(kind)s, %(title)s, %(content_md)s, %(confidence)s, %(evidence_refs_json)s,
        %(words)s::tsvector, %(source_ref)s)
ON CONFLICT (target_space, source_ref) WHERE source_ref IS NOT NULL DO UPDATE
SET kind = EXCLUDED.kind, title = EXCLUDED.title, content_md = EXCLUDED.content_md,
    confidence = EXCLUDED.confidence, evidence_refs_json = EXCLUDED.evidence_refs_json, words = EXCLUDED.words
RETURNING candidate_id;
