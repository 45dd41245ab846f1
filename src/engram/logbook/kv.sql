-- name: get
-- The value of a key.
SELECT value_json FROM logbook.kv WHERE namespace = %(namespace)s AND key = %(key)s;

-- name: put
-- Set a key, whatever it was.
INSERT INTO logbook.kv (namespace, key, value_json)
VALUES (%(namespace)s, %(key)s, %(value)s)
ON CONFLICT (namespace, key) DO UPDATE SET value_json = EXCLUDED.value_json, updated_at = now()
RETURNING key;

-- name: put_if_absent
-- Set a key that is not there; one of many at once succeeds.
INSERT INTO logbook.kv (namespace, key, value_json)
VALUES (%(namespace)s, %(key)s, %(value)s)
ON CONFLICT (namespace, key) DO NOTHING
RETURNING key;

-- name: compare_and_set
-- Move a key from the value it is expected to have; the row's lock decides between two at once.
UPDATE logbook.kv SET value_json = %(value)s, updated_at = now()
WHERE namespace = %(namespace)s AND key = %(key)s AND value_json = %(expected)s
RETURNING key;

-- name: beat
-- A sign of life with this server's time in it; what died longer ago than it is kept goes.
WITH gone AS (
    DELETE FROM logbook.kv
    WHERE namespace = %(namespace)s AND key <> %(key)s
      AND updated_at < now() - make_interval(secs => %(keep_seconds)s)
)
INSERT INTO logbook.kv (namespace, key, value_json)
VALUES (%(namespace)s, %(key)s, %(value)s || jsonb_build_object('at', now()))
ON CONFLICT (namespace, key) DO UPDATE SET value_json = EXCLUDED.value_json, updated_at = now()
RETURNING key;

-- name: seconds_since_beat
-- How long ago the latest of the keys that start alike beat, by this server's clock; null: none did.
SELECT EXTRACT(epoch FROM now() - max((value_json ->> 'at')::timestamptz))::float8 AS seconds
FROM logbook.kv
WHERE namespace = %(namespace)s AND starts_with(key, %(prefix)s);

-- name: delete
-- Remove a key.
DELETE FROM logbook.kv WHERE namespace = %(namespace)s AND key = %(key)s RETURNING key;

-- name: list
-- The keys of a namespace that start alike, in order.
SELECT key, value_json, updated_at FROM logbook.kv
WHERE namespace = %(namespace)s AND starts_with(key, %(prefix)s)
ORDER BY key;
