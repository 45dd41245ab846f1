"""The story of one write: stored, parked while the memory server is dead, delivered when it is back.

Every step is checked from outside (the memory server's own API, the database's
own rows); the exit code is 0 only if each check held.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from engram.cli.memory import call_tool
from engram.kernel import logs
from engram.kernel.errors import EngramError
from engram.kernel.settings import Settings
from engram.logbook import governance, outbox
from engram.logbook.config import Config
from engram.logbook.connection import close
from engram.supervisor import Stack
from engram.web.sockets import free_port

FIRST = "The payments service retries a webhook three times before it gives up."
SECOND = "Rotate the webhook signing key on the first Monday of each quarter."
PATIENCE_SECONDS = 20.0


class CheckFailed(Exception):
    """A step of the story did not hold."""


def tell() -> int:
    logs.configure("error", "human")
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="engram-demo-") as folder,
        tempfile.TemporaryDirectory(prefix="engram-demo-sandboxes-") as boxes,
    ):
        Path(boxes).chmod(0o711)
        settings = Settings(
            data_dir=Path(folder) / "data",
            sandbox_dir=Path(boxes),
            gateway_port=free_port(),
            breaker_cooldown_seconds=0.5,
            outbox_poll_seconds=0.2,
        )
        try:
            with Stack(settings, alone=True) as stack:
                _say(f"a stack of its own is up on {stack.gateway_url} ({time.monotonic() - started:.1f} s)")
                _Story(stack).tell()
        except (CheckFailed, EngramError) as error:
            print(f"✗ {error}", file=sys.stderr)
            return 1
    _say(f"every step was checked; {time.monotonic() - started:.1f} s in all")
    return 0


class _Story:
    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._config = Config(postgres_dsn=stack.dsn)
        self._server = httpx2.Client(
            base_url=stack.environment["OPENMEMORY_BASE_URL"],
            headers={"x-api-key": stack.environment["OPENMEMORY_API_KEY"]},
            trust_env=False,
        )

    def tell(self) -> None:
        try:
            self._stored()
            outbox_id = self._deferred()
            self._found_while_degraded()
            self._delivered(outbox_id)
            self._accounted_for()
            self._one_sandbox()
        finally:
            self._server.close()
            close(self._config)

    def _stored(self) -> None:
        reply = self._call("memory_store", payload_md=FIRST)
        _check(reply["action"] == "allow", f"the first store was not allowed: {reply}")
        kept = self._server.get(f"/memory/{reply['memory_id']}").json()
        _check(kept.get("content") == FIRST, "the memory server does not have the first memory")
        _say(f"stored a memory; the memory server has it as {reply['memory_id']}")

    def _deferred(self) -> int:
        self._stack.hold_down("memory server")
        _say("killed the memory server with -9")
        reply = self._call("memory_store", payload_md=SECOND)
        _check(reply["action"] == "deferred", f"the second store was not deferred: {reply}")
        row = outbox.get(reply["outbox_id"], self._config)
        _check(row is not None and row["status"] == "pending", "the outbox does not have the second memory")
        _say(f"stored another: deferred, kept in the outbox as {reply['outbox_id']}")
        return int(reply["outbox_id"])

    def _found_while_degraded(self) -> None:
        reply = self._call("memory_query", query="webhook")
        found = {result["content"] for result in reply["results"]}
        _check(reply["degraded"] and {FIRST, SECOND} <= found, f"the degraded query missed one: {reply}")
        _say("asked for both with the memory server dead: degraded, and both are found")

    def _delivered(self, outbox_id: int) -> None:
        self._stack.bring_up("memory server")
        _say("started the memory server again")
        row = _eventually(lambda: self._sent(outbox_id), "the parked memory was not delivered")
        kept = [
            m for m in self._server.get("/memory/all?l=100&u=0").json()["items"] if m["content"] == SECOND
        ]
        _check([m["id"] for m in kept] == [row["memory_id"]], f"delivered {len(kept)} times")
        reply = self._call("memory_query", query="webhook")
        found = {result["content"] for result in reply["results"]}
        _check(not reply["degraded"] and {FIRST, SECOND} <= found, f"the query missed one: {reply}")
        _say(f"the worker delivered it, once, as {row['memory_id']}")

    def _sent(self, outbox_id: int) -> dict[str, Any] | None:
        row = outbox.get(outbox_id, self._config)
        return row if row and row["status"] == "sent" else None

    def _accounted_for(self) -> None:
        sums = governance.invariants(self._config)
        _check(all(row["ok"] for row in sums), f"an invariant does not hold: {sums}")
        outbox_rows = next(row["right"] for row in sums if row["name"] == "redirects equal outbox rows")
        _check(outbox_rows == 1, f"{outbox_rows} outbox rows, not one")
        audits = governance.query_write_audit(config=self._config)
        _check(all(a["status"] != "pending" for a in audits), f"audits without an end: {audits}")
        _say(
            f"in SQL: count(redirect) = count(outbox_memory) = {outbox_rows}; "
            f"all {len(sums)} invariants hold; {len(audits)} audits, none pending"
        )

    def _one_sandbox(self) -> None:
        """The same request twice; where the kernel cannot, that is said, and is no failure."""
        url, key = f"{self._stack.gateway_url}/v1/sandboxes", {"Idempotency-Key": "demo-1"}
        with httpx2.Client(trust_env=False, timeout=30) as http:
            first, again = (http.post(url, json={}, headers=key) for _ in range(2))
            if first.status_code == 503:
                print(f"- {first.json()['message']}", flush=True)
                return
            box = first.json()
            _check(
                (first.status_code, again.json()) == (201, box), f"not one sandbox: {first.text} {again.text}"
            )
            _check(again.headers.get("Idempotency-Replayed") == "true", "the second answer is not a replay")
            listed = http.get(url).json()["sandboxes"]
            _check([one["id"] for one in listed] == [box["id"]], f"{len(listed)} sandboxes, not one")
            said = http.post(f"{url}/{box['id']}/exec", json={"argv": ["echo", "hello"]}).json()
            _check(said.get("stdout") == "hello\n", f"the command did not run: {said}")
            _check(http.delete(f"{url}/{box['id']}").status_code == 204, "the sandbox was not removed")
        _say(f"asked twice for a sandbox with one key: one, {box['id']}; a command ran in it")

    def _call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return call_tool(tool, arguments, self._stack.gateway_url)


def _eventually(look: Callable[[], dict[str, Any] | None], failed: str) -> dict[str, Any]:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    raise CheckFailed(failed)


def _check(held: bool, failed: str) -> None:
    if not held:
        raise CheckFailed(failed)


def _say(text: str) -> None:
    print(f"✓ {text}", flush=True)
