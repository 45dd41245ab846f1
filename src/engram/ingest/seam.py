"""What the worker and the pipeline say to each other, and nothing else.

The worker owns the task: it starts it, keeps its lease and settles it. The
pipeline owns the document's content: it reads, cuts, embeds and writes it,
and tells the lease how far it is. Neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True)
class Work:
    """One started task. `lease_token` proves the claim to whoever writes for it."""

    task_id: UUID
    document_id: UUID
    owner: str
    title: str
    media_type: str
    artifact_key: str
    lease_token: int


class Lease(Protocol):
    async def progress(self, processed: int, total: int) -> None:
        """Record how many of the document's segments are written. Raises LeaseLost."""
        ...


class Pipeline(Protocol):
    async def ingest(self, work: Work, lease: Lease) -> int:
        """Write the document's segments and return how many there are.

        `DocumentRefused` ends the task at once, `LeaseLost` means it is
        somebody else's by now, and any other error costs one attempt.
        """
        ...
