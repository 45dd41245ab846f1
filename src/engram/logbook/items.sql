-- name: create_item
-- A thing that work is about.
INSERT INTO logbook.items (item_type, title, project_key, owner_user_id, meta_json)
VALUES (%(item_type)s, %(title)s, %(project_key)s, %(owner_user_id)s, %(meta_json)s)
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
-- Items of a project, newest first.
SELECT * FROM logbook.items
WHERE project_key = %(project_key)s
  AND (%(status)s::text IS NULL OR status = %(status)s)
  AND (%(before_id)s::bigint IS NULL OR item_id < %(before_id)s)
ORDER BY item_id DESC
LIMIT %(limit)s;

-- name: add_event
-- Something that happened, in the space of those who may read it.
INSERT INTO logbook.events
    (item_id, event_type, target_space, actor_user_id, content_md, payload_json, words)
VALUES (%(item_id)s, %(event_type)s, %(target_space)s, %(actor_user_id)s, %(content_md)s,
        %(payload_json)s, %(words)s::tsvector)
RETURNING event_id;

-- name: list_events
-- Events in the given spaces, newest first; of one item, one type, or with any of the words.
SELECT event_id, item_id, event_type, target_space, actor_user_id, content_md, payload_json, created_at
FROM logbook.events
WHERE target_space = ANY(%(spaces)s)
  AND (%(item_id)s::bigint IS NULL OR item_id = %(item_id)s)
  AND (%(event_type)s::text IS NULL OR event_type = %(event_type)s)
  AND (%(asked)s::tsquery IS NULL OR words @@ %(asked)s::tsquery)
  AND (%(before_id)s::bigint IS NULL OR event_id < %(before_id)s)
ORDER BY event_id DESC
LIMIT %(limit)s;

-- name: add_attachment
-- A file that belongs to an item or to nobody yet; its bytes are in the artifact store.
INSERT INTO logbook.attachments (item_id, kind, artifact_key, sha256, size_bytes, owner, meta_json)
VALUES (%(item_id)s, %(kind)s, %(artifact_key)s, %(sha256)s, %(size_bytes)s, %(owner)s, %(meta_json)s)
RETURNING attachment_id;

-- name: get_attachment
-- One attachment.
SELECT * FROM logbook.attachments WHERE attachment_id = %(attachment_id)s;

-- name: list_attachments
-- The attachments of an item, in the order they came.
SELECT * FROM logbook.attachments WHERE item_id = %(item_id)s ORDER BY attachment_id;
