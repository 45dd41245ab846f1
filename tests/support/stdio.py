"""`engram mcp` as a client starts it: by the official SDK, or by hand, line by line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

# As a client starts it: by its script, which looks for modules in no working folder.
PROGRAM = [str(Path(sys.executable).with_name("engram")), "mcp"]


@asynccontextmanager
async def client(
    env: Mapping[str, str], log: Path, era: str = "2026-07-28", folder: Path | None = None
) -> AsyncIterator[Client]:
    """The official client; what the process says to people goes to `log`."""
    program, *arguments = PROGRAM
    server = StdioServerParameters(command=program, args=arguments, env=dict(env), cwd=folder)
    with log.open("a", encoding="utf-8") as errors:
        async with Client(stdio_client(server, errors), mode=era) as found:
            yield found


@dataclass
class ByHand:
    """The process itself, with its pipes."""

    process: subprocess.Popen[bytes]
    log: Path

    def say(self, message: dict[str, Any] | bytes) -> None:
        assert self.process.stdin
        line = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def shake_hands(self) -> dict[str, Any]:
        about = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "0"},
        }
        self.say({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about})
        reply = self.hear()
        self.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return reply

    def call(self, number: int, tool: str, **arguments: Any) -> None:
        params = {"name": tool, "arguments": arguments}
        self.say({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})


@contextmanager
def by_hand(env: Mapping[str, str], log: Path, words: list[str] = PROGRAM) -> Iterator[ByHand]:
    with log.open("ab") as errors:
        process = subprocess.Popen(
            words, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    try:
        yield ByHand(process, log)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe and not pipe.closed:
                pipe.close()
