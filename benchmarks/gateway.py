"""Storing and querying through the gateway, against a bare composite with the same commits and calls.

Both are servers of their own over the same PostgreSQL and the same kind of
memory server, asked over REST and over MCP (2026-07-28), by one connection and
by sixteen. The client is a few lines of asyncio, so that it costs little.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.deliver import memory_server
from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from engram.embedded import EmbeddedPostgres
from engram.kernel.settings import Settings
from engram.supervisor import as_environment
from engram.web.sockets import free_port

REQUESTS = {1: 300, 16: 1200}
FILLED = 500
_numbers = itertools.count()
_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


def request_of(way: str, tool: str, arguments: dict[str, Any]) -> bytes:
    """The whole request as bytes; `way` is rest or mcp."""
    if way == "rest":
        path, body, extra = tool.replace("memory_", "/memory/"), arguments, ""
    else:
        params = {"name": tool, "arguments": arguments, "_meta": _META}
        path, body = "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        extra = f"mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: {tool}\r\n"
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"accept: application/json, text/event-stream\r\n{extra}content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def arguments_of(tool: str) -> dict[str, Any]:
    n = next(_numbers)
    if tool == "memory_store":
        return {"payload_md": f"Fact {n}: the webhook of service {n % 97} is retried {n % 13} times."}
    return {"query": f"webhook of service {n % 97}"}


async def _one_connection(port: int, requests: Iterator[bytes], expected: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    done = 0
    for raw in requests:
        writer.write(raw)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if b" 200 " not in head.split(b"\r\n")[0] or expected not in body:
            raise SystemExit(f"unexpected answer: {head[:200]!r} {body[:300]!r}")
        done += 1
    writer.close()
    return done


async def _load(port: int, way: str, tool: str, connections: int, count: int, expected: bytes) -> float:
    requests = iter([request_of(way, tool, arguments_of(tool)) for _ in range(count)])
    started = time.perf_counter()
    done = await asyncio.gather(*(_one_connection(port, requests, expected) for _ in range(connections)))
    if sum(done) != count:
        raise SystemExit(f"{sum(done)} of {count} answered")
    return count / (time.perf_counter() - started)


def load(port: int, way: str, tool: str, connections: int, expected: bytes = b'"ok":true') -> float:
    return asyncio.run(_load(port, way, tool, connections, REQUESTS[connections], expected))


@contextmanager
def serving(command: list[str], port: int, env: dict[str, str] | None = None) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, *command], env=env)
    try:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def engram(dsn: str, reached: Settings) -> Iterator[int]:
    settings = replace(reached, postgres_dsn=dsn, gateway_port=free_port(), log_level="error")
    with serving(["-m", "engram", "serve"], settings.gateway_port, as_environment(settings)) as port:
        yield port


@contextmanager
def composite(dsn: str, reached: Settings) -> Iterator[int]:
    arguments = [dsn, reached.openmemory_base_url or "", reached.openmemory_api_key or "", str(free_port())]
    with serving(["-m", "benchmarks.bare.composite_server", *arguments], int(arguments[-1])) as port:
        yield port


@contextmanager
def filled(server: EmbeddedPostgres, name: str, side: Any) -> Iterator[int]:
    """A side with its own database and memory server, some memories in it."""
    with (
        fresh_database(server, f"bench_{name}") as dsn,
        memory_server(server, f"bench_memory_{name}") as reached,
        side(dsn, reached) as port,
    ):
        asyncio.run(_load(port, "rest", "memory_store", 16, FILLED, b'"ok":true'))
        yield port


def stored_and_queried(server: EmbeddedPostgres) -> dict[int, float]:
    """Prints the ratios; engram's stores a second over REST, by connections.

    Both sides are up all the time and take turns every second or so: a slow minute hits both.
    """
    stores = {}
    with filled(server, "bare", composite) as bare, filled(server, "engram", engram) as ours:
        for tool, way, connections in itertools.product(
            ("memory_store", "memory_query"), ("rest", "mcp"), REQUESTS
        ):
            measured = alternate(
                bare=partial(load, bare, way, tool, connections),
                engram=partial(load, ours, way, tool, connections),
            )
            name = f"{tool} {way} x{connections}"
            for side, values in measured.items():
                told(f"{side} {name}", values, "/s")
            verdict(name, median(measured["engram"]) / median(measured["bare"]), 0.75)
            if (tool, way) == ("memory_store", "rest"):
                stores[connections] = median(measured["engram"])
    return stores


def deferred(server: EmbeddedPostgres) -> dict[int, float]:
    """Stores while the breaker is open: nobody listens where the memory server was."""
    found = {}
    with fresh_database(server) as dsn:
        gone = replace(Settings.load({}), openmemory_base_url=f"http://127.0.0.1:{free_port()}")
        with engram(dsn, gone) as port:
            asyncio.run(_load(port, "rest", "memory_store", 16, 100, b'"deferred"'))
            for connections in REQUESTS:
                found[connections] = load(port, "rest", "memory_store", connections, b'"deferred"')
    return found


def main() -> None:
    print("gateway: memory_store and memory_query over REST and MCP, requests/s")
    with database_server() as server:
        stored = stored_and_queried(server)
        parked = [deferred(server) for _ in range(3)]
    for connections in REQUESTS:
        values = [run[connections] for run in parked]
        told(f"deferred, breaker open x{connections}", values, "/s")
        verdict(f"deferred against stored x{connections}", median(values) / stored[connections], 1.0)


if __name__ == "__main__":
    main()
