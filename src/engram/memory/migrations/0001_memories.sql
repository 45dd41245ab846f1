CREATE TABLE public.memories (
    id          uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    seq         bigint GENERATED ALWAYS AS IDENTITY,
    tenant      text NOT NULL,
    space       text NOT NULL,
    content_sha text NOT NULL,
    content     text NOT NULL,
    tags        text[] NOT NULL,
    metadata    json NOT NULL,
    words       tsvector NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT memories_tenant_named CHECK (tenant <> ''),
    CONSTRAINT memories_content_size CHECK (char_length(content) BETWEEN 1 AND 200000),
    CONSTRAINT memories_sha_is_hex CHECK (content_sha ~ '^[0-9a-f]{64}$'),
    CONSTRAINT memories_space_is_a_tag CHECK (space = '' OR 'space:' || space = ANY (tags)),
    CONSTRAINT memories_metadata_is_object CHECK (json_typeof(metadata) = 'object')
);

COMMENT ON COLUMN public.memories.space IS 'x of the tag space:x, or empty: content is stored once per tenant and space';
COMMENT ON COLUMN public.memories.seq IS 'order of arrival, for listing';
COMMENT ON COLUMN public.memories.words IS 'the tokens of content, made by engram.search so that CJK text is found';

CREATE UNIQUE INDEX memories_once_per_space ON public.memories (tenant, space, content_sha);
CREATE INDEX memories_newest ON public.memories (tenant, seq DESC);
-- One index, so that a rare tag lets the scan skip through a common word's rows.
CREATE INDEX memories_words ON public.memories USING gin (words, tags);

-- What a key was first used for, and what that first use was answered with.
-- Neither refers to memories: a key outlives the memory, so that a late repeat
-- of an add cannot bring back what was deleted in between. They are two tables
-- because one statement claims the key before it knows the id: see store.sql.
CREATE TABLE public.idempotency_keys (
    tenant      text NOT NULL,
    key         text NOT NULL,
    space       text NOT NULL,
    content_sha text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),

    PRIMARY KEY (tenant, key),
    CONSTRAINT idempotency_keys_key_size CHECK (char_length(key) BETWEEN 1 AND 200)
);

CREATE TABLE public.idempotency_answers (
    tenant       text NOT NULL,
    key          text NOT NULL,
    memory_id    uuid NOT NULL,
    deduplicated boolean NOT NULL,

    PRIMARY KEY (tenant, key)
);
