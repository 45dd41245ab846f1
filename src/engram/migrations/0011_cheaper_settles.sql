-- A pattern that counts ('{64}') makes PostgreSQL build a long automaton for every row
-- it looks at, and a CHECK is looked at again by every UPDATE: three of them were a
-- sixth of the cost of a delivered memory. The same said by pattern and length costs
-- a tenth.
ALTER TABLE logbook.outbox_memory
    DROP CONSTRAINT outbox_sha_is_hex,
    ADD CONSTRAINT outbox_sha_is_hex CHECK (payload_sha ~ '^[0-9a-f]+$' AND length(payload_sha) = 64);
ALTER TABLE logbook.memories
    DROP CONSTRAINT memories_sha_is_hex,
    ADD CONSTRAINT memories_sha_is_hex CHECK (payload_sha ~ '^[0-9a-f]+$' AND length(payload_sha) = 64);
ALTER TABLE logbook.attachments
    DROP CONSTRAINT attachments_sha_is_hex,
    ADD CONSTRAINT attachments_sha_is_hex CHECK (sha256 ~ '^[0-9a-f]+$' AND length(sha256) = 64);
ALTER TABLE logbook.idempotency_keys
    DROP CONSTRAINT idempotency_key_well_formed,
    ADD CONSTRAINT idempotency_key_well_formed CHECK (key ~ '^[a-zA-Z0-9_-]+$' AND length(key) <= 128),
    DROP CONSTRAINT idempotency_fingerprint_is_hex,
    ADD CONSTRAINT idempotency_fingerprint_is_hex CHECK
        (request_fingerprint ~ '^[0-9a-f]+$' AND length(request_fingerprint) = 64);
ALTER TABLE ingest.knowledge_document
    DROP CONSTRAINT document_hash_is_hex,
    ADD CONSTRAINT document_hash_is_hex CHECK (sha256 ~ '^[0-9a-f]+$' AND length(sha256) = 64);

-- What is due is found by this index in its order, whatever the planner guesses of a
-- table that was not analysed yet: it takes "=" for rare, and would sort all that is
-- due, but "<>" for common.
DROP INDEX logbook.outbox_due;
CREATE INDEX outbox_due ON logbook.outbox_memory (next_attempt_at, outbox_id)
    WHERE status <> 'sent' AND status <> 'dead';

-- Audits without a correlation id are not looked up by it.
DROP INDEX governance.write_audit_by_correlation;
CREATE INDEX write_audit_by_correlation ON governance.write_audit (correlation_id)
    WHERE correlation_id IS NOT NULL;

-- A claim writes a new version of hundreds of rows that stand side by side, all before
-- any old one may go: with room on the page for each of them none needs new index entries.
-- And it passes by what was settled and not vacuumed yet: the vacuum takes no pauses.
ALTER TABLE logbook.outbox_memory SET (fillfactor = 45, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE logbook.memories SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
