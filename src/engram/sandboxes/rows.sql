-- name: begin
-- A sandbox to be made under this id, or the one that an earlier try made; no row: its owner has enough.
--
-- One that could not be made is begun again. Whoever is about to be doubled does not count itself.
INSERT INTO sandboxes.sandboxes AS s (id, owner, profile, env, host, expires_at)
SELECT %(id)s, %(owner)s, %(profile)s, %(env)s, %(host)s, now() + make_interval(secs => %(ttl_seconds)s)
WHERE sandboxes.has_room(%(owner)s, %(id)s, %(at_most)s)
   OR EXISTS (SELECT FROM sandboxes.sandboxes WHERE id = %(id)s AND status <> 'failed')
ON CONFLICT (id) DO UPDATE
SET status = CASE WHEN s.status = 'failed' THEN 'creating' ELSE s.status END,
    reason = CASE WHEN s.status = 'failed' THEN NULL ELSE s.reason END,
    ended_at = CASE WHEN s.status = 'failed' THEN NULL ELSE s.ended_at END,
    begun_at = CASE WHEN s.status = 'failed' THEN now() ELSE s.begun_at END,
    expires_at = CASE WHEN s.status = 'failed' THEN EXCLUDED.expires_at ELSE s.expires_at END,
    host = CASE WHEN s.status IN ('failed', 'creating') THEN EXCLUDED.host ELSE s.host END
WHERE s.owner = EXCLUDED.owner
RETURNING id, number, owner, profile, env, host, reason, created_at, expires_at,
          CASE WHEN expires_at <= now() AND status IN ('creating', 'ready', 'stopped')
               THEN 'expired' ELSE status END AS status;

-- name: finish
-- It is made: commands can run.
UPDATE sandboxes.sandboxes SET status = 'ready', ready_at = now()
WHERE id = %(id)s AND status = 'creating' AND expires_at > now()
RETURNING id;

-- name: fail
-- It could not be made.
UPDATE sandboxes.sandboxes SET status = 'failed', reason = %(reason)s, ended_at = now()
WHERE id = %(id)s AND status = 'creating'
RETURNING id;

-- name: find
-- One sandbox of its owner; past its time it is expired, whoever has noticed.
SELECT id, number, owner, profile, env, host, reason, created_at, expires_at,
       CASE WHEN expires_at <= now() AND status IN ('creating', 'ready', 'stopped')
            THEN 'expired' ELSE status END AS status
FROM sandboxes.sandboxes WHERE id = %(id)s AND owner = %(owner)s;

-- name: list
-- An owner's sandboxes, newest first, from a place in that order on.
SELECT * FROM (
    SELECT id, number, owner, profile, env, host, reason, created_at, expires_at,
           CASE WHEN expires_at <= now() AND status IN ('creating', 'ready', 'stopped')
                THEN 'expired' ELSE status END AS status
    FROM sandboxes.sandboxes
    WHERE owner = %(owner)s AND (%(before)s::bigint IS NULL OR number < %(before)s)
) AS found
WHERE %(status)s::text IS NULL OR status = %(status)s
ORDER BY number DESC
LIMIT %(limit)s;

-- name: extend
-- Put the end off: so many seconds from now, never sooner than it was.
UPDATE sandboxes.sandboxes
SET expires_at = GREATEST(expires_at, now() + make_interval(secs => %(ttl_seconds)s))
WHERE id = %(id)s AND owner = %(owner)s AND status IN ('ready', 'stopped') AND expires_at > now()
RETURNING id;

-- name: stop
-- No command runs any more; its files stay.
UPDATE sandboxes.sandboxes SET status = 'stopped'
WHERE id = %(id)s AND owner = %(owner)s AND status = 'ready' AND expires_at > now()
RETURNING id;

-- name: delete
-- Its owner is done with it, in whatever state it is.
UPDATE sandboxes.sandboxes SET status = 'deleted', ended_at = now()
WHERE id = %(id)s AND owner = %(owner)s AND status <> 'deleted'
RETURNING id;

-- name: expire
-- Those whose time is over; rows that somebody else is changing are left to the next look.
UPDATE sandboxes.sandboxes SET status = 'expired', ended_at = now()
WHERE id IN (SELECT id FROM sandboxes.sandboxes
             WHERE expires_at <= now() AND status IN ('creating', 'ready', 'stopped')
             ORDER BY expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
RETURNING id;

-- name: half_made
-- Those that are being made for longer than that takes, on this host or on any.
SELECT id, host FROM sandboxes.sandboxes
WHERE status = 'creating' AND begun_at + make_interval(secs => %(seconds)s) <= now() AND expires_at > now()
ORDER BY expires_at
LIMIT %(limit)s;

-- name: alive
-- Which of these may have a folder.
SELECT id FROM sandboxes.sandboxes
WHERE id = ANY(%(ids)s) AND status IN ('creating', 'ready', 'stopped') AND expires_at > now();

-- name: purge
-- Forget those that ended long ago.
DELETE FROM sandboxes.sandboxes
WHERE id IN (SELECT id FROM sandboxes.sandboxes
             WHERE ended_at + make_interval(secs => %(seconds)s) <= now()
             ORDER BY ended_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
RETURNING id;

-- name: soonest_end
-- In how many seconds the owner's next sandbox ends.
SELECT COALESCE(EXTRACT(epoch FROM min(expires_at) - now()), 0)::float8 AS seconds
FROM sandboxes.sandboxes
WHERE owner = %(owner)s AND expires_at > now() AND status IN ('creating', 'ready', 'stopped');

-- name: database
-- A name for this database that no other has: its folders are under it.
SELECT format('%%s-%%s', system_identifier, (SELECT oid FROM pg_database WHERE datname = current_database()))
FROM pg_control_system();
