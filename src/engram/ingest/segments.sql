-- name: write
-- Passages of a task's document, each once, if the task is still the writer's and the document still
-- what was read; one row if the task is, which answers whether the document is.
--
-- The task's row is locked, so nobody can take it over before this is committed; so is the document's,
-- so that no upload makes another kind of it or gives it another title meanwhile. Two tasks of one
-- document may therefore write at once: both write the same.
-- A passage that is there already, from an earlier try, is left alone unless it differs.
-- With the last ones comes their `count`: what an earlier, longer version left beyond it goes.
WITH held AS MATERIALIZED (
    SELECT t.document_id, t.owner
    FROM ingest.ingest_task AS t
    WHERE t.id = %(task_id)s
      AND t.status = 'RUNNING'
      AND t.lease_token = %(lease_token)s
      AND t.locked_at + make_interval(secs => t.lease_seconds) > now()
    FOR SHARE
), same AS MATERIALIZED (
    SELECT d.id
    FROM ingest.knowledge_document AS d
    WHERE d.id = %(document_id)s AND d.media_type = %(media_type)s AND d.title = %(title)s
    FOR SHARE
), written AS (
    INSERT INTO ingest.knowledge_segment AS s
        (document_id, ordinal, tags, heading, page, content, words, embedding, to_embed)
    SELECT held.document_id, given.ordinal,
           ARRAY['owner:' || held.owner, 'document:' || held.document_id],
           given.heading, given.page, given.content, given.words,
           (%(numbers)s::real[])[(given.place - 1) * %(dimensions)s + 1 : given.place * %(dimensions)s],
           %(numbers)s::real[] IS NULL
    FROM held
    JOIN same ON same.id = held.document_id
    CROSS JOIN unnest(
        %(ordinals)s::integer[], %(headings)s::text[], %(pages)s::integer[],
        %(contents)s::text[], %(words)s::tsvector[]
    ) WITH ORDINALITY AS given (ordinal, heading, page, content, words, place)
    ON CONFLICT (document_id, ordinal) DO UPDATE
    SET heading = excluded.heading, page = excluded.page, content = excluded.content,
        words = excluded.words, embedding = excluded.embedding, to_embed = excluded.to_embed
    WHERE s.content <> excluded.content OR s.words <> excluded.words OR s.heading <> excluded.heading
       OR s.page IS DISTINCT FROM excluded.page OR (s.to_embed AND NOT excluded.to_embed)
), left_over AS (
    DELETE FROM ingest.knowledge_segment AS s
    USING held
    JOIN same ON same.id = held.document_id
    WHERE s.document_id = held.document_id AND s.ordinal >= %(count)s::integer
)
SELECT EXISTS (SELECT FROM same) AS same FROM held;

-- name: by_words
-- The best passages by words: rare words choose the candidates, all words rank them.
--
-- The same method as the memory server's statement of this name, over another
-- table in another database: `engram.search.lookup` makes the plan for both.
WITH mine AS NOT MATERIALIZED (
    SELECT document_id, ordinal, words
    FROM ingest.knowledge_segment
    WHERE tags @> %(tags)s::text[]
), found AS MATERIALIZED (
    SELECT source.place, hit.document_id, hit.ordinal
    FROM unnest(%(sources)s::tsquery[]) WITH ORDINALITY AS source (term, place)
    CROSS JOIN LATERAL (
        SELECT mine.document_id, mine.ordinal FROM mine WHERE mine.words @@ source.term LIMIT %(enough)s
    ) AS hit
    WHERE source.term IS NOT NULL
), asked AS MATERIALIZED (
    SELECT given.place, given.term, coalesce(given.weight, ln(1 + corpus.rows / counted.rows)) AS weight
    FROM unnest(%(terms)s::tsquery[], %(weights)s::float8[]) WITH ORDINALITY AS given (term, weight, place)
    CROSS JOIN (
        SELECT coalesce(%(rows)s::float8, (
            SELECT count(*) FROM (SELECT FROM mine LIMIT %(enough)s) AS seen
        )) AS rows
    ) AS corpus
    CROSS JOIN LATERAL (
        SELECT greatest(count(*), 1) AS rows FROM found WHERE found.place = given.place
    ) AS counted
), chosen AS MATERIALIZED (
    (
        SELECT found.document_id, found.ordinal
        FROM found JOIN asked USING (place)
        GROUP BY found.document_id, found.ordinal
        ORDER BY sum(asked.weight) DESC, found.document_id, found.ordinal
        LIMIT %(enough)s
    )
    UNION
    (SELECT document_id, ordinal FROM mine WHERE words @@ %(together)s::tsquery LIMIT %(enough)s)
), candidate AS (
    SELECT document_id, ordinal FROM chosen
    UNION
    (
        SELECT document_id, ordinal FROM mine
        WHERE words @@ %(sample)s::tsquery AND (SELECT count(*) FROM chosen) < %(limit)s
        LIMIT %(enough)s
    )
)
-- Length counts for little, or a short passage with one of the words would beat a longer with all.
SELECT s.document_id, s.ordinal,
       (SELECT sum(asked.weight * ts_rank(s.words, asked.term)) / sum(asked.weight) FROM asked)
       / (1 + 0.1 * ln(greatest(length(s.words), 1))) AS score
FROM candidate
JOIN ingest.knowledge_segment AS s USING (document_id, ordinal)
ORDER BY score DESC, s.document_id, s.ordinal
LIMIT %(limit)s;

-- name: nearest
-- The passages whose vectors are nearest, among those that are near at all.
--
-- The order of an index scan is only nearly right (relaxed_order), hence the second ORDER BY.
WITH hit AS MATERIALIZED (
    SELECT document_id, ordinal, embedding <=> %(vector)s::real[]::halfvec AS distance
    FROM ingest.knowledge_segment
    WHERE tags @> %(tags)s::text[] AND embedding IS NOT NULL
    ORDER BY embedding <=> %(vector)s::real[]::halfvec
    LIMIT %(limit)s
)
SELECT document_id, ordinal
FROM hit
WHERE distance <= 1 - %(close)s::float8
ORDER BY distance, document_id, ordinal;

-- name: contents
-- What is told of the hits that the asker may see, in no order.
SELECT s.document_id, s.ordinal, d.title, s.heading, s.page, s.content
FROM unnest(%(document_ids)s::uuid[], %(ordinals)s::integer[]) AS hit (document_id, ordinal)
JOIN ingest.knowledge_segment AS s USING (document_id, ordinal)
JOIN ingest.knowledge_document AS d ON d.id = s.document_id
WHERE s.tags @> %(tags)s::text[] AND d.owner = %(owner)s;

-- name: use_vectors
-- Make the table ready for a model's vectors; answers NULL, or why it cannot be.
SELECT ingest.use_vectors(%(model)s, %(dimensions)s) AS why_not;

-- name: count_waiting
-- How many passages wait for a vector.
SELECT count(*) AS waiting FROM ingest.knowledge_segment WHERE to_embed;

-- name: waiting
-- Passages that wait for a vector.
SELECT s.document_id, s.ordinal, s.document_id || ':' || s.ordinal AS id, s.heading || E'\n' || s.content AS content,
       s.content AS version
FROM ingest.knowledge_segment AS s
WHERE s.to_embed
ORDER BY s.document_id, s.ordinal
LIMIT %(limit)s;

-- name: fill
-- Give passages their vectors, unless they have changed since they were read.
WITH given AS (
    SELECT document_id, ordinal, content,
           (%(numbers)s::real[])[(place - 1) * %(dimensions)s + 1 : place * %(dimensions)s] AS embedding
    FROM unnest(%(document_ids)s::uuid[], %(ordinals)s::integer[], %(contents)s::text[])
        WITH ORDINALITY AS version (document_id, ordinal, content, place)
)
UPDATE ingest.knowledge_segment AS s
SET embedding = given.embedding, to_embed = false
FROM given
WHERE s.document_id = given.document_id AND s.ordinal = given.ordinal AND s.content = given.content AND s.to_embed
RETURNING s.ordinal;

-- name: leave
-- Passages of which no vector can be made: they are found by their words alone.
UPDATE ingest.knowledge_segment AS s
SET to_embed = false
FROM unnest(%(document_ids)s::uuid[], %(ordinals)s::integer[], %(contents)s::text[])
    AS version (document_id, ordinal, content)
WHERE s.document_id = version.document_id AND s.ordinal = version.ordinal AND s.content = version.content AND s.to_embed
RETURNING s.ordinal;

-- name: frequencies
-- How many passages there are and how common the commonest words and tags are, as last analysed.
SELECT c.reltuples AS rows, s.attname AS column,
       s.most_common_elems::text::text[] AS elements,
       s.most_common_elem_freqs AS frequencies
FROM pg_class AS c
LEFT JOIN pg_stats AS s
    ON s.schemaname = 'ingest' AND s.tablename = 'knowledge_segment' AND s.attname IN ('words', 'tags')
WHERE c.oid = 'ingest.knowledge_segment'::regclass;

-- name: near_indexes
-- Our indexes over vectors, finished or not.
SELECT c.relname AS name, i.indisvalid AS finished
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE i.indrelid = 'ingest.knowledge_segment'::regclass AND starts_with(c.relname, 'segment_near_');
