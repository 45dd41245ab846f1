"""`engram mcp`: MCP over standard input and output, for clients that start their servers themselves.

Standard output belongs to the protocol; what is for people goes to standard
error. The process ends when its client goes: it keeps nothing worth waiting for.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from engram.api.stdio import Bridge
    from engram.kernel.settings import Settings

LAST_WORDS_SECONDS = 0.5


def mcp(
    no_start: Annotated[
        bool,
        typer.Option("--no-start", envvar="ENGRAM_NO_START", help="Use a running gateway; never start one."),
    ] = False,
) -> None:
    """Serve MCP on standard input and output; starts `engram up` if nobody answers."""
    import asyncio
    import signal

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    asyncio.run(_serve(_prepared(), may_start=not no_start))


def _prepared() -> Settings:
    from engram.kernel import logs
    from engram.kernel.errors import ConfigError
    from engram.kernel.settings import Settings

    settings = Settings.load()
    logs.configure("warning", settings.log_format)
    logs.hide(settings.token)
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        raise ConfigError("a standard stream is closed", hint="let an MCP client start this command")
    if settings.gateway_port == 0:
        raise ConfigError("GATEWAY_PORT=0 names no gateway", hint="set the port that it listens on")
    if sys.stdin.isatty():
        _told("this is for MCP clients; `engram mcp-config` prints what to give them. Ctrl-D ends it")
    return settings


async def _serve(settings: Settings, *, may_start: bool) -> None:
    import asyncio

    from engram.api.stdio import bridged
    from engram.cli.background import Background

    background = Background(settings, may_start=may_start, tell=_told)
    async with bridged(settings, lambda: asyncio.to_thread(background.ensure)) as bridge:
        looking = asyncio.create_task(_look(bridge))
        try:
            await _speak(bridge)
        except* OSError:
            pass  # standard output broke: nobody is there
        looking.cancel()
        _leave()


async def _look(bridge: Bridge) -> None:
    """Find or start the gateway while the client still shakes hands; calls wait for it."""
    from engram.kernel.errors import EngramError

    try:
        await bridge.find()
    except EngramError as error:
        _told(str(error))


async def _speak(bridge: Bridge) -> None:
    from threading import Timer

    from mcp.server.stdio import stdio_server

    server = bridge.server()
    async with stdio_server() as (incoming, outgoing):
        try:
            await server.run(incoming, outgoing, server.create_initialization_options())
        finally:
            # The reader's thread may sit in a read, and the writer's in a write, that nobody can cancel.
            limit = Timer(LAST_WORDS_SECONDS, _leave)
            limit.daemon = True
            limit.start()


def _told(text: str) -> None:
    with suppress(OSError):
        print(f"engram: {text}", file=sys.stderr, flush=True)


def _leave(*_: object) -> NoReturn:
    os._exit(0)
