"""What the client saw, written to a file outside engram; the verdict compares it with the facts.

The facts are the memory server's own table and engram's own rows, never
engram's counters.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from engram.postgres.pool import connect


@dataclass
class Ledger:
    path: Path

    def store(self, url: str, text: str, **arguments: Any) -> dict[str, Any] | None:
        """One store through the gateway; None when no reply came."""
        self._note({"sent": text})
        call = {"tool": "memory_store", "arguments": {"payload_md": text, **arguments}}
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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()

    def verdict(self, dsn: str, contents: list[str]) -> list[str]:
        """Everything that is wrong; empty when every promise was kept."""
        kept = Counter(contents)
        sent = {entry["sent"] for entry in self.entries() if "sent" in entry}
        wrong = [f"{text!r} is in the memory server {n} times" for text, n in kept.items() if n > 1]
        wrong += [f"{text!r} was never sent" for text in kept if text not in sent]
        for entry in self.entries():
            action = entry.get("reply", {}).get("action")
            if action in ("allow", "redirect", "deferred") and entry["text"] not in kept:
                wrong.append(f"{entry['text']!r} was answered {action} and is not there")
        return wrong + _invariants(dsn, kept)


def _invariants(dsn: str, kept: Counter[str]) -> list[str]:
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
    wrong += [f"{m['payload_md']!r} is {m['state']}, not stored" for m in memories if m["state"] != "stored"]
    wrong += [
        f"engram does not know {text!r}" for text in kept if text not in {m["payload_md"] for m in memories}
    ]
    return wrong
