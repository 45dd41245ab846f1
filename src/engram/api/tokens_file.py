"""The tokens file: read when it changes, edited in one piece.

A running gateway looks at the file at most once a second, so a token that was
made works and one that was revoked is refused without a restart. What it does
when the file is not as it should be:

    cannot be parsed, or others may write it   the last good tokens stay, and the log says so:
                                               a slip of the pen locks nobody out, and nothing
                                               from such a file lets anybody in
    gone, or not readable                      nobody may call, until it is back
    without tokens                             nobody may call

At the start each of these is refused.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from engram.api.tokens import Token, parse, sha256_of
from engram.embedded.folders import give_to_owner_of, make_private_folder
from engram.embedded.locks import FileLock
from engram.embedded.waiting import wait_for
from engram.gateway.callers import Caller
from engram.kernel.clock import SYSTEM_CLOCK, Clock
from engram.kernel.errors import ConfigError, Unauthenticated
from engram.kernel.logs import fields

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LOCK_SECONDS = 10.0
# Some seven thousand tokens, read in less than half a second.
MAX_BYTES = 1 << 20

# What tells one state of the file from another.
Identity = tuple[int, int, int, int, int]


class TokensFile:
    """Who a token stands for, now."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = path
        self._clock = clock
        self._tokens: Mapping[str, Token] = {}
        self._identity: Identity | None = None
        self._next_look = clock.monotonic() + LOOK_SECONDS
        hint = "make the first token with `engram token create OWNER`"
        try:
            self._load()
        except OSError as error:
            raise ConfigError(
                f"ENGRAM_TOKENS_FILE: {path} cannot be read: {error.strerror}", hint=hint
            ) from error
        if not self._tokens:
            raise ConfigError(f"ENGRAM_TOKENS_FILE: {path} has no token, so nobody could call", hint=hint)

    def recognise(self, secret: str) -> Caller:
        """The caller whose token this is.

        The token is found by its SHA-256, so no comparison needs to take
        constant time: what the time of a look-up could tell is something about
        the hash of a guess, and nobody can choose guesses by their hash.
        """
        self._look()
        token = self._tokens.get(sha256_of(secret))
        if token is None:
            raise Unauthenticated(
                "this token is not known", hint="it may have been revoked; ask an operator for another"
            )
        if token.expired(self._clock.now()):
            raise Unauthenticated(
                f"this token of {token.owner} has expired", hint="ask an operator for another"
            )
        return token.caller

    def _look(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        try:
            if _identity(self._path.stat()) != self._identity:
                self._load()
                log.info("tokens.read", extra=fields(file=str(self._path), count=len(self._tokens)))
        except OSError as error:
            self._admit_nobody(error)
        except ConfigError as error:
            log.error("tokens.not_read", extra=fields(error=str(error), still_known=len(self._tokens)))

    def _load(self) -> None:
        """The identity is noted first: a file that is wrong is not read again until it changes."""
        found, content = _contents(self._path)
        self._identity = _identity(found)
        _check_access(self._path, found)
        self._tokens = {token.sha256: token for token in parse(_text(self._path, content), str(self._path))}

    def _admit_nobody(self, error: OSError) -> None:
        if self._identity is not None:
            log.error("tokens.gone", extra=fields(file=str(self._path), error=error.strerror))
        self._identity, self._tokens = None, {}


def read(path: Path) -> tuple[Token, ...]:
    """The tokens of a file, for commands; of a missing one, none."""
    return parse(_text_if_any(path), str(path))


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Change the file's text, alone and in one piece, and keep who may read it.

    `change` may be called on the text of a file that does not exist yet: "".
    The lock is a file of its own, because the tokens file is replaced.
    """
    path = path.resolve()
    make_private_folder(path.parent)
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    if not wait_for(lock.make_exclusive, LOCK_SECONDS):
        raise ConfigError(f"{path} is being edited by another command", hint="try again")
    try:
        text = change(_text_if_any(path))
        parse(_text(path, text.encode()), str(path))
        _replace(path, text)
    finally:
        lock.drop()


def _contents(path: Path) -> tuple[os.stat_result, bytes]:
    # Opening a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as handle:
        found = os.fstat(handle.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        return found, handle.read(MAX_BYTES + 1)


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def _check_access(path: Path, found: os.stat_result) -> None:
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path}: others may write it, and so let anybody in", hint=f"chmod go-w {path}")
    if found.st_mode & stat.S_IROTH:
        log.warning("tokens.readable_by_all", extra=fields(file=str(path), hint=f"chmod o-r {path}"))


def _text_if_any(path: Path) -> str:
    try:
        return _text(path, _contents(path)[1])
    except FileNotFoundError:
        return ""


def _text(path: Path, content: bytes) -> str:
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_BYTES} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _replace(path: Path, text: str) -> None:
    """A reader or a crash sees the old text or the new one; a revocation survives a power cut."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as handle:
            handle.write(text)
            handle.flush()
            _keep_access(fd, Path(name), path)
            os.fsync(fd)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _keep_access(fd: int, draft: Path, path: Path) -> None:
    """The owner and mode of the file that is replaced; a new one is for its owner's eyes only."""
    if not path.exists():
        give_to_owner_of(path.parent, draft)
        return
    old, new = path.stat(), os.fstat(fd)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
