"""Who is calling, and what they may do.

With tokens the caller is the token's owner, and an argument that names somebody
else is refused. Without tokens (loopback only) the caller is whoever the
argument says, and may do everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engram.gateway.spaces import Space
from engram.kernel.errors import Forbidden, Unauthenticated

READ, WRITE, ADMIN = "read", "write", "admin"
SCOPES = (READ, WRITE, ADMIN)
DEFAULT_ACTOR = "local"


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
        """Private memory is its actor's alone."""
        if not space.shared:
            return space.name == self.actor
        return self.shared_spaces is None or str(space) in self.shared_spaces

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
        raise Unauthenticated("this call needs a token", hint="send Authorization: Bearer <token>")
    if actor_user_id is None or actor_user_id == caller.actor:
        return caller
    if caller.verified:
        raise Forbidden(
            f"this token acts for {caller.actor} and for nobody else",
            hint="leave actor_user_id out",
        )
    return replace(caller, actor=actor_user_id)
