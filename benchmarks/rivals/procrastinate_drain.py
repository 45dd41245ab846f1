from __future__ import annotations

import asyncio
import sys
import time

from procrastinate import App, PsycopgConnector


async def main(dsn: str, jobs: int) -> None:
    app = App(connector=PsycopgConnector(conninfo=dsn))

    @app.task(name="noop")
    async def noop() -> None:
        return None

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for start in range(0, jobs, 1000):
            await noop.batch_defer_async(*[{} for _ in range(min(1000, jobs - start))])
        started = time.perf_counter()
        await app.run_worker_async(
            wait=False, concurrency=100, listen_notify=False, install_signal_handlers=False
        )
        print(jobs / (time.perf_counter() - started))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
