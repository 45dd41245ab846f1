"""Source control becomes facts: git, Subversion and GitLab into the `scm.*` tables.

It knows nothing of memories: it never imports the gateway or the outbox, and a
failure here is its own. What it does not get today it gets at the next sync,
because its watermark moves only together with the rows it stands for.
"""
