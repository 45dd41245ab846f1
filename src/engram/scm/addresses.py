"""What may be followed: the address of a repository, checked before any program sees it.

A password in an address would end up in the database and in logs, so it is
refused; so is anything that git or svn would take for an option or a command.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from engram.kernel.content import why_unstorable
from engram.kernel.errors import InputError

KINDS = ("git", "svn", "gitlab")
_SCHEMES = {
    "git": ("file", "git", "http", "https", "ssh"),
    "svn": ("file", "svn", "svn+ssh", "http", "https"),
    "gitlab": ("http", "https"),
}
MAX_CHARS = 2_048
# user@host:path, as git takes it beside URLs.
_SCP = re.compile(r"(?:[\w.~-]+@)?(?P<host>[A-Za-z0-9][\w.-]*):(?P<path>[^:].*)")


def address(given: str, kind: str | None = None) -> tuple[str, str]:
    """The kind and the address of a repository; a path becomes absolute. `InputError` says why not."""
    problem = _why_hostile(given)
    if problem:
        raise _refused(problem)
    found = kind or _kind_of(given)
    if found not in KINDS:
        raise _refused("does not say what it is", hint=f"give --kind, one of {', '.join(KINDS)}")
    return found, _checked(given, found)


def _why_hostile(given: str) -> str | None:
    if not given.strip() or given != given.strip() or len(given) > MAX_CHARS:
        return f"must be 1 to {MAX_CHARS} characters without spaces around them"
    if any(ord(c) < 32 or ord(c) == 127 for c in given) or why_unstorable(given):
        return "must not hold control characters"
    if given.startswith("-"):
        return "must not start with a dash"
    if "::" in given.partition("/")[0]:
        return "must not name a helper program"
    return None


def _kind_of(given: str) -> str | None:
    path = Path(given).expanduser()
    if "://" not in given and path.exists():
        return "svn" if (path / "db").is_dir() and (path / "format").is_file() else "git"
    scheme = given.partition("://")[0] if "://" in given else ""
    if scheme in ("svn", "svn+ssh"):
        return "svn"
    host = urlsplit(given).hostname or ""
    if given.endswith(".git") or scheme in ("git", "ssh") or (_SCP.fullmatch(given) and not scheme):
        return "git"
    return "gitlab" if host.startswith("gitlab.") else None


def _checked(given: str, kind: str) -> str:
    if "://" not in given:
        return _local_or_scp(given, kind)
    parts = urlsplit(given)
    if parts.scheme not in _SCHEMES[kind]:
        raise _refused(f"has the scheme {parts.scheme!r}; {kind} takes {', '.join(_SCHEMES[kind])}")
    if parts.password or (parts.username and parts.scheme in ("http", "https")):
        raise _refused(
            "must not hold a user name or password",
            hint="keep it with git's credential helper, svn's own store, or GITLAB_TOKEN",
        )
    if (parts.hostname or "").startswith("-") or (parts.scheme != "file" and not parts.hostname):
        raise _refused("has no host")
    if parts.query or parts.fragment:
        raise _refused("must not have a query or a fragment")
    return given.rstrip("/")


def _local_or_scp(given: str, kind: str) -> str:
    path = Path(given).expanduser()
    if path.exists():
        return path.resolve().as_uri() if kind == "svn" else str(path.resolve())
    if kind == "git" and _SCP.fullmatch(given):
        return given
    raise _refused("is neither a URL nor a folder that exists")


def _refused(problem: str, *, hint: str | None = None) -> InputError:
    return InputError(f"the address {problem}", hint=hint, fields={"url": problem})
