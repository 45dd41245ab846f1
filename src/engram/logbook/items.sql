-- name: create_item
-- A thing that work is about; a request that is repeated finds the one it made.
INSERT INTO logbook.items AS i (item_type, title, project_key, owner_user_id, meta_json, request_id, words)
VALUES (%(item_type)s, %(title)s, %(project_key)s, %(owner_user_id)s, %(meta_json)s, %(request_id)s,
        %(words)s::tsvector)
ON CONFLICT (request_id) WHERE request_id IS NOT NULL DO UPDATE SET request_id = i.request_id
RETURNING item_id;

-- name: get_item
-- One item.
SELECT * FROM logbook.items WHERE item_id = %(item_id)s;

-- name: close_item
-- An open item becomes closed.
UPDATE logbook.items SET status = 'closed', updated_at = now()
WHERE item_id = %(item_id)s AND status = 'open'
RETURNING item_id;

-- name: list_items
-- Items of the given projects, newest first; one of them, of one status, or with any of the words.
--
-- Each project is read on its own: it has an index in the order that is wanted.
SELECT item.*
FROM unnest(%(project_keys)s::text[]) AS project
CROSS JOIN LATERAL (
    SELECT item_id, item_type, title, project_key, status, owner_user_id, meta_json, created_at, updated_at
    FROM logbook.items
    WHERE project_key = project
      AND (%(item_id)s::bigint IS NULL OR item_id = %(item_id)s)
      AND (%(status)s::text IS NULL OR status = %(status)s)
      AND (%(asked)s::tsquery IS NULL OR words @@ %(asked)s::tsquery)
      AND (%(before_id)s::bigint IS NULL OR item_id < %(before_id)s)
    ORDER BY item_id DESC
    LIMIT %(limit)s
) AS item
ORDER BY item_id DESC
LIMIT %(limit)s;

-- name: add_event
-- Something that happened, in the space of those who may read it; once, if its request is repeated.
INSERT INTO logbook.events AS e
    (item_id, event_type, target_space, actor_user_id, content_md, payload_json, request_id, words)
VALUES (%(item_id)s, %(event_type)s, %(target_space)s, %(actor_user_id)s, %(content_md)s,
        %(payload_json)s, %(request_id)s, %(words)s::tsvector)
ON CONFLICT (request_id) WHERE request_id IS NOT NULL DO UPDATE SET request_id = e.request_id
RETURNING event_id, target_space;

-- name: list_events
-- Events in the given spaces, newest first; of one item, one type, or with any of the words.
--
-- Each space is read on its own, as the projects of items are.
SELECT event.*
FROM unnest(%(spaces)s::text[]) AS space
CROSS JOIN LATERAL (
    SELECT event_id, item_id, event_type, target_space, actor_user_id, content_md, payload_json, created_at
    FROM logbook.events
    WHERE target_space = space
      AND (%(item_id)s::bigint IS NULL OR item_id = %(item_id)s)
      AND (%(event_type)s::text IS NULL OR event_type = %(event_type)s)
      AND (%(asked)s::tsquery IS NULL OR words @@ %(asked)s::tsquery)
      AND (%(before_id)s::bigint IS NULL OR event_id < %(before_id)s)
    ORDER BY event_id DESC
    LIMIT %(limit)s
) AS event
ORDER BY event_id DESC
LIMIT %(limit)s;

-- name: add_attachment
-- A file whose bytes are in the artifact store; or the one its owner has there already.
WITH drawn AS MATERIALIZED (
    SELECT nextval('logbook.attachments_attachment_id_seq') AS attachment_id
), kept AS (
    INSERT INTO logbook.attachments AS a
        (attachment_id, item_id, kind, artifact_key, sha256, size_bytes, owner, meta_json, target_space)
    SELECT attachment_id, %(item_id)s, %(kind)s, %(artifact_key)s, %(sha256)s, %(size_bytes)s, %(owner)s,
           %(meta_json)s, %(target_space)s
    FROM drawn
    ON CONFLICT (target_space, sha256, owner, item_id) DO UPDATE SET sha256 = a.sha256
    RETURNING attachment_id
)
SELECT kept.attachment_id, kept.attachment_id = drawn.attachment_id AS fresh FROM kept, drawn;

-- name: get_attachment
-- One attachment.
SELECT * FROM logbook.attachments WHERE attachment_id = %(attachment_id)s;

-- name: list_attachments
-- The attachments of an item, in the order they came.
SELECT * FROM logbook.attachments WHERE item_id = %(item_id)s ORDER BY attachment_id;
