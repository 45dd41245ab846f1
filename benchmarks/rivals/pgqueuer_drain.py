from __future__ import annotations

import asyncio
import sys
import time

import asyncpg
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode


async def main(dsn: str, jobs: int) -> None:
    connection = await asyncpg.connect(dsn)
    manager = QueueManager(Queries.from_asyncpg_connection(connection))
    await manager.queries.install()

    @manager.entrypoint("noop")
    async def noop(job: Job) -> None:
        return None

    for start in range(0, jobs, 5000):
        count = min(5000, jobs - start)
        await manager.queries.enqueue(["noop"] * count, [b"fact"] * count, [0] * count)
    started = time.perf_counter()
    await manager.run(mode=QueueExecutionMode.drain, batch_size=500)
    print(jobs / (time.perf_counter() - started))
    await connection.close()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
