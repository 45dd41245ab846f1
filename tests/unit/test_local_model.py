"""The embedding model, as a process sees it that embeds for months."""

from __future__ import annotations

from pathlib import Path

from engram.search.embeddings import embed_locally


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


def test_it_keeps_nothing_of_what_it_has_embedded() -> None:
    def embed(kind: str, batches: int) -> None:
        for n in range(batches):
            embed_locally([f"{kind} {n}, part {part}: who may settle row {n * part}?" for part in range(30)])

    embed("warm-up", 20)
    before = _resident_bytes()
    embed("text", 250)
    assert _resident_bytes() - before < 6 << 20
