-- Facts of source control: commits, revisions, merge requests and their patches.
-- `changed_seq` grows with every change of a row; whoever follows the facts keeps
-- the last one it has seen. A candidate that comes from a fact is kept once.
CREATE SCHEMA scm;

CREATE SEQUENCE scm.changed_seq;
CREATE SEQUENCE scm.lease_tokens;

CREATE TABLE scm.repos (
    repo_id       bigserial PRIMARY KEY,
    project_key   text NOT NULL,
    kind          text NOT NULL,
    url           text NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    locked_by     text,
    locked_at     timestamptz,
    lease_seconds integer,
    lease_token   bigint,
    CONSTRAINT repos_kind_known CHECK (kind IN ('git', 'svn', 'gitlab')),
    CONSTRAINT repos_lease_whole CHECK (num_nulls(locked_by, locked_at, lease_seconds) IN (0, 3)),
    CONSTRAINT repos_once UNIQUE (project_key, kind, url)
);

CREATE TABLE scm.git_commits (
    repo_id         bigint NOT NULL REFERENCES scm.repos,
    commit_sha      text NOT NULL,
    parents         text[] NOT NULL,
    author_name     text NOT NULL,
    author_email    text NOT NULL,
    authored_at     timestamptz,
    committer_name  text NOT NULL,
    committer_email text NOT NULL,
    committed_at    timestamptz,
    message         text NOT NULL,
    files           integer,
    additions       bigint,
    deletions       bigint,
    paths_json      jsonb NOT NULL DEFAULT '[]',
    bulk_reason     text,
    superseded      boolean NOT NULL DEFAULT false,
    pass            bigint NOT NULL,
    changed_seq     bigint NOT NULL,
    PRIMARY KEY (repo_id, commit_sha),
    CONSTRAINT commits_sha_is_hex CHECK (commit_sha ~ '^[0-9a-f]+$' AND length(commit_sha) IN (40, 64))
);
CREATE INDEX commits_by_change ON scm.git_commits (repo_id, changed_seq);

CREATE TABLE scm.svn_revisions (
    repo_id      bigint NOT NULL REFERENCES scm.repos,
    rev_num      bigint NOT NULL,
    author_name  text,
    committed_at timestamptz,
    message      text NOT NULL,
    files        integer NOT NULL,
    paths_json   jsonb NOT NULL DEFAULT '[]',
    bulk_reason  text,
    changed_seq  bigint NOT NULL,
    PRIMARY KEY (repo_id, rev_num),
    CONSTRAINT revisions_count_from_one CHECK (rev_num > 0)
);
CREATE INDEX revisions_by_change ON scm.svn_revisions (repo_id, changed_seq);

CREATE TABLE scm.mrs (
    repo_id          bigint NOT NULL REFERENCES scm.repos,
    mr_iid           bigint NOT NULL,
    state            text NOT NULL,
    title            text NOT NULL,
    description      text NOT NULL,
    author_name      text NOT NULL,
    source_branch    text NOT NULL,
    target_branch    text NOT NULL,
    merge_commit_sha text,
    web_url          text NOT NULL,
    created_at       timestamptz,
    updated_at       timestamptz,
    merged_at        timestamptz,
    files            integer,
    paths_json       jsonb NOT NULL DEFAULT '[]',
    changed_seq      bigint NOT NULL,
    PRIMARY KEY (repo_id, mr_iid)
);
CREATE INDEX mrs_by_change ON scm.mrs (repo_id, changed_seq);

CREATE TABLE scm.patch_blobs (
    repo_id      bigint NOT NULL REFERENCES scm.repos,
    source_type  text NOT NULL,
    source_id    text NOT NULL,
    uri          text NOT NULL DEFAULT '',
    artifact_key text,
    sha256       text,
    size_bytes   bigint,
    form         text NOT NULL,
    attempts     integer NOT NULL DEFAULT 1,
    last_error   text,
    updated_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (repo_id, source_type, source_id),
    CONSTRAINT patches_form_known CHECK (form IN ('diff', 'diffstat', 'none', 'missing')),
    CONSTRAINT patches_uri_has_bytes CHECK (
        (uri <> '') = (form IN ('diff', 'diffstat'))
        AND num_nulls(artifact_key, sha256, size_bytes) = CASE WHEN uri <> '' THEN 0 ELSE 3 END)
);
CREATE INDEX patches_missing ON scm.patch_blobs (repo_id) WHERE form = 'missing';

CREATE TABLE scm.skipped (
    repo_id     bigint NOT NULL REFERENCES scm.repos,
    source_type text NOT NULL,
    source_id   text NOT NULL,
    reason      text NOT NULL,
    tries       integer NOT NULL DEFAULT 1,
    first_at    timestamptz NOT NULL DEFAULT now(),
    last_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (repo_id, source_type, source_id)
);

CREATE TABLE scm.sync_runs (
    run_id      bigserial PRIMARY KEY,
    repo_id     bigint NOT NULL REFERENCES scm.repos,
    mode        text NOT NULL,
    status      text NOT NULL DEFAULT 'running',
    started_at  timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    read        bigint NOT NULL DEFAULT 0,
    written     bigint NOT NULL DEFAULT 0,
    skipped     bigint NOT NULL DEFAULT 0,
    superseded  bigint NOT NULL DEFAULT 0,
    error       text,
    CONSTRAINT runs_mode_known CHECK (mode IN ('strict', 'best_effort')),
    CONSTRAINT runs_status_known CHECK (status IN ('running', 'done', 'failed', 'abandoned')),
    CONSTRAINT runs_end_when_finished CHECK ((finished_at IS NULL) = (status = 'running'))
);
CREATE INDEX runs_by_repo ON scm.sync_runs (repo_id, run_id);

ALTER TABLE analysis.knowledge_candidates ADD COLUMN source_ref text;
CREATE UNIQUE INDEX candidates_by_source ON analysis.knowledge_candidates (target_space, source_ref)
    WHERE source_ref IS NOT NULL;
