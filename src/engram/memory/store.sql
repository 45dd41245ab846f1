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
    INSERT INTO public.memories AS m
        (tenant, space, content_sha, content, tags, metadata, words, embedding, to_embed)
    SELECT %(tenant)s, %(space)s, %(content_sha)s, %(content)s,
           %(tags)s::text[], %(metadata)s::json, %(words)s::tsvector,
           %(embedding)s::real[], %(embedding)s::real[] IS NULL
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

-- name: by_words
-- The best matches by words: rare words choose the candidates, all words rank them.
--
-- Ranking every row that has a common word is slow. `sources` has a place for each
-- term, and there a tsquery if the term has few rows: they are looked up term by
-- term, so that none is crowded out. `together` adds the rows that have several of the commoner words
-- at once; if all these are too few, `sample` adds some that have the least common
-- of them. A weight that is not given is that of a word as rare as it was found to be.
WITH mine AS NOT MATERIALIZED (
    SELECT id, seq, words
    FROM public.memories
    WHERE tenant = %(tenant)s
      AND (%(tags)s::text[] = '{}' OR tags @> %(tags)s::text[])
      AND (%(metadata)s::jsonb IS NULL OR metadata::jsonb @> %(metadata)s::jsonb)
      AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s::timestamptz)
      AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s::timestamptz)
), found AS MATERIALIZED (
    SELECT source.place, hit.id
    FROM unnest(%(sources)s::tsquery[]) WITH ORDINALITY AS source (term, place)
    CROSS JOIN LATERAL (
        SELECT mine.id FROM mine WHERE mine.words @@ source.term LIMIT %(enough)s
    ) AS hit
    WHERE source.term IS NOT NULL
), asked AS MATERIALIZED (
    SELECT given.place, given.term, coalesce(given.weight, ln(1 + corpus.rows / counted.rows)) AS weight
    FROM unnest(%(terms)s::tsquery[], %(weights)s::float8[]) WITH ORDINALITY AS given (term, weight, place)
    CROSS JOIN (
        SELECT coalesce(%(rows)s::float8, (
            SELECT count(*) FROM (SELECT FROM public.memories WHERE tenant = %(tenant)s LIMIT %(enough)s) AS seen
        )) AS rows
    ) AS corpus
    CROSS JOIN LATERAL (
        SELECT greatest(count(*), 1) AS rows FROM found WHERE found.place = given.place
    ) AS counted
), chosen AS MATERIALIZED (
    (
        SELECT found.id
        FROM found JOIN asked USING (place)
        GROUP BY found.id
        ORDER BY sum(asked.weight) DESC, found.id
        LIMIT %(enough)s
    )
    UNION
    (SELECT id FROM mine WHERE words @@ %(together)s::tsquery LIMIT %(enough)s)
), candidate AS (
    SELECT id FROM chosen
    UNION
    (
        SELECT id FROM mine
        WHERE words @@ %(sample)s::tsquery AND (SELECT count(*) FROM chosen) < %(limit)s
        LIMIT %(enough)s
    )
)
-- Tenfold, because one word's ts_rank is at most 0.1: a score is at most 1. Length
-- counts for little, or a short text with one of the words would beat a longer with all.
SELECT m.id,
       10 * (
           SELECT sum(asked.weight * ts_rank(m.words, asked.term)) / sum(asked.weight) FROM asked
       ) / (1 + 0.1 * ln(length(m.words))) AS score
FROM candidate
JOIN public.memories AS m USING (id)
ORDER BY score DESC, m.seq DESC
LIMIT %(limit)s;

-- name: nearest
-- The memories whose vectors are nearest, among those that are near at all.
--
-- The order of an index scan is only nearly right (relaxed_order), hence the
-- second ORDER BY. It goes on through the index until the filter has let enough
-- through, so a rare tag costs time and never hits.
WITH hit AS MATERIALIZED (
    SELECT id, seq, embedding <=> %(vector)s::real[]::halfvec AS distance
    FROM public.memories
    WHERE tenant = %(tenant)s
      AND (%(tags)s::text[] = '{}' OR tags @> %(tags)s::text[])
      AND (%(metadata)s::jsonb IS NULL OR metadata::jsonb @> %(metadata)s::jsonb)
      AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s::timestamptz)
      AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s::timestamptz)
      AND embedding IS NOT NULL
    ORDER BY embedding <=> %(vector)s::real[]::halfvec
    LIMIT %(limit)s
)
SELECT id, 1 - distance AS similarity
FROM hit
WHERE distance <= 1 - %(close)s::float8
ORDER BY distance, seq DESC;

-- name: contents
-- What is told of the matches, in no order.
SELECT id, content, created_at
FROM public.memories
WHERE tenant = %(tenant)s AND id = ANY (%(ids)s::uuid[]);

-- name: get
-- One memory of a tenant.
SELECT id, tenant, content, tags, metadata, created_at, changed_at
FROM public.memories
WHERE tenant = %(tenant)s AND id = %(id)s;

-- name: newest
-- A page of a tenant's memories, newest first.
SELECT id, tenant, content, tags, metadata, created_at, changed_at
FROM public.memories
WHERE tenant = %(tenant)s
ORDER BY seq DESC
LIMIT %(limit)s OFFSET %(offset)s;

-- name: change
-- Change what was given of a memory; what was not given stays. New content waits for its vector.
UPDATE public.memories
SET content = coalesce(%(content)s, content),
    content_sha = coalesce(%(content_sha)s, content_sha),
    words = coalesce(%(words)s::tsvector, words),
    embedding = CASE WHEN %(content)s::text IS NULL THEN embedding END,
    to_embed = to_embed OR %(content)s::text IS NOT NULL,
    tags = coalesce(%(tags)s::text[], tags),
    space = coalesce(%(space)s, space),
    metadata = coalesce(%(metadata)s::json, metadata),
    changed_at = now()
WHERE tenant = %(tenant)s AND id = %(id)s
RETURNING id;

-- name: delete
-- Remove a memory; its content may be stored anew, under another id.
DELETE FROM public.memories
WHERE tenant = %(tenant)s AND id = %(id)s
RETURNING id;

-- name: ping
-- Is the database there, with the schema in it?
SELECT 1 AS alive FROM public.memories LIMIT 1;

-- name: use_vectors
-- Make the table ready for a model's vectors; answers NULL, or why it cannot be.
SELECT public.use_vectors(%(model)s, %(dimensions)s) AS why_not;

-- name: count_waiting
-- How many memories wait for a vector.
SELECT count(*) AS waiting FROM public.memories WHERE to_embed;

-- name: waiting
-- The memories that have waited longest for a vector; of each no more than a model reads.
SELECT id, content_sha, left(content, %(chars)s) AS content
FROM public.memories
WHERE to_embed
ORDER BY seq
LIMIT %(limit)s;

-- name: fill
-- Give memories their vectors, unless their content has changed since it was read.
WITH given AS (
    SELECT id, content_sha,
           (%(numbers)s::real[])[(place - 1) * %(dimensions)s + 1 : place * %(dimensions)s] AS embedding
    FROM unnest(%(ids)s::uuid[], %(shas)s::text[]) WITH ORDINALITY AS version (id, content_sha, place)
)
UPDATE public.memories AS m
SET embedding = given.embedding, to_embed = false
FROM given
WHERE m.id = given.id AND m.content_sha = given.content_sha AND m.to_embed
RETURNING m.id;

-- name: leave
-- Memories of which no vector can be made: they are found by their words alone.
UPDATE public.memories AS m
SET to_embed = false
FROM unnest(%(ids)s::uuid[], %(shas)s::text[]) AS version (id, content_sha)
WHERE m.id = version.id AND m.content_sha = version.content_sha AND m.to_embed
RETURNING m.id;

-- name: frequencies
-- How many rows there are and how common the commonest words and tags are, as last analysed.
SELECT c.reltuples AS rows, s.attname AS column,
       s.most_common_elems::text::text[] AS elements,
       s.most_common_elem_freqs AS frequencies
FROM pg_class AS c
LEFT JOIN pg_stats AS s
    ON s.schemaname = 'public' AND s.tablename = 'memories' AND s.attname IN ('words', 'tags')
WHERE c.oid = 'public.memories'::regclass;

-- name: near_indexes
-- Our indexes over vectors, finished or not.
SELECT c.relname AS name, i.indisvalid AS finished
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE i.indrelid = 'public.memories'::regclass AND starts_with(c.relname, 'memories_near_');
