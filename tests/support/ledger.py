"""What the client saw, written to a file outside engram; the verdict compares it with the facts.

The facts are the memory server's own table and engram's own rows, never
engram's counters.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from engram.postgres.pool import connect


@dataclass
class Ledger:
    """May be written by many threads at once."""

    path: Path
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def store(self, url: str, text: str, **arguments: Any) -> dict[str, Any] | None:
        """One store through the gateway; None when no reply came."""
        self._note({"sent": text})
        return self._called(url, "memory_store", {"payload_md": text, **arguments}, text)

    def sent(self, text: str) -> None:
        """Note a write that did not go through the gateway."""
        self._note({"sent": text})

    def forget(self, url: str, text: str, **arguments: Any) -> dict[str, Any] | None:
        """One forget of the memory that `text` was stored as; None when no reply came."""
        self._note({"forgetting": text})
        return self._called(url, "memory_forget", arguments, text)

    def _called(self, url: str, tool: str, arguments: dict[str, Any], text: str) -> dict[str, Any] | None:
        call = {"tool": tool, "arguments": arguments}
        try:
            reply = httpx2.post(f"{url}/mcp", json=call, trust_env=False, timeout=30).json()
        except httpx2.HTTPError as error:
            self._note({"text": text, "lost": type(error).__name__})
            return None
        self._note({"text": text, "reply": reply})
        return dict(reply)

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]

    def _note(self, entry: dict[str, Any]) -> None:
        with self._writing, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()

    def _asked_to_go(self) -> set[str]:
        """Whether it went depends on the reply: without one, both are right."""
        return {entry["forgetting"] for entry in self.entries() if "forgetting" in entry}

    def _gone(self) -> set[str]:
        return {entry["text"] for entry in self.entries() if entry.get("reply", {}).get("forgotten")}

    def verdict(self, dsn: str, contents: list[str]) -> list[str]:
        """Everything that is wrong; empty when every promise was kept."""
        kept = Counter(contents)
        sent = {entry["sent"] for entry in self.entries() if "sent" in entry}
        wrong = [f"{text!r} is in the memory server {n} times" for text, n in kept.items() if n > 1]
        wrong += [f"{text!r} was never sent" for text in kept if text not in sent]
        wrong += [f"{text!r} was forgotten and is there" for text in kept if text in self._gone()]
        for entry in self.entries():
            action = entry.get("reply", {}).get("action")
            if entry.get("text") in self._asked_to_go():
                continue
            if action in ("allow", "redirect", "deferred") and entry["text"] not in kept:
                wrong.append(f"{entry['text']!r} was answered {action} and is not there")
        return wrong + _invariants(dsn, kept, sent)


def _invariants(dsn: str, kept: Counter[str], sent: set[str]) -> list[str]:
    with connect(dsn) as connection:
        audits = connection.execute("SELECT action, status FROM governance.write_audit").fetchall()
        outbox = connection.execute("SELECT status, payload_md FROM logbook.outbox_memory").fetchall()
        memories = connection.execute("SELECT state, payload_md FROM logbook.memories").fetchall()
    redirects = sum(a["action"] == "redirect" for a in audits)
    wrong = []
    if redirects != len(outbox):
        wrong.append(f"{redirects} redirects, {len(outbox)} outbox rows")
    wrong += [f"an audit is still pending: {a}" for a in audits if a["status"] == "pending"]
    wrong += [f"an outbox row is still pending: {o}" for o in outbox if o["status"] == "pending"]
    live = [m for m in memories if m["state"] != "forgotten"]
    wrong += [f"{m['payload_md']!r} is {m['state']}, not stored" for m in live if m["state"] != "stored"]
    ours = [m["payload_md"] for m in live if m["payload_md"] in sent]
    wrong += [f"{text!r} is stored and not there" for text in ours if text not in kept]
    known = {m["payload_md"] for m in live}
    wrong += [f"engram does not know {text!r}" for text in kept if text not in known]
    return wrong
