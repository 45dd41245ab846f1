-- Idempotency keys: reserved before the effect, completed with its answer.
-- status_code NULL: reserved, and leased while locked_at is set; else completed.

CREATE TABLE logbook.idempotency_keys (
    owner               text NOT NULL,
    key                 text NOT NULL,
    request_fingerprint text NOT NULL,
    resource_id         text NOT NULL,
    attempts            integer NOT NULL DEFAULT 1,
    locked_at           timestamptz,
    lease_seconds       double precision,
    lease_token         bigint NOT NULL,
    status_code         integer,
    response_snapshot   text,
    created_at          timestamptz NOT NULL DEFAULT now(),
    expires_at          timestamptz NOT NULL,
    PRIMARY KEY (owner, key),
    CONSTRAINT idempotency_key_well_formed CHECK (key ~ '^[a-zA-Z0-9_-]{1,128}$'),
    CONSTRAINT idempotency_fingerprint_is_hex CHECK (request_fingerprint ~ '^[0-9a-f]{64}$'),
    CONSTRAINT idempotency_attempts_counted CHECK (attempts > 0),
    CONSTRAINT idempotency_lease_is_whole CHECK
        ((locked_at IS NULL) = (lease_seconds IS NULL) AND (lease_seconds IS NULL OR lease_seconds > 0)),
    CONSTRAINT idempotency_completed_has_answer CHECK ((status_code IS NULL) = (response_snapshot IS NULL)),
    CONSTRAINT idempotency_completed_is_unlocked CHECK (status_code IS NULL OR locked_at IS NULL),
    CONSTRAINT idempotency_answer_is_final CHECK
        (status_code BETWEEN 100 AND 499 AND status_code NOT IN (408, 425, 429))
);
CREATE INDEX idempotency_by_expiry ON logbook.idempotency_keys (expires_at);
