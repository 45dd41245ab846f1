-- The passages of documents, in the order they are read.
CREATE TABLE ingest.knowledge_segment (
    document_id uuid NOT NULL REFERENCES ingest.knowledge_document ON DELETE CASCADE,
    ordinal     integer NOT NULL,
    tags        text[] NOT NULL,
    heading     text NOT NULL,
    page        integer,
    content     text NOT NULL,
    words       tsvector NOT NULL,
    embedding   real[],
    to_embed    boolean NOT NULL DEFAULT true,
    PRIMARY KEY (document_id, ordinal),
    CONSTRAINT segment_in_order CHECK (ordinal >= 0),
    CONSTRAINT segment_size CHECK (char_length(content) BETWEEN 1 AND 10000 AND char_length(heading) <= 2000),
    CONSTRAINT segment_pages_from_one CHECK (page >= 1),
    CONSTRAINT segment_is_of_its_document CHECK
        (cardinality(tags) = 2 AND starts_with(tags[1], 'owner:') AND tags[2] = 'document:' || document_id)
);
CREATE INDEX segment_words ON ingest.knowledge_segment USING gin (words, tags);
CREATE INDEX segment_to_embed ON ingest.knowledge_segment (document_id, ordinal) WHERE to_embed;

CREATE TABLE ingest.embedding_model (
    only_one   boolean PRIMARY KEY DEFAULT true,
    model      text NOT NULL,
    dimensions integer NOT NULL,
    since      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT embedding_model_only_one CHECK (only_one),
    CONSTRAINT embedding_model_can_be_indexed CHECK (dimensions BETWEEN 1 AND 4000)
);

CREATE FUNCTION ingest.use_vectors(asked_model text, asked_dimensions integer) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM ingest.embedding_model WHERE model = asked_model AND dimensions = asked_dimensions
    ) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('ingest.use_vectors'));
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
    -- Somebody may have done it while this call waited for the lock.
    IF EXISTS (
        SELECT FROM ingest.embedding_model WHERE model = asked_model AND dimensions = asked_dimensions
    ) THEN
        RETURN NULL;
    END IF;
    ALTER TABLE ingest.knowledge_segment DROP COLUMN embedding, DROP COLUMN to_embed;
    EXECUTE format('ALTER TABLE ingest.knowledge_segment ADD COLUMN embedding halfvec(%s),'
                   ' ADD COLUMN to_embed boolean NOT NULL DEFAULT true', asked_dimensions);
    CREATE INDEX segment_to_embed ON ingest.knowledge_segment (document_id, ordinal) WHERE to_embed;
    INSERT INTO ingest.embedding_model (model, dimensions) VALUES (asked_model, asked_dimensions)
    ON CONFLICT (only_one) DO UPDATE SET model = excluded.model, dimensions = excluded.dimensions, since = now();
    RETURN NULL;
END
$$;
