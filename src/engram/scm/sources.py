"""Which source reads which kind of repository."""

from __future__ import annotations

from pathlib import Path

from engram.scm.git import GitSource
from engram.scm.gitlab import GitLabSource
from engram.scm.source import Source
from engram.scm.store import Repo
from engram.scm.svn import SvnSource
from engram.scm.tries import Tries


def source_of(
    repo: Repo, *, mirrors: Path, silent_seconds: float, gitlab_token: str | None, tries: Tries | None = None
) -> Source:
    tries = tries or Tries()
    if repo.kind == "svn":
        return SvnSource(repo, silent_seconds=silent_seconds, tries=tries)
    if repo.kind == "gitlab":
        return GitLabSource(repo, token=gitlab_token, silent_seconds=silent_seconds, tries=tries)
    return GitSource(repo, mirrors, silent_seconds=silent_seconds, tries=tries)
