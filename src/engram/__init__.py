"""engram: the durable back end for AI agents.

Governed memory, document knowledge and sandboxes, in which no write is lost,
doubled or unaccounted for. Start reading at `docs/architecture.md`.
"""

__version__ = "0.1.0"
