-- A forgotten memory is unreadable at once; the memory server's copy is erased
-- after, by whoever holds the erasing lease. While that lease is on, the record
-- stands in the unique index again, so that nobody can write the same content
-- while its old copy is being deleted: of the two, one meets the other.
ALTER TABLE logbook.memories
    ADD COLUMN forgotten_at    timestamptz,
    ADD COLUMN erase_due_at    timestamptz,
    ADD COLUMN erase_locked_at timestamptz,
    ADD COLUMN erase_token     bigint,
    ADD COLUMN erase_tries     integer NOT NULL DEFAULT 0,
    ADD COLUMN held_until      timestamptz;
UPDATE logbook.memories SET forgotten_at = updated_at WHERE state = 'forgotten';
ALTER TABLE logbook.memories
    ADD CONSTRAINT memories_forgotten_has_time CHECK ((state = 'forgotten') = (forgotten_at IS NOT NULL)),
    ADD CONSTRAINT memories_erased_before_written_anew CHECK
        (state = 'forgotten' OR (erase_due_at IS NULL AND erase_locked_at IS NULL)),
    ADD CONSTRAINT memories_erasing_is_whole CHECK
        (erase_locked_at IS NULL OR (erase_due_at IS NOT NULL AND erase_token IS NOT NULL));

DROP INDEX logbook.memories_live_content;
CREATE UNIQUE INDEX memories_live_content ON logbook.memories (target_space, payload_sha)
    WHERE state <> 'forgotten' OR erase_locked_at IS NOT NULL;
CREATE INDEX memories_parked_words ON logbook.memories USING gin (words)
    WHERE state = 'parked' OR (state = 'stored' AND memory_id IS NULL);
CREATE INDEX memories_to_erase ON logbook.memories (erase_due_at) WHERE erase_due_at IS NOT NULL;

-- Evidence is read by those who may read its space.
ALTER TABLE logbook.attachments ADD COLUMN target_space text;
UPDATE logbook.attachments SET target_space = 'private:' || COALESCE(owner, 'local');
ALTER TABLE logbook.attachments ALTER COLUMN target_space SET NOT NULL;
