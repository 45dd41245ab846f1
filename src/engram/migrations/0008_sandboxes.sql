-- Sandboxes: places of their own in which an agent's commands run. The row is there before the folder,
-- so a folder without a living row is nobody's. ended_at: since when it is failed, expired or deleted.
CREATE SCHEMA sandboxes;

-- number is the order in which they were asked for; host is where the folder is.
CREATE TABLE sandboxes.sandboxes (
    id         text PRIMARY KEY,
    number     bigint GENERATED ALWAYS AS IDENTITY,
    owner      text NOT NULL,
    profile    text NOT NULL,
    env        jsonb NOT NULL DEFAULT '{}',
    host       text NOT NULL,
    status     text NOT NULL DEFAULT 'creating',
    reason     text,
    created_at timestamptz NOT NULL DEFAULT now(),
    begun_at   timestamptz NOT NULL DEFAULT now(),
    ready_at   timestamptz,
    expires_at timestamptz NOT NULL,
    ended_at   timestamptz,
    CONSTRAINT sandbox_id_well_formed CHECK (id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'),
    CONSTRAINT sandbox_status_known CHECK
        (status IN ('creating', 'ready', 'failed', 'stopped', 'expired', 'deleted')),
    CONSTRAINT sandbox_ready_has_time CHECK (status NOT IN ('ready', 'stopped') OR ready_at IS NOT NULL),
    CONSTRAINT sandbox_ended_has_time CHECK
        ((ended_at IS NOT NULL) = (status IN ('failed', 'expired', 'deleted'))),
    CONSTRAINT sandbox_failed_has_reason CHECK (status <> 'failed' OR reason IS NOT NULL)
);
CREATE INDEX sandboxes_of_owner ON sandboxes.sandboxes (owner, number);
CREATE INDEX sandboxes_alive ON sandboxes.sandboxes (expires_at)
    WHERE status IN ('creating', 'ready', 'stopped');
CREATE INDEX sandboxes_alive_of_owner ON sandboxes.sandboxes (owner, expires_at)
    WHERE status IN ('creating', 'ready', 'stopped');
CREATE INDEX sandboxes_ended ON sandboxes.sandboxes (ended_at) WHERE ended_at IS NOT NULL;

-- Whether an owner may have one more. Those who ask at once wait for each other, and each
-- counts after it has waited: a plain count would let them all in.
CREATE FUNCTION sandboxes.has_room(of_owner text, besides text, at_most integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('sandboxes.' || of_owner, 0));
    RETURN at_most > (SELECT count(*) FROM sandboxes.sandboxes
                      WHERE owner = of_owner AND id <> besides AND expires_at > now()
                        AND status IN ('creating', 'ready', 'stopped'));
END
$$;
