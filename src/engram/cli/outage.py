"""Three ways to take the memory server away from a gateway and to bring it back.

nothing runs           a stack of its own in the data folder; its memory server is killed
`engram up` runs       its supervisor stops its memory server, as long as this process lives
anything else runs     a relay in front of the memory server, which is not ours to stop, is cut

In the last two a gateway of its own, on a free port of this machine, works on
the running one's database: it asks for no token, and it can be put behind a relay.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from engram import supervisor
from engram.assembly.addresses import has_memory_server, require_schema, with_memory_server
from engram.cli.relay import Relay
from engram.embedded import running_postgres
from engram.embedded.waiting import wait_for
from engram.kernel.errors import EmbeddedError, GatewayUnavailable
from engram.kernel.settings import Settings
from engram.supervisor import Stack

PATIENCE_SECONDS = 60.0
MEMORY_SERVER, WORKER = "memory-server", "outbox-worker"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """What the test works on. `how` tells people what is done to which memory server.

    `others_deliver`: workers that know nothing of this outage may have the database too.
    """

    stack: Stack
    memory_server: Settings
    how: str
    take_away: Callable[[], None]
    bring_back: Callable[[], None]
    others_deliver: bool = False

    @property
    def gateway_url(self) -> str:
        return self.stack.gateway_url

    def is_there(self) -> bool:
        """Whether the gateway reaches the memory server."""
        told = httpx2.get(f"{self.gateway_url}/readyz", trust_env=False, timeout=30).json()
        return bool(told["capabilities"]["openmemory"] == "ok")


@contextmanager
def own_stack(settings: Settings, say: Say) -> Iterator[Bench]:
    """Everything, on a free port, in the settings' own data folder; with its memory server if that is ours."""
    if settings.postgres_dsn is not None:
        require_schema(settings)
    with ExitStack() as held:
        asked = _for_this_machine(settings)
        relay = None
        if settings.openmemory_base_url is not None:
            relay = held.enter_context(Relay(settings.openmemory_base_url))
            asked = replace(asked, openmemory_base_url=relay.url)
        stack = held.enter_context(Stack(asked, alone=True, on_progress=say))
        others_deliver = settings.postgres_dsn is not None
        if relay is not None:
            yield replace(_behind(relay, stack, settings), others_deliver=others_deliver)
            return
        yield Bench(
            stack,
            with_memory_server(replace(settings, postgres_dsn=stack.dsn)),
            "the memory server of this stack is killed with -9, and its worker stopped",
            lambda: _kill(stack),
            lambda: stack.bring_up("memory server"),
            others_deliver,
        )


@contextmanager
def beside(settings: Settings, folder: Path) -> Iterator[Bench]:
    """A gateway of its own on the database of what is running; `folder` is for its log."""
    found = _addressed(settings)
    require_schema(found)
    with ExitStack() as held:
        own = replace(_for_this_machine(found), data_dir=folder)
        if _is_supervised(settings):
            stack = held.enter_context(Stack(own, alone=True, only=["gateway"]))
            yield _supervised(held, stack, found)
            return
        relay = held.enter_context(Relay(found.openmemory_base_url or ""))
        own = replace(own, openmemory_base_url=relay.url)
        stack = held.enter_context(Stack(own, alone=True, only=["gateway"]))
        yield replace(_behind(relay, stack, found), others_deliver=True)


def _kill(stack: Stack) -> None:
    """The worker stays down: what is delivered then was delivered by the test's own pass."""
    stack.hold_down("outbox worker", signal.SIGTERM)
    stack.hold_down("memory server", signal.SIGKILL)


def _supervised(held: ExitStack, stack: Stack, found: Settings) -> Bench:
    holding = held.enter_context(ExitStack())

    def take_away() -> None:
        held.enter_context(supervisor.held_while(found.data_dir, WORKER))
        holding.enter_context(supervisor.held_while(found.data_dir, MEMORY_SERVER))

    return Bench(
        stack,
        found,
        f"the supervisor of {found.data_dir} stops its memory server and its worker, for everybody",
        take_away,
        holding.close,
    )


def _behind(relay: Relay, stack: Stack, found: Settings) -> Bench:
    return Bench(
        stack,
        found,
        "the memory server is not ours to stop: a relay in front of it is cut, for this test's gateway only",
        relay.cut,
        relay.mend,
    )


def awaited(bench: Bench, there: bool) -> None:
    """Until the gateway has noticed."""
    if not wait_for(lambda: bench.is_there() == there, PATIENCE_SECONDS):
        state = "back" if there else "away"
        raise EmbeddedError(f"the memory server is not {state} after {PATIENCE_SECONDS:.0f} seconds")


def _is_supervised(settings: Settings) -> bool:
    """Whether an `engram up` here runs the memory server that these settings mean."""
    return (
        settings.openmemory_base_url is None
        and supervisor.is_up(settings.data_dir)
        and MEMORY_SERVER in supervisor.roles_of(settings.data_dir)
    )


def _addressed(settings: Settings) -> Settings:
    dsn = settings.postgres_dsn or running_postgres(settings.data_dir)
    if dsn is None:
        raise GatewayUnavailable(
            f"a gateway answers at {settings.gateway_url}, but where its database is, is not known here",
            hint="set POSTGRES_DSN, or ENGRAM_DATA_DIR to its folder",
        )
    if settings.openmemory_base_url is None and not has_memory_server(settings.data_dir):
        raise GatewayUnavailable(
            f"a gateway answers at {settings.gateway_url}, but where its memory server is, is not known here",
            hint="set OPENMEMORY_BASE_URL and OPENMEMORY_API_KEY, or ENGRAM_DATA_DIR to its folder",
        )
    return with_memory_server(replace(settings, postgres_dsn=dsn))


def _for_this_machine(settings: Settings) -> Settings:
    """On loopback, so no token is asked for; and it does not linger over a server that was away."""
    return replace(
        settings,
        gateway_host="127.0.0.1",
        gateway_port=0,
        tokens_file=None,
        breaker_cooldown_seconds=min(settings.breaker_cooldown_seconds, 0.2),
    )
