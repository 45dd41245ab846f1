"""What the machine needs of a queue. The rows are the truth; a queue only says that there is work.

A task that is put twice, taken twice or settled twice does no harm: the row
decides whether it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece of the queue. `task_id` None: it is not one of ours and stands for nothing."""

    id: str
    task_id: UUID | None


@dataclass(frozen=True, slots=True)
class Death:
    """What is told of a dead task, with all that is needed to try it again."""

    task_id: UUID
    attempt_count: int
    error: str


@dataclass(frozen=True, slots=True)
class Done:
    """An entry that nobody needs any more; `death` if its task died."""

    id: str
    death: Death | None = None


class Queue(Protocol):
    """`is_told_by_rows`: who makes or retries a task tells it in the same transaction.

    `keeps_entries`: an entry stays until its task is final. If not, it is done with as soon
    as the row has taken note, and a task that is to be retried gets an entry of its own.
    """

    is_told_by_rows: bool
    keeps_entries: bool

    async def put(self, task_ids: Sequence[UUID]) -> list[str]:
        """Put tasks on the queue; their entries, in the order given."""
        ...

    async def take(self, consumer: str, count: int, wait_seconds: float) -> list[Entry]:
        """New entries for this consumer, waiting so long for the first."""
        ...

    async def measure(self) -> int:
        """Set the gauges of what is on the queue."""
        ...

    async def settle(self, done: Sequence[Done]) -> int:
        """Take entries off the queue; how many deaths were told."""
        ...
