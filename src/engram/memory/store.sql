-- name: add
-- Store a memory, or answer with the one that is there; a key counts once, for ever.
--
-- Every insert meets its twin by DO UPDATE, never by a read: a racing twin's row
-- is newer than this statement's snapshot, and only the conflict itself shows it.
-- The key is claimed first, so a repeat stores nothing. Its answer is a second
-- row because the id is not known at the claim (another key may have stored the
-- content), and a statement cannot update a row it has inserted.
WITH claimed AS (
    INSERT INTO public.idempotency_keys AS k (tenant, key, space, content_sha)
    SELECT %(tenant)s, %(key)s, %(space)s, %(content_sha)s
    WHERE %(key)s::text IS NOT NULL
    ON CONFLICT (tenant, key) DO UPDATE SET key = k.key
    RETURNING k.tenant, k.key, k.xmax = 0 AS fresh,
              k.space = %(space)s AND k.content_sha = %(content_sha)s AS same_request
), stored AS (
    INSERT INTO public.memories AS m (tenant, space, content_sha, content, tags, metadata, words)
    SELECT %(tenant)s, %(space)s, %(content_sha)s, %(content)s,
           %(tags)s::text[], %(metadata)s::json, %(words)s::tsvector
    WHERE NOT EXISTS (SELECT FROM claimed WHERE NOT fresh)
    ON CONFLICT (tenant, space, content_sha) DO UPDATE SET content_sha = m.content_sha
    RETURNING m.id, m.xmax <> 0 AS deduplicated
), answered AS (
    INSERT INTO public.idempotency_answers AS a (tenant, key, memory_id, deduplicated)
    -- On a repeat nothing is stored and these values lose to the answer that is there.
    SELECT claimed.tenant, claimed.key,
           coalesce(stored.id, gen_random_uuid()), coalesce(stored.deduplicated, false)
    FROM claimed LEFT JOIN stored ON true
    ON CONFLICT (tenant, key) DO UPDATE SET key = a.key
    RETURNING a.memory_id, a.deduplicated
)
SELECT answered.memory_id AS id, answered.deduplicated, claimed.same_request
FROM claimed CROSS JOIN answered
UNION ALL
SELECT stored.id, stored.deduplicated, true
FROM stored
WHERE NOT EXISTS (SELECT FROM claimed);

-- name: search
-- The best matches by words: the rarest words choose the candidates, all words rank them.
--
-- Ranking every row that has a common word is slow, so no word brings in more
-- than `enough` rows, and common words bring in none once rarer ones have
-- brought enough. Rows that have every word are always candidates. Each look-up
-- is MATERIALIZED because a LIMIT in sight makes the planner walk the table.
WITH found AS MATERIALIZED (
    SELECT word, hit.id
    FROM unnest(%(words)s::tsquery[]) AS word
    CROSS JOIN LATERAL (
        WITH every AS MATERIALIZED (
            SELECT id FROM public.memories
            WHERE tenant = %(tenant)s AND words @@ word
              AND (%(tags)s::text[] = '{}' OR tags @> %(tags)s::text[])
        )
        SELECT id FROM every LIMIT %(enough)s
    ) AS hit
), corpus AS (
    SELECT count(*) AS rows
    FROM (SELECT FROM public.memories WHERE tenant = %(tenant)s LIMIT %(enough)s) AS sample
), asked AS MATERIALIZED (
    SELECT word, ln(1 + corpus.rows::float8 / count(*)) AS weight,
           sum(count(*)) OVER (ORDER BY count(*), word) - count(*) AS rows_of_rarer
    FROM found CROSS JOIN corpus
    GROUP BY word, corpus.rows
), complete AS MATERIALIZED (
    SELECT id FROM public.memories
    WHERE tenant = %(tenant)s
      AND words @@ (SELECT string_agg(word::text, ' & ')::tsquery FROM asked)
      AND (%(tags)s::text[] = '{}' OR tags @> %(tags)s::text[])
), candidate AS (
    SELECT found.id
    FROM found JOIN asked USING (word)
    WHERE asked.rows_of_rarer < %(enough)s
    UNION
    (SELECT id FROM complete LIMIT %(enough)s)
), ranked AS (
    -- Tenfold, because one word's ts_rank is at most 0.1: a score is at most 1. Length
    -- counts for little, or a short text with one of the words would beat a longer with all.
    SELECT m.id, m.seq,
           10 * sum(asked.weight * ts_rank(m.words, asked.word)) / sum(asked.weight)
              / (1 + 0.1 * ln(length(m.words))) AS score
    FROM candidate
    JOIN public.memories AS m USING (id)
    CROSS JOIN asked
    GROUP BY m.id
    ORDER BY score DESC, m.seq DESC
    LIMIT %(k)s
)
SELECT m.id, m.content, m.created_at, ranked.score
FROM ranked
JOIN public.memories AS m USING (id)
ORDER BY ranked.score DESC, ranked.seq DESC;

-- name: get
-- One memory of a tenant.
SELECT id, tenant, content, tags, metadata, created_at
FROM public.memories
WHERE tenant = %(tenant)s AND id = %(id)s;

-- name: newest
-- A page of a tenant's memories, newest first.
SELECT id, tenant, content, tags, metadata, created_at
FROM public.memories
WHERE tenant = %(tenant)s
ORDER BY seq DESC
LIMIT %(limit)s OFFSET %(offset)s;

-- name: delete
-- Remove a memory; its content may be stored anew, under another id.
DELETE FROM public.memories
WHERE tenant = %(tenant)s AND id = %(id)s
RETURNING id;

-- name: ping
-- Is the database there, with the schema in it?
SELECT 1 AS alive FROM public.memories LIMIT 1;
