ALTER TABLE public.memories ADD COLUMN changed_at timestamptz;

COMMENT ON COLUMN public.memories.changed_at IS 'when content, tags or metadata were last changed, if they were';

-- The vector of a memory, and whether it still waits for one. Where pgvector is
-- not to be had, `embedding` stays this empty array and search goes by words;
-- use_vectors() below turns it into halfvec(n). A real[] is taken by both, so
-- the statements are the same.
ALTER TABLE public.memories
    ADD COLUMN embedding real[],
    ADD COLUMN to_embed boolean NOT NULL DEFAULT true;

COMMENT ON COLUMN public.memories.embedding IS 'the vector of content, of length one: halfvec(n) once use_vectors() ran';
COMMENT ON COLUMN public.memories.to_embed IS 'the background task still has to make a vector for this row';

-- Which model made the vectors that are there: vectors of two cannot be compared.
CREATE TABLE public.embedding_model (
    only_one   boolean PRIMARY KEY DEFAULT true,
    model      text NOT NULL,
    dimensions integer NOT NULL,
    since      timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT embedding_model_only_one CHECK (only_one),
    CONSTRAINT embedding_model_can_be_indexed CHECK (dimensions BETWEEN 1 AND 4000)
);

-- Make the table ready for vectors of this model. Answers NULL, or why it cannot
-- be: then everything is as it was. Another model's vectors are dropped, and
-- every row waits for a new one. Runs at every start, and does nothing then.
CREATE FUNCTION public.use_vectors(asked_model text, asked_dimensions integer) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('public.use_vectors'));
    IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'vector') THEN
        IF NOT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'vector') THEN
            RETURN 'this PostgreSQL has no pgvector';
        END IF;
        BEGIN
            CREATE EXTENSION vector;
        EXCEPTION WHEN insufficient_privilege THEN
            RETURN 'this role may not run CREATE EXTENSION vector';
        END;
    END IF;
    IF EXISTS (
        SELECT FROM pg_extension
        WHERE extname = 'vector' AND substring(extversion from '^\d+\.\d+')::numeric < 0.8
    ) THEN
        RETURN 'pgvector is older than 0.8';
    END IF;
    IF to_regtype('halfvec') IS NULL THEN
        RETURN 'pgvector is in a schema outside the search_path';
    END IF;
    IF asked_dimensions > 4000 THEN
        RETURN format('vectors of %s dimensions cannot be indexed; 4000 can', asked_dimensions);
    END IF;
    IF EXISTS (
        SELECT FROM public.embedding_model WHERE model = asked_model AND dimensions = asked_dimensions
    ) THEN
        RETURN NULL;
    END IF;
    ALTER TABLE public.memories DROP COLUMN embedding, DROP COLUMN to_embed;
    EXECUTE format('ALTER TABLE public.memories ADD COLUMN embedding halfvec(%s),'
                   ' ADD COLUMN to_embed boolean NOT NULL DEFAULT true', asked_dimensions);
    CREATE INDEX memories_to_embed ON public.memories (seq) WHERE to_embed;
    INSERT INTO public.embedding_model (model, dimensions) VALUES (asked_model, asked_dimensions)
    ON CONFLICT (only_one) DO UPDATE SET model = excluded.model, dimensions = excluded.dimensions, since = now();
    RETURN NULL;
END
$$;
