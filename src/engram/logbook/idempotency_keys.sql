-- name: find
-- What a key stands for now; past its time it stands for nothing.
SELECT request_fingerprint, resource_id, lease_token, status_code, response_snapshot,
       GREATEST(0, COALESCE(
           EXTRACT(epoch FROM locked_at + make_interval(secs => lease_seconds) - now()), 0))::float8
           AS lease_left
FROM logbook.idempotency_keys
WHERE owner = %(owner)s AND key = %(key)s AND expires_at > now();

-- name: reserve
-- Take a key that is new, expired, or left unfinished by the same request; else tell what it stands for.
--
-- One that is answered or held is read and nothing more, since an upsert locks its row even
-- where it changes nothing. No row at all: another request took the key this moment.
WITH known AS MATERIALIZED (
    SELECT request_fingerprint, resource_id, lease_token, status_code, response_snapshot,
           GREATEST(0, COALESCE(
               EXTRACT(epoch FROM locked_at + make_interval(secs => lease_seconds) - now()), 0))::float8
               AS lease_left
    FROM logbook.idempotency_keys
    WHERE owner = %(owner)s AND key = %(key)s AND expires_at > now()
), reserved AS (
    INSERT INTO logbook.idempotency_keys AS k
        (owner, key, request_fingerprint, resource_id, locked_at, lease_seconds, lease_token, expires_at)
    SELECT %(owner)s, %(key)s, %(fingerprint)s, %(resource_id)s, now(), %(lease_seconds)s,
           nextval('logbook.lease_token_seq'),
           now() + make_interval(secs => %(lease_seconds)s) + make_interval(secs => %(ttl_seconds)s)
    WHERE NOT EXISTS (SELECT FROM known WHERE status_code IS NOT NULL OR lease_left > 0)
    ON CONFLICT (owner, key) DO UPDATE
    SET request_fingerprint = EXCLUDED.request_fingerprint,
        -- Who resumes goes on with the resource that the first may have made already.
        resource_id = CASE WHEN k.expires_at <= now() THEN EXCLUDED.resource_id ELSE k.resource_id END,
        attempts = CASE WHEN k.expires_at <= now() THEN 1 ELSE k.attempts + 1 END,
        created_at = CASE WHEN k.expires_at <= now() THEN EXCLUDED.created_at ELSE k.created_at END,
        locked_at = EXCLUDED.locked_at,
        lease_seconds = EXCLUDED.lease_seconds,
        lease_token = EXCLUDED.lease_token,
        status_code = NULL,
        response_snapshot = NULL,
        expires_at = EXCLUDED.expires_at
    WHERE k.expires_at <= now()
       OR (k.status_code IS NULL
           AND k.request_fingerprint = EXCLUDED.request_fingerprint
           AND (k.locked_at IS NULL OR k.locked_at + make_interval(secs => k.lease_seconds) <= now())
           AND %(resumable)s)
    RETURNING resource_id, lease_token, attempts > 1 AS resumed
)
SELECT resource_id, lease_token, resumed,
       NULL AS request_fingerprint, NULL::integer AS status_code, NULL AS response_snapshot,
       NULL::float8 AS lease_left
FROM reserved
UNION ALL
SELECT resource_id, lease_token, NULL, request_fingerprint, status_code, response_snapshot, lease_left
FROM known WHERE NOT EXISTS (SELECT FROM reserved);

-- name: renew
-- Start the lease anew. Late is allowed as long as nobody has taken the key.
UPDATE logbook.idempotency_keys
SET locked_at = now(),
    expires_at = now() + make_interval(secs => lease_seconds) + make_interval(secs => %(ttl_seconds)s)
WHERE owner = %(owner)s AND key = %(key)s
  AND lease_token = %(lease_token)s
  AND status_code IS NULL
  AND locked_at IS NOT NULL
  AND expires_at > now()
RETURNING key;

-- name: complete
-- Store the answer, if the lease is held and live. The token stays: its holder knows its own answer.
UPDATE logbook.idempotency_keys
SET status_code = %(status_code)s,
    response_snapshot = %(response_snapshot)s,
    locked_at = NULL,
    lease_seconds = NULL,
    expires_at = now() + make_interval(secs => %(ttl_seconds)s)
WHERE owner = %(owner)s AND key = %(key)s
  AND lease_token = %(lease_token)s
  AND status_code IS NULL
  AND locked_at + make_interval(secs => lease_seconds) > now()
  AND expires_at > now()
RETURNING key;

-- name: release
-- End the lease without an answer; the key and its resource id stay for the next try.
UPDATE logbook.idempotency_keys
SET locked_at = NULL,
    lease_seconds = NULL,
    expires_at = now() + make_interval(secs => %(ttl_seconds)s)
WHERE owner = %(owner)s AND key = %(key)s
  AND lease_token = %(lease_token)s
  AND status_code IS NULL
  AND locked_at IS NOT NULL
  AND expires_at > now()
RETURNING key;

-- name: withdraw
-- Nothing was begun: the key is free again.
DELETE FROM logbook.idempotency_keys
WHERE owner = %(owner)s AND key = %(key)s
  AND lease_token = %(lease_token)s
  AND status_code IS NULL
RETURNING key;

-- name: sweep
-- Delete some keys whose time is over, oldest first; those in use at the moment are passed by.
WITH over AS MATERIALIZED (
    SELECT owner, key FROM logbook.idempotency_keys
    WHERE expires_at <= now()
    ORDER BY expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), swept AS (
    DELETE FROM logbook.idempotency_keys k
    USING over
    WHERE k.owner = over.owner AND k.key = over.key
    RETURNING k.key
)
SELECT count(*) FROM swept;
