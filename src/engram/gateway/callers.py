"""Who is calling, and what they may do.

With tokens the caller is the token's owner, and an argument that names somebody
else is refused. Without tokens (loopback only) the caller is whoever the
argument says, if that can be anybody's name, and may do everything.

A token may be limited to some shared spaces. Outside of them its caller can
neither read nor write; its own private space it always has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engram.gateway.inputs import actor_problem, refuse
from engram.gateway.spaces import Space, parse_space
from engram.kernel.errors import Forbidden, InputError, Unauthenticated

READ, WRITE, ADMIN = "read", "write", "admin"
SCOPES = (READ, WRITE, ADMIN)
DEFAULT_ACTOR = "local"
HOW_TO_SEND = "it goes into the Authorization header, after Bearer; engram's own commands take ENGRAM_TOKEN"


@dataclass(frozen=True, slots=True)
class Caller:
    """`shared_spaces` None: every shared space. `verified`: a token says who it is."""

    actor: str
    scopes: frozenset[str] = frozenset(SCOPES)
    shared_spaces: frozenset[str] | None = None
    verified: bool = False

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    def may_read(self, space: Space) -> bool:
        """Private memory is its actor's alone; shared memory is for whom the token lists it."""
        if not space.shared:
            return space.name == self.actor
        return self.shared_spaces is None or str(space) in self.shared_spaces

    def check_readable(self, spaces: Iterable[str]) -> None:
        """Refuse a call that names a space this caller may not read."""
        for text in spaces:
            if not self.may_read(_parsed(text, "spaces")):
                raise self._refused("read", text)

    def check_writable(self, space: str) -> None:
        """Refuse a call that writes to a space which is not this caller's to write to."""
        if not self.may_read(_parsed(space, "target_space")):
            raise self._refused("write to", space)

    def check_listed(self, space: str) -> None:
        """Refuse a shared space that the token leaves out, and nothing else.

        For writes that governance judges: what is no space at all, or somebody
        else's private one, is the policy's to reject, with an audit.
        """
        found = parse_space(space)
        if found is not None and found.shared and not self.may_read(found):
            raise self._refused("write to", space)

    def readable(self, spaces: Iterable[str]) -> list[str]:
        """Those that this caller may read: for spaces that nobody asked for by name."""
        return [text for text in spaces if self.may_read(_parsed(text, "spaces"))]

    def _refused(self, verb: str, space: str) -> Forbidden:
        own = [f"private:{self.actor}", *sorted(self.shared_spaces or ())]
        return Forbidden(f"{self.actor} may not {verb} {space}", hint=f"use {' or '.join(own)}")

    def allowed(self, scope: str) -> Caller:
        """This caller, if it has the scope."""
        if scope not in self.scopes:
            raise Forbidden(
                f"the token of {self.actor} does not have the scope {scope!r}",
                hint=f"it has {', '.join(sorted(self.scopes)) or 'none'}; an operator can make another",
            )
        return self


# What every request without a token is, where no tokens are configured.
LOCAL = Caller(DEFAULT_ACTOR)


def acting(caller: Caller | None, actor_user_id: str | None) -> Caller:
    """The caller as whom a call acts. None: nobody was recognised, so nothing is allowed."""
    if caller is None:
        raise Unauthenticated("this call needs a token", hint=HOW_TO_SEND)
    if actor_user_id is None or actor_user_id == caller.actor:
        return caller
    if caller.verified:
        raise Forbidden(
            f"this token acts for {caller.actor} and for nobody else",
            hint="leave actor_user_id out",
        )
    refuse({"actor_user_id": actor_problem(actor_user_id)})
    return replace(caller, actor=actor_user_id)


def _parsed(text: str, argument: str) -> Space:
    space = parse_space(text)
    if space is None:
        raise InputError(
            f"{text!r} is no space",
            fields={argument: "must be private:<actor>, team:<project> or org:<name>"},
        )
    return space
