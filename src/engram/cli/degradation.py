"""The specification's test of a failing memory server: taken away, written to, brought back, delivered.

Every step is checked from outside: in the database's own rows and through the
memory server's own API. The memory is one of `private:engram-verify` and is
forgotten afterwards, whatever happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from engram.assembly.parts import open_client
from engram.cli.memory import call_tool
from engram.cli.outage import Bench, awaited
from engram.gateway.openmemory_client import Memory
from engram.kernel.content import payload_sha
from engram.kernel.errors import EngramError
from engram.kernel.logs import redact
from engram.logbook import governance, outbox
from engram.logbook.config import Config
from engram.logbook.connection import close

ACTOR = "engram-verify"
SPACE = f"private:{ACTOR}"
DELIVER_SECONDS = 60.0
ERASE_SECONDS = 20.0
_FLUSHED = ("outbox_flush_success", "outbox_flush_dedup_hit")


class CheckFailed(Exception):
    """What was seen is not what was promised."""


@dataclass(frozen=True, slots=True)
class Step:
    """`seen` is what was seen, or why it failed."""

    name: str
    passed: bool
    seen: str
    milliseconds: float


@dataclass
class Degradation:
    bench: Bench
    _reply: dict[str, Any] = field(default_factory=dict)
    _row: dict[str, Any] = field(default_factory=dict)
    _away: bool = False

    def __post_init__(self) -> None:
        self._config = Config(postgres_dsn=self.bench.stack.dsn)
        self._text = f"engram verify {secrets.token_hex(8)}: a write while the memory server is away."

    def run(self) -> Iterator[Step]:
        """Step by step, up to the first that fails."""
        plan = {
            "the memory server answers": self._answers,
            "the memory server is taken away": self._taken_away,
            "memory_store is deferred": self._deferred,
            "the outbox has it": self._parked,
            "memory_query finds it, degraded": self._found,
            "the memory server is brought back": self._brought_back,
            "the outbox worker delivers it": self._delivered,
            "the memory server has it once": self._there_once,
            "the audit tells it all": self._audited,
            "every invariant holds": self._invariants,
            "the memory is forgotten": self._forgotten,
        }
        try:
            for name, check in plan.items():
                step = _checked(name, check)
                yield step
                if not step.passed:
                    return
        finally:
            self._clean_up()

    def _answers(self) -> str:
        awaited(self.bench, there=True)
        return f"the gateway at {self.bench.gateway_url} reaches it"

    def _taken_away(self) -> str:
        self._away = True
        self.bench.take_away()
        awaited(self.bench, there=False)
        return self.bench.how

    def _deferred(self) -> str:
        self._reply = reply = self._call("memory_store", payload_md=self._text, target_space=SPACE)
        expected = {"ok": False, "action": "deferred", "space_written": None, "memory_id": None}
        wrong = {name: reply.get(name) for name, value in expected.items() if reply.get(name) != value}
        _require(not wrong, f"the reply has {wrong}")
        _require(isinstance(reply.get("outbox_id"), int), "the reply has no outbox_id")
        _require(bool(reply.get("correlation_id")), "the reply has no correlation_id")
        return f"outbox_id {reply['outbox_id']}, correlation_id {reply['correlation_id']}"

    def _parked(self) -> str:
        row = self._fetched()
        _require(row["target_space"] == SPACE and row["payload_md"] == self._text, "the row is another's")
        if row["status"] == "sent" and self.bench.others_deliver:
            return "a worker that has the memory server delivered it already"
        _require(row["status"] == "pending", f"the row is {row['status']}, not pending")
        return f"pending, last_error: {row['last_error']}"

    def _found(self) -> str:
        reply = self._call("memory_query", query=self._text, spaces=[SPACE])
        found = [result for result in reply["results"] if result["content"] == self._text]
        _require(reply["degraded"] is True, "the reply does not say degraded")
        _require(len(found) == 1, f"found {len(found)} times")
        return f"1 of {reply['total']} result(s), degraded: true"

    def _brought_back(self) -> str:
        self._bring_back()
        awaited(self.bench, there=True)
        return "the gateway reaches it again"

    def _delivered(self) -> str:
        give_up = time.monotonic() + DELIVER_SECONDS
        while True:
            said = self._flush(give_up - time.monotonic())
            self._row = self._fetched()
            if self._row["status"] != "pending":
                break
            _require(time.monotonic() < give_up, f"not after {DELIVER_SECONDS:.0f} s; {self._waiting()}")
            time.sleep(0.2)
        _require(
            self._row["status"] == "sent", f"the row is {self._row['status']}: {self._row['last_error']}"
        )
        return f"sent as {self._row['memory_id']}; --once said {said}"

    def _there_once(self) -> str:
        copies = self._copies()
        _require(copies == [self._row["memory_id"]], f"it has {len(copies)}: {copies}")
        return f"{copies[0]}, with its space and hash"

    def _audited(self) -> str:
        audits = governance.query_write_audit(
            correlation_id=self._reply["correlation_id"], config=self._config
        )
        told = [f"{audit['action']} ({audit['reason']})" for audit in reversed(audits)]
        _require(all(audit["status"] != "pending" for audit in audits), f"one has no end: {told}")
        parked = [audit for audit in audits if audit["action"] == "redirect"]
        sent = [audit for audit in audits if audit["reason"] in _FLUSHED]
        _require(len(parked) == len(sent) == 1, f"not one parking and one delivery: {told}")
        _require(str(parked[0]["reason"]).startswith("openmemory_write_failed:"), f"another reason: {told}")
        refs = parked[0]["evidence_refs_json"]
        _require(refs.get("outbox_id") == self._reply["outbox_id"], "it names another outbox row")
        correlation_id = refs.get("extra", {}).get("correlation_id")
        _require(correlation_id == self._reply["correlation_id"], "it has another correlation_id")
        return ", ".join(told)

    def _invariants(self) -> str:
        sums = governance.invariants(self._config)
        broken = [f"{row['name']}: {row['left']} and {row['right']}" for row in sums if not row["ok"]]
        _require(bool(sums) and not broken, "; ".join(broken) or "there are none")
        return f"all {len(sums)}"

    def _forgotten(self) -> str:
        self._forget()
        give_up = time.monotonic() + ERASE_SECONDS
        while copies := self._copies():
            _require(time.monotonic() < give_up, f"the memory server still has {copies}")
            time.sleep(0.2)
        return "here and in the memory server"

    def _call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return call_tool(tool, {**arguments, "actor_user_id": ACTOR}, self.bench.gateway_url)

    def _fetched(self) -> dict[str, Any]:
        row = outbox.get(self._reply["outbox_id"], self._config)
        _require(row is not None, "there is no such row")
        return row or {}

    def _flush(self, seconds: float) -> str:
        """The specification's own command; it delivers whatever is due, not only this."""
        with subprocess.Popen(
            [sys.executable, "-m", "engram.gateway.outbox_worker", "--once"],
            env=self.bench.stack.environment,
            cwd=self.bench.stack.settings.data_dir,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as worker:
            try:
                told, complained = worker.communicate(timeout=max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                worker.terminate()  # it hands its leases back
                worker.communicate()
                raise CheckFailed(f"--once did not come to its end in time; {self._waiting()}") from None
        said = told.strip() or complained.strip()[-300:]
        _require(worker.returncode == 0, f"--once ended with {worker.returncode}: {said}")
        return said

    def _waiting(self) -> str:
        return f"{outbox.stats(self._config)['pending']} row(s) wait"

    def _copies(self) -> list[str]:
        memory = Memory(self._text, SPACE, payload_sha(self._text), idempotency_key="")

        async def look() -> list[str]:
            async with open_client(self.bench.memory_server) as client:
                return await client.copies(memory)

        return asyncio.run(look())

    def _bring_back(self) -> None:
        if self._away:
            self._away = False
            self.bench.bring_back()

    def _forget(self) -> None:
        named = {name: self._reply[name] for name in ("outbox_id", "memory_id") if self._reply.get(name)}
        if named:
            self._call("memory_forget", **named, reason="it was a test")
            self._reply = {}

    def _clean_up(self) -> None:
        """As far as it goes: a step that failed is told already."""
        with contextlib.suppress(EngramError, OSError):
            self._bring_back()
        with contextlib.suppress(EngramError):
            self._forget()
        close(self._config)


def _checked(name: str, check: Callable[[], str]) -> Step:
    begun = time.monotonic()
    try:
        passed, seen = True, check()
    except (CheckFailed, EngramError, httpx2.HTTPError, OSError) as error:
        passed, seen = False, redact(str(error) or type(error).__name__)
    return Step(name, passed, seen, round((time.monotonic() - begun) * 1000, 1))


def _require(held: bool, failed: str) -> None:
    if not held:
        raise CheckFailed(failed)
