-- name: changes
-- What changed in a repository after a point, in the order it changed, each with its patch if it is kept.
SELECT fact.*, p.uri AS patch_uri
FROM (
    (SELECT 'git' AS source_type, commit_sha AS source_id, changed_seq, NULL::bigint AS rev_num, message,
            author_name, author_email, committed_at AS at, paths_json, files, additions, deletions, bulk_reason,
            superseded, cardinality(parents) > 1 AS is_merge, 'merged' AS state, NULL::text AS web_url
     FROM scm.git_commits WHERE repo_id = %(repo_id)s AND changed_seq > %(after_seq)s
     ORDER BY changed_seq LIMIT %(limit)s)
    UNION ALL
    (SELECT 'svn', 'r' || rev_num, changed_seq, rev_num, message, coalesce(author_name, ''), '', committed_at,
            paths_json, files, NULL, NULL, bulk_reason, false, false, 'merged', NULL
     FROM scm.svn_revisions WHERE repo_id = %(repo_id)s AND changed_seq > %(after_seq)s
     ORDER BY changed_seq LIMIT %(limit)s)
    UNION ALL
    (SELECT 'mr', mr_iid::text, changed_seq, NULL, title || E'\n\n' || description, author_name, '', merged_at,
            paths_json, files, NULL, NULL, NULL, false, false, state, web_url
     FROM scm.mrs WHERE repo_id = %(repo_id)s AND changed_seq > %(after_seq)s
     ORDER BY changed_seq LIMIT %(limit)s)
) AS fact
LEFT JOIN scm.patch_blobs p
  ON p.repo_id = %(repo_id)s AND p.source_type = fact.source_type AND p.source_id = fact.source_id
 AND p.uri <> ''
ORDER BY changed_seq
LIMIT %(limit)s;

-- name: repos
-- The repositories that facts come from; one of them, or all.
SELECT repo_id, project_key, kind, url FROM scm.repos
WHERE %(repo_ids)s::bigint[] IS NULL OR repo_id = ANY(%(repo_ids)s)
ORDER BY repo_id;

-- name: before_revision
-- The point just before the first revision after a given one.
SELECT coalesce(
    (SELECT min(changed_seq) - 1 FROM scm.svn_revisions WHERE repo_id = %(repo_id)s AND rev_num > %(rev_num)s),
    (SELECT max(changed_seq) FROM scm.svn_revisions WHERE repo_id = %(repo_id)s), 0) AS seq;

-- name: patch
-- The patch that evidence names, and whose it is.
SELECT p.artifact_key, p.sha256, p.size_bytes, p.form, r.project_key
FROM scm.patch_blobs p JOIN scm.repos r USING (repo_id)
WHERE p.repo_id = %(repo_id)s AND p.source_type = %(source_type)s AND p.source_id = %(source_id)s
  AND p.sha256 = %(sha256)s;

-- name: waiting
-- How many changes of each repository lie after its consumer's cursor.
SELECT r.repo_id,
       (SELECT count(*) FROM scm.git_commits c WHERE c.repo_id = r.repo_id AND c.changed_seq > cursor.seq)
         + (SELECT count(*) FROM scm.svn_revisions s WHERE s.repo_id = r.repo_id AND s.changed_seq > cursor.seq)
         + (SELECT count(*) FROM scm.mrs m WHERE m.repo_id = r.repo_id AND m.changed_seq > cursor.seq) AS waiting
FROM scm.repos r
CROSS JOIN LATERAL (
    SELECT coalesce((SELECT (value_json ->> 'changed_seq')::bigint FROM logbook.kv
                     WHERE namespace = 'gateway.consume' AND key = 'scm_consume:' || r.repo_id), 0) AS seq
) AS cursor
ORDER BY r.repo_id;
