"""python -m benchmarks [name ...]: all of them, or the named ones."""

from __future__ import annotations

import importlib
import sys

NAMES = [
    "startup",
    "drain",
    "enqueue",
    "claim",
    "deliver",
    "gateway",
    "memory_server",
    "retrieval",
    "knowledge_search",
    "scm",
    "ingest",
    "kafka",
    "sandboxes",
]

for name in sys.argv[1:] or NAMES:
    importlib.import_module(f"benchmarks.{name}").main()
    print(flush=True)
