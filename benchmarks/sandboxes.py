"""Sandboxes against the least they could cost: a GET, bare commits, the library alone, no sandbox at all."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.bare import sandboxes as bare
from benchmarks.measuring import alternate, database_server, fresh_database, median, told, verdict
from engram.kernel.settings import Settings
from engram.supervisor import as_environment
from engram.web.sockets import free_port

# Many short rounds: what is compared differs by less than a machine does from one minute to the next.
ROUNDS = 15
COUNT = int(os.environ.get("ENGRAM_BENCH_COUNT", "30"))
TOGETHER = 20
# The same interpreter on both sides; long enough that its start is not what is measured.
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or "python3"
WORK = [PYTHON, "-c", "sum(n * n for n in range(15_000_000))"]
_keys = itertools.count()


@contextmanager
def gateway(dsn: str) -> Iterator[httpx2.Client]:
    with tempfile.TemporaryDirectory(prefix="engram-bench-sandboxes-") as folder:
        Path(folder).chmod(0o711)
        settings = replace(
            Settings.load({}),
            postgres_dsn=dsn,
            sandbox_dir=Path(folder),
            sandbox_max_per_owner=100_000,
            openmemory_base_url="http://127.0.0.1:9",
            gateway_port=free_port(),
            log_level="error",
        )
        environment = {**os.environ, **as_environment(settings)}
        server = subprocess.Popen([sys.executable, "-m", "engram", "serve"], env=environment)
        try:
            with httpx2.Client(base_url=settings.gateway_url, trust_env=False, timeout=120) as http:
                _wait(http)
                yield http
        finally:
            server.terminate()
            server.wait()


def _wait(http: httpx2.Client) -> None:
    for _ in range(600):
        try:
            http.get("/health")
            return
        except httpx2.HTTPError:
            time.sleep(0.05)
    raise SystemExit("the gateway did not start")


def expecting(status: int, ask: Callable[[], httpx2.Response]) -> Callable[[], None]:
    def asked() -> None:
        if (reply := ask()).status_code != status:
            raise SystemExit(f"unexpected answer: {reply.status_code} {reply.text[:300]}")

    return asked


def medians_ms(**contenders: Callable[[], None]) -> dict[str, float]:
    """Each once, in turn, COUNT times: what is compared happened in the same hundredth of a second."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(COUNT):
        for name, work in contenders.items():
            started = time.perf_counter()
            work()
            taken[name].append((time.perf_counter() - started) * 1000)
    return {name: median(found) for name, found in taken.items()}


def create(http: httpx2.Client, key: str | None) -> httpx2.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return http.post("/v1/sandboxes", json={}, headers=headers)


def run(http: httpx2.Client, box: str, argv: list[str]) -> httpx2.Response:
    return http.post(f"/v1/sandboxes/{box}/exec", json={"argv": argv})


def measured(http: httpx2.Client, dsn: str, folder: str) -> dict[str, list[float]]:
    box: dict[str, Any] = create(http, "replayed").json()
    url = f"/v1/sandboxes/{box['id']}"
    values: dict[str, list[float]] = {}
    with bare.committing(dsn) as commit:
        for _ in range(ROUNDS):
            found = medians_ms(
                get=expecting(200, lambda: http.get(url)),
                replay=expecting(201, lambda: create(http, "replayed")),
            )
            found |= medians_ms(
                commit=commit,
                unkeyed=expecting(201, lambda: create(http, None)),
                keyed=expecting(201, lambda: create(http, f"key-{next(_keys)}")),
            )
            found |= medians_ms(
                library_true=lambda: bare.run_true(folder),
                exec_true=expecting(200, lambda: run(http, box["id"], ["true"])),
            )
            for name, value in found.items():
                values.setdefault(name, []).append(value)
    return values


def together(http: httpx2.Client) -> dict[str, list[float]]:
    boxes = [create(http, None).json()["id"] for _ in range(TOGETHER)]

    def sandboxed() -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(TOGETHER) as pool:
            replies = list(pool.map(lambda box: run(http, box, WORK).json(), boxes))
        if any(reply.get("exit_code") != 0 for reply in replies):
            raise SystemExit(f"a command failed: {replies[0]}")
        return time.perf_counter() - started

    return alternate(no_sandbox=lambda: bare.together_seconds(WORK, TOGETHER), sandboxes=sandboxed)


def main() -> None:
    print(f"sandboxes: medians of {COUNT} each in {ROUNDS} rounds, {TOGETHER} at once")
    with (
        database_server() as server,
        fresh_database(server) as dsn,
        tempfile.TemporaryDirectory() as folder,
        gateway(dsn) as http,
    ):
        values = measured(http, dsn, folder)
        at_once = together(http)
    for name, found in values.items():
        told(name, found, "ms")
    for name, found in at_once.items():
        told(name, found, "s")
    middle = {name: median(found) for name, found in (values | at_once).items()}
    verdict("a replay against a GET", middle["replay"] / middle["get"], 1.5, at_most=True)
    allowed = middle["unkeyed"] + 3 * middle["commit"]
    verdict(
        "a keyed create against an unkeyed one and three commits", middle["keyed"] / allowed, 1, at_most=True
    )
    allowed = 2 * middle["library_true"] + middle["get"]
    verdict("exec true against twice the library and a GET", middle["exec_true"] / allowed, 1, at_most=True)
    ratio = middle["sandboxes"] / middle["no_sandbox"]
    verdict(f"{TOGETHER} at once against no sandbox", ratio, 1.3, at_most=True)


if __name__ == "__main__":
    main()
