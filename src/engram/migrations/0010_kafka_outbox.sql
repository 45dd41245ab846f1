-- Events that wait to be published to Kafka. The columns id, aggregatetype,
-- aggregateid, type and payload are those of Debezium's outbox event router, which
-- may take the publisher's place.
--
-- Events of one aggregate are published in order, however many publishers there
-- are: each aggregate has a lane, which numbers its events and is leased as a
-- whole. What is waiting in a long lane costs a claim nothing.
CREATE TABLE ingest.outbox_lane (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    aggregatetype text NOT NULL,
    aggregateid   text NOT NULL,
    next_seq      bigint NOT NULL DEFAULT 1,
    head_seq      bigint NOT NULL DEFAULT 1,
    due_at        timestamptz NOT NULL DEFAULT now(),
    locked_by     text,
    locked_at     timestamptz,
    lease_seconds double precision,
    lease_token   bigint,
    CONSTRAINT lane_once UNIQUE (aggregatetype, aggregateid),
    CONSTRAINT lane_head_is_within CHECK (head_seq BETWEEN 1 AND next_seq),
    CONSTRAINT lane_lease_is_whole CHECK
        ((locked_by IS NULL) = (locked_at IS NULL) AND (locked_by IS NULL) = (lease_seconds IS NULL)
         AND (locked_by IS NULL OR (lease_token IS NOT NULL AND lease_seconds > 0)))
) WITH (fillfactor = 70);
-- A claim takes the longest waiting; a lane without work is not looked at.
CREATE INDEX lane_with_work ON ingest.outbox_lane (due_at) WHERE head_seq < next_seq;

-- One event, with what became of it. `task_id` is for those that tell of a task.
CREATE TABLE ingest.outbox_event (
    id            uuid PRIMARY KEY,
    aggregatetype text NOT NULL,
    aggregateid   text NOT NULL,
    type          text NOT NULL,
    payload       jsonb NOT NULL,
    task_id       uuid,
    lane_id       bigint NOT NULL,
    seq           bigint NOT NULL,
    status        text NOT NULL DEFAULT 'NEW',
    attempt_count integer NOT NULL DEFAULT 0,
    next_retry_at timestamptz,
    last_error    text,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at       timestamptz,
    CONSTRAINT event_place UNIQUE (lane_id, seq),
    CONSTRAINT event_status_known CHECK (status IN ('NEW', 'RETRYING', 'SENT', 'DEAD')),
    CONSTRAINT event_waits_only_to_be_retried CHECK ((status = 'RETRYING') = (next_retry_at IS NOT NULL)),
    CONSTRAINT event_sent_has_its_time CHECK ((status = 'SENT') = (sent_at IS NOT NULL)),
    CONSTRAINT event_failure_has_a_reason CHECK ((status IN ('RETRYING', 'DEAD')) = (last_error IS NOT NULL)),
    CONSTRAINT event_new_was_not_tried CHECK (status <> 'NEW' OR attempt_count = 0)
) WITH (fillfactor = 80);
-- How many wait is counted by this.
CREATE INDEX event_backlog ON ingest.outbox_event (created_at) WHERE status IN ('NEW', 'RETRYING');
-- The dead ones are listed by this.
CREATE INDEX event_dead ON ingest.outbox_event (created_at) WHERE status = 'DEAD';
-- A task's newest event.
CREATE INDEX event_by_task ON ingest.outbox_event (task_id, seq DESC) WHERE task_id IS NOT NULL;
-- A task is told of once at a time.
CREATE UNIQUE INDEX event_unsettled_once_per_task ON ingest.outbox_event (task_id)
    WHERE status IN ('NEW', 'RETRYING');

-- Tell Kafka that a task is to be worked on: an event at the end of its document's
-- lane, by the transaction that calls. A task has one unsettled event at most: if it
-- has one, that one is the answer. The lane is locked until the transaction ends,
-- so numbers are given in the order of commits and none is left out.
CREATE FUNCTION ingest.emit(asked_task uuid, asked_document uuid, new_event uuid) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    lane  ingest.outbox_lane;
    event uuid;
BEGIN
    INSERT INTO ingest.outbox_lane AS l (aggregatetype, aggregateid)
    VALUES ('ingest_task', asked_document::text)
    ON CONFLICT (aggregatetype, aggregateid) DO UPDATE SET next_seq = l.next_seq
    RETURNING l.* INTO lane;
    SELECT id INTO event FROM ingest.outbox_event
    WHERE task_id = asked_task AND status IN ('NEW', 'RETRYING');
    IF event IS NOT NULL THEN
        RETURN event;
    END IF;
    INSERT INTO ingest.outbox_event (id, aggregatetype, aggregateid, type, payload, task_id, lane_id, seq)
    VALUES (new_event, lane.aggregatetype, lane.aggregateid, 'IngestTaskQueued',
            jsonb_build_object('taskId', asked_task, 'documentId', asked_document),
            asked_task, lane.id, lane.next_seq);
    UPDATE ingest.outbox_lane
    SET next_seq = lane.next_seq + 1,
        due_at = CASE WHEN lane.head_seq = lane.next_seq THEN clock_timestamp() ELSE due_at END
    WHERE id = lane.id;
    RETURN new_event;
END
$$;
