-- name: add_repo
-- A repository to follow; one that is followed already keeps its id.
INSERT INTO scm.repos AS r (project_key, kind, url) VALUES (%(project_key)s, %(kind)s, %(url)s)
ON CONFLICT (project_key, kind, url) DO UPDATE SET url = r.url
RETURNING repo_id, xmax = 0 AS fresh;

-- name: repos
-- The repositories of one project, of all, or those of the given ids.
SELECT repo_id, project_key, kind, url FROM scm.repos
WHERE (%(repo_ids)s::bigint[] IS NULL OR repo_id = ANY(%(repo_ids)s))
ORDER BY repo_id;

-- name: acquire
-- Begin a run, if nobody else holds the repository; a run whose holder died is closed as abandoned.
WITH held AS MATERIALIZED (
    UPDATE scm.repos
    SET locked_by = %(holder)s, locked_at = now(), lease_seconds = %(lease_seconds)s,
        lease_token = nextval('scm.lease_tokens')
    WHERE repo_id = %(repo_id)s
      AND (locked_by IS NULL OR locked_at + make_interval(secs => lease_seconds) <= now())
    RETURNING repo_id, lease_token
), abandoned AS (
    UPDATE scm.sync_runs s SET status = 'abandoned', finished_at = now()
    FROM held WHERE s.repo_id = held.repo_id AND s.status = 'running'
), begun AS (
    INSERT INTO scm.sync_runs (repo_id, mode) SELECT repo_id, %(mode)s FROM held RETURNING run_id
)
SELECT held.lease_token, begun.run_id FROM held, begun;

-- name: marks
-- Where the last sync of a repository came to.
SELECT key, value_json FROM logbook.kv WHERE namespace = 'scm.sync' AND key = ANY(%(keys)s);

-- name: renew
-- A holder may renew late, while nobody has taken the repository.
UPDATE scm.repos SET locked_at = now()
WHERE repo_id = %(repo_id)s AND lease_token = %(lease_token)s AND locked_by IS NOT NULL
RETURNING repo_id;

-- name: release
-- End a run and hand the repository back; a holder that lost it changes nothing.
WITH freed AS MATERIALIZED (
    UPDATE scm.repos SET locked_by = NULL, locked_at = NULL, lease_seconds = NULL
    WHERE repo_id = %(repo_id)s AND lease_token = %(lease_token)s AND locked_by IS NOT NULL
    RETURNING repo_id
)
UPDATE scm.sync_runs s
SET status = %(status)s, finished_at = now(), read = %(read)s, written = %(written)s,
    skipped = %(skipped)s, superseded = %(superseded)s, error = %(error)s
FROM freed WHERE s.run_id = %(run_id)s AND s.status = 'running'
RETURNING s.run_id;

-- name: put_page
-- A page of facts, the watermark that stands for it and the progress of its pass, by the lease's holder.
--
-- The repository's row is locked first: pages of one repository are written one after
-- the other, so that whoever follows `changed_seq` never finds a smaller one later. A
-- watermark that is not where it was expected lets nothing through.
WITH held AS MATERIALIZED (
    UPDATE scm.repos SET locked_at = now()
    WHERE repo_id = %(repo_id)s AND lease_token = %(lease_token)s AND locked_by IS NOT NULL
      AND locked_at + make_interval(secs => lease_seconds) > now()
    RETURNING repo_id
), moved AS MATERIALIZED (
    INSERT INTO logbook.kv AS kv (namespace, key, value_json)
    SELECT 'scm.sync', %(cursor_key)s, %(cursor)s::jsonb FROM held
    WHERE %(cursor)s::jsonb IS NOT NULL
      AND (%(expected)s::jsonb IS NULL OR EXISTS (
          SELECT FROM logbook.kv WHERE namespace = 'scm.sync' AND key = %(cursor_key)s
                                   AND value_json = %(expected)s::jsonb))
    ON CONFLICT (namespace, key) DO UPDATE SET value_json = EXCLUDED.value_json, updated_at = now()
    WHERE kv.value_json = %(expected)s::jsonb
    RETURNING key
), let_in AS MATERIALIZED (
    SELECT repo_id FROM held WHERE %(cursor)s::jsonb IS NULL OR EXISTS (SELECT FROM moved)
), progress AS (
    INSERT INTO logbook.kv (namespace, key, value_json)
    SELECT 'scm.sync', %(progress_key)s, %(progress)s::jsonb FROM let_in WHERE %(progress)s::jsonb IS NOT NULL
    ON CONFLICT (namespace, key) DO UPDATE SET value_json = EXCLUDED.value_json, updated_at = now()
), at_the_end AS (
    DELETE FROM logbook.kv USING let_in
    WHERE namespace = 'scm.sync' AND key = %(progress_key)s AND %(pass_is_over)s
), no_longer_skipped AS (
    DELETE FROM scm.skipped s USING let_in
    WHERE s.repo_id = let_in.repo_id AND s.source_type = %(source_type)s AND s.source_id = ANY(%(source_ids)s)
), commits AS (
    INSERT INTO scm.git_commits AS c
        (repo_id, commit_sha, parents, author_name, author_email, authored_at, committer_name,
         committer_email, committed_at, message, files, additions, deletions, paths_json, bulk_reason, pass,
         changed_seq)
    SELECT let_in.repo_id, g.commit_sha, g.parents, g.author_name, g.author_email, to_timestamp(g.authored),
           g.committer_name, g.committer_email, to_timestamp(g.committed), g.message, g.files, g.additions,
           g.deletions, g.paths, g.bulk_reason, %(pass)s, nextval('scm.changed_seq')
    FROM let_in, jsonb_to_recordset(%(commits)s) AS g(
        commit_sha text, parents text[], author_name text, author_email text, authored float8,
        committer_name text, committer_email text, committed float8, message text, files int,
        additions bigint, deletions bigint, paths jsonb, bulk_reason text)
    ON CONFLICT (repo_id, commit_sha) DO UPDATE
    SET message = EXCLUDED.message, files = coalesce(EXCLUDED.files, c.files),
        additions = EXCLUDED.additions, deletions = EXCLUDED.deletions,
        paths_json = CASE WHEN EXCLUDED.files IS NULL THEN c.paths_json ELSE EXCLUDED.paths_json END,
        bulk_reason = EXCLUDED.bulk_reason, superseded = false, pass = EXCLUDED.pass,
        changed_seq = CASE
            WHEN (c.message, c.additions, c.deletions, c.bulk_reason, c.superseded)
                 IS DISTINCT FROM (EXCLUDED.message, EXCLUDED.additions, EXCLUDED.deletions,
                                   EXCLUDED.bulk_reason, false)
              OR (EXCLUDED.files IS NOT NULL
                  AND (c.files, c.paths_json) IS DISTINCT FROM (EXCLUDED.files, EXCLUDED.paths_json))
            THEN EXCLUDED.changed_seq ELSE c.changed_seq END
    RETURNING 1
), revisions AS (
    INSERT INTO scm.svn_revisions AS r
        (repo_id, rev_num, author_name, committed_at, message, files, paths_json, bulk_reason, changed_seq)
    SELECT let_in.repo_id, g.rev_num, g.author_name, g.committed_at, g.message, g.files, g.paths,
           g.bulk_reason, nextval('scm.changed_seq')
    FROM let_in, jsonb_to_recordset(%(revisions)s) AS g(
        rev_num bigint, author_name text, committed_at timestamptz, message text, files int, paths jsonb,
        bulk_reason text)
    ON CONFLICT (repo_id, rev_num) DO UPDATE
    SET author_name = EXCLUDED.author_name, committed_at = EXCLUDED.committed_at, message = EXCLUDED.message,
        files = EXCLUDED.files, paths_json = EXCLUDED.paths_json, bulk_reason = EXCLUDED.bulk_reason,
        changed_seq = CASE
            WHEN (r.author_name, r.committed_at, r.message, r.files, r.paths_json, r.bulk_reason)
                 IS DISTINCT FROM (EXCLUDED.author_name, EXCLUDED.committed_at, EXCLUDED.message,
                                   EXCLUDED.files, EXCLUDED.paths_json, EXCLUDED.bulk_reason)
            THEN EXCLUDED.changed_seq ELSE r.changed_seq END
    RETURNING 1
), mrs AS (
    INSERT INTO scm.mrs AS m
        (repo_id, mr_iid, state, title, description, author_name, source_branch, target_branch,
         merge_commit_sha, web_url, created_at, updated_at, merged_at, changed_seq)
    SELECT let_in.repo_id, g.mr_iid, g.state, g.title, g.description, g.author_name, g.source_branch,
           g.target_branch, g.merge_commit_sha, g.web_url, g.created_at, g.updated_at, g.merged_at,
           nextval('scm.changed_seq')
    FROM let_in, jsonb_to_recordset(%(mrs)s) AS g(
        mr_iid bigint, state text, title text, description text, author_name text, source_branch text,
        target_branch text, merge_commit_sha text, web_url text, created_at timestamptz,
        updated_at timestamptz, merged_at timestamptz)
    ON CONFLICT (repo_id, mr_iid) DO UPDATE
    SET state = EXCLUDED.state, title = EXCLUDED.title, description = EXCLUDED.description,
        author_name = EXCLUDED.author_name, source_branch = EXCLUDED.source_branch,
        target_branch = EXCLUDED.target_branch, merge_commit_sha = EXCLUDED.merge_commit_sha,
        web_url = EXCLUDED.web_url, created_at = EXCLUDED.created_at, updated_at = EXCLUDED.updated_at,
        merged_at = EXCLUDED.merged_at,
        changed_seq = CASE
            WHEN (m.state, m.title, m.description, m.author_name, m.source_branch, m.target_branch,
                  m.merge_commit_sha, m.web_url, m.created_at, m.updated_at, m.merged_at)
                 IS DISTINCT FROM
                 (EXCLUDED.state, EXCLUDED.title, EXCLUDED.description, EXCLUDED.author_name,
                  EXCLUDED.source_branch, EXCLUDED.target_branch, EXCLUDED.merge_commit_sha, EXCLUDED.web_url,
                  EXCLUDED.created_at, EXCLUDED.updated_at, EXCLUDED.merged_at)
            THEN EXCLUDED.changed_seq ELSE m.changed_seq END
    RETURNING 1
), superseded AS (
    -- A page that supersedes brings no commits: a statement changes a row once.
    UPDATE scm.git_commits c SET superseded = true, changed_seq = nextval('scm.changed_seq')
    FROM let_in
    WHERE c.repo_id = let_in.repo_id AND NOT c.superseded
      AND (c.commit_sha = ANY(%(superseded)s) OR (%(all_others)s AND c.pass <> %(pass)s))
    RETURNING 1
)
SELECT EXISTS (SELECT FROM let_in) AS let_in,
       (SELECT count(*) FROM commits) + (SELECT count(*) FROM revisions) + (SELECT count(*) FROM mrs) AS written,
       (SELECT count(*) FROM superseded) AS superseded;

-- name: skip
-- A row that could not be written: counted, and tried again by every sync.
INSERT INTO scm.skipped AS s (repo_id, source_type, source_id, reason)
VALUES (%(repo_id)s, %(source_type)s, %(source_id)s, %(reason)s)
ON CONFLICT (repo_id, source_type, source_id)
DO UPDATE SET reason = EXCLUDED.reason, tries = s.tries + 1, last_at = now()
RETURNING tries;

-- name: skipped
-- What earlier syncs could not write.
SELECT source_type, source_id, reason, tries FROM scm.skipped WHERE repo_id = %(repo_id)s
ORDER BY source_type, source_id;

-- name: without_patch
-- Facts whose patch is not kept yet, newest first, after those of the page before.
--
-- Merges have none of their own. What failed before comes back only at the start of a run.
SELECT * FROM (
    SELECT 'git' AS source_type, c.commit_sha AS source_id, c.changed_seq, c.bulk_reason, c.paths_json,
           c.files, c.additions, c.deletions
    FROM scm.git_commits c
    WHERE c.repo_id = %(repo_id)s AND cardinality(c.parents) < 2 AND NOT c.superseded
    UNION ALL
    SELECT 'svn', 'r' || r.rev_num, r.changed_seq, r.bulk_reason, r.paths_json, r.files, NULL, NULL
    FROM scm.svn_revisions r WHERE r.repo_id = %(repo_id)s
    UNION ALL
    SELECT 'mr', m.mr_iid::text, m.changed_seq, NULL, m.paths_json, m.files, NULL, NULL
    FROM scm.mrs m WHERE m.repo_id = %(repo_id)s AND m.state = 'merged'
) AS fact
WHERE changed_seq < %(before_seq)s
  AND NOT EXISTS (
    SELECT FROM scm.patch_blobs p
    WHERE p.repo_id = %(repo_id)s AND p.source_type = fact.source_type AND p.source_id = fact.source_id
      AND p.form <> 'missing')
ORDER BY changed_seq DESC
LIMIT %(limit)s;

-- name: put_patch
-- A patch that is in the artifact store, or why there is none; one that is kept stays.
--
-- It brings the paths of a fact whose source did not list them. That is no change of the fact.
WITH of_commit AS (
    UPDATE scm.git_commits SET files = %(files)s, paths_json = %(paths)s
    WHERE repo_id = %(repo_id)s AND commit_sha = %(source_id)s AND %(source_type)s = 'git'
      AND files IS NULL AND %(files)s::int IS NOT NULL
), of_mr AS (
    UPDATE scm.mrs SET files = %(files)s, paths_json = %(paths)s
    WHERE repo_id = %(repo_id)s AND mr_iid::text = %(source_id)s AND %(source_type)s = 'mr'
      AND files IS NULL AND %(files)s::int IS NOT NULL
)
INSERT INTO scm.patch_blobs AS p
    (repo_id, source_type, source_id, uri, artifact_key, sha256, size_bytes, form, last_error)
VALUES (%(repo_id)s, %(source_type)s, %(source_id)s, %(uri)s, %(artifact_key)s, %(sha256)s, %(size_bytes)s,
        %(form)s, %(last_error)s)
ON CONFLICT (repo_id, source_type, source_id) DO UPDATE
SET uri = EXCLUDED.uri, artifact_key = EXCLUDED.artifact_key, sha256 = EXCLUDED.sha256,
    size_bytes = EXCLUDED.size_bytes, form = EXCLUDED.form, last_error = EXCLUDED.last_error,
    attempts = p.attempts + 1, updated_at = now()
WHERE p.form = 'missing'
RETURNING form;

-- name: status
-- How every repository stands: its last run, its rows, what is skipped or without its patch.
SELECT r.repo_id, r.project_key, r.kind, r.url, r.locked_by,
       last.status, last.finished_at, last.started_at, last.error,
       done.finished_at AS synced_at,
       EXTRACT(epoch FROM now() - done.finished_at)::float8 AS lag_seconds,
       (SELECT count(*) FROM scm.git_commits c WHERE c.repo_id = r.repo_id)
         + (SELECT count(*) FROM scm.svn_revisions s WHERE s.repo_id = r.repo_id)
         + (SELECT count(*) FROM scm.mrs m WHERE m.repo_id = r.repo_id) AS facts,
       (SELECT count(*) FROM scm.patch_blobs p WHERE p.repo_id = r.repo_id AND p.uri <> '') AS patches,
       (SELECT count(*) FROM scm.patch_blobs p WHERE p.repo_id = r.repo_id AND p.form = 'missing') AS missing,
       (SELECT count(*) FROM scm.skipped k WHERE k.repo_id = r.repo_id) AS skipped
FROM scm.repos r
LEFT JOIN LATERAL (
    SELECT * FROM scm.sync_runs s WHERE s.repo_id = r.repo_id ORDER BY run_id DESC LIMIT 1) AS last ON true
LEFT JOIN LATERAL (
    SELECT finished_at FROM scm.sync_runs s WHERE s.repo_id = r.repo_id AND s.status = 'done'
    ORDER BY run_id DESC LIMIT 1) AS done ON true
ORDER BY r.repo_id;
