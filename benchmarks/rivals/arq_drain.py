"""arq draining no-op jobs: python arq_drain.py REDIS_URL JOBS. Prints jobs per second."""

from __future__ import annotations

import asyncio
import sys
import time

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker


async def noop(context: dict[str, object]) -> int:
    return 1


async def main(url: str, jobs: int) -> None:
    settings = RedisSettings.from_dsn(url)
    pool = await create_pool(settings)
    await pool.flushdb()
    await asyncio.gather(*(pool.enqueue_job("noop") for _ in range(jobs)))
    worker = Worker(
        functions=[noop],
        redis_settings=settings,
        burst=True,
        max_jobs=100,
        poll_delay=0.01,
        handle_signals=False,
        keep_result=0,
    )
    started = time.perf_counter()
    await worker.main()
    print(jobs / (time.perf_counter() - started))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
