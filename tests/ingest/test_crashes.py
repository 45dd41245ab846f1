"""SIGKILL at every failpoint of ingest, in real processes; the client's task is done all the same."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from redis import Redis

from engram.assembly.addresses import migrate_all
from engram.assembly.gateway import build_app
from engram.embedded import EmbeddedPostgres, EmbeddedRedis
from engram.kernel.failpoints import FAILPOINTS
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from engram.web.sockets import bound, free_port
from support.processes import answers, environment, eventually, started
from support.serving import serving

from .conftest import working

pytestmark = [pytest.mark.crash, pytest.mark.xdist_group("ingest-crashes")]

OF_UPLOADS = [name for name in FAILPOINTS if name.startswith("uploads.")]
OF_THE_WORKER = [name for name in FAILPOINTS if name.startswith(("ingest_worker.", "pipeline.", "sweeper."))]
UPLOAD = "/api/knowledge/documents/upload-async"


@pytest.fixture
def quick(api_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Recovery without waiting: silence is noticed at once, and `move_time` ends leases."""
    monkeypatch.setattr("engram.ingest.sweeper.UPLOAD_SECONDS", 0.0)
    monkeypatch.setattr("engram.assembly.ingest.INGEST_UPKEEP_SECONDS", 0.2)
    return replace(
        api_settings,
        ingest_max_attempts=5,
        ingest_reclaim_idle_ms=0,
        ingest_reclaim_interval_ms=100,
    )


def move_time(settings: Settings) -> None:
    """The leases of the dead are over, and their turn to sweep has passed."""
    with connect(settings.postgres_dsn or "") as connection:
        connection.execute("UPDATE ingest.ingest_task SET locked_at = locked_at - interval '1 day'")
    _expire_turn(settings)


def all_done(settings: Settings, count: int) -> bool:
    with connect(settings.postgres_dsn or "") as connection:
        rows = connection.execute("SELECT status FROM ingest.ingest_task").fetchall()
    return [row["status"] for row in rows] == ["SUCCEEDED"] * count


def verdict(settings: Settings) -> None:
    """Every segment once, every transition in the table, nothing left on the stream."""
    with connect(settings.postgres_dsn or "") as connection:
        broken = connection.execute(
            "SELECT t.id FROM ingest.ingest_task t JOIN ingest.knowledge_document d ON d.id = t.document_id"
            " WHERE d.status <> 'READY' OR d.segments <>"
            " (SELECT count(*) FROM ingest.knowledge_segment s WHERE s.document_id = d.id)"
        ).fetchall()
        chains = connection.execute(
            "SELECT from_status, lag(to_status) OVER (PARTITION BY task_id ORDER BY id) AS before"
            " FROM ingest.ingest_task_transition"
        ).fetchall()
    assert broken == []
    assert [row for row in chains if row["from_status"] != row["before"]] == []
    with Redis.from_url(settings.redis_url) as redis:

        def empty() -> bool:
            return (
                redis.xlen("ingest:tasks") == 0
                and redis.xpending("ingest:tasks", "ingest-workers")["pending"] == 0
            )

        eventually(empty, "an empty stream", 10)
        assert redis.xlen("ingest:tasks:dlq") == 0


@pytest.mark.parametrize("name", OF_THE_WORKER)
def test_a_worker_dies_there_and_another_goes_on(quick: Settings, name: str, tmp_path: Path) -> None:
    with serving(build_app(quick)) as url:
        for n in range(3):
            files = {"file": (f"{n}.md", f"# Part {n}\n\nWho may settle a row?".encode())}
            assert httpx2.post(f"{url}{UPLOAD}", files=files, trust_env=False).status_code == 202
    if name.startswith("sweeper."):
        with Redis.from_url(quick.redis_url) as redis:
            redis.flushall()
        with connect(quick.postgres_dsn or "") as connection:
            connection.execute("UPDATE ingest.ingest_task SET updated_at = now() - interval '1 minute'")
    env = environment(quick, ENGRAM_FAILPOINT=name)
    with started("worker", "ingest", env=env, log=tmp_path / "worker.log") as process:
        assert process.wait(60) == -signal.SIGKILL, (tmp_path / "worker.log").read_text()
    move_time(quick)
    with working(quick):
        eventually(lambda: all_done(quick, 3), "every task to be done", 30)
        verdict(quick)


@pytest.mark.parametrize("name", OF_UPLOADS)
def test_a_gateway_dies_there_and_the_repeat_makes_one_task(
    quick: Settings, name: str, tmp_path: Path
) -> None:
    served = replace(quick, gateway_port=free_port())
    url = f"http://127.0.0.1:{served.gateway_port}"
    sent = {"files": {"file": ("a.md", b"# Leases\n\nText.")}, "headers": {"Idempotency-Key": "k"}}
    log = tmp_path / "serve.log"
    with started("serve", env=environment(served, ENGRAM_FAILPOINT=name), log=log) as process:
        eventually(lambda: answers(f"{url}/health") or process.poll(), "the gateway")
        with pytest.raises(httpx2.HTTPError):
            httpx2.post(f"{url}{UPLOAD}", **sent, trust_env=False, timeout=30)
        assert process.wait(30) == -signal.SIGKILL, log.read_text()
    with connect(quick.postgres_dsn or "") as connection:
        connection.execute("UPDATE logbook.idempotency_keys SET locked_at = locked_at - interval '1 hour'")
    move_time(quick)
    with serving(build_app(quick)) as again, working(quick):
        reply = httpx2.post(f"{again}{UPLOAD}", **sent, trust_env=False, timeout=30)
        assert reply.status_code == 202
        eventually(lambda: all_done(quick, 1), "the task to be done", 30)
        verdict(quick)


def test_sigterm_costs_no_attempt_and_redis_may_be_flushed_meanwhile(quick: Settings, tmp_path: Path) -> None:
    """A real worker is stopped in the middle of its documents; then Redis loses everything."""
    count, log = 6, tmp_path / "worker.log"
    with serving(build_app(quick)) as url:
        for n in range(count):
            files = {"file": (f"{n}.md", f"# Part {n}\n\nSome words.".encode())}
            assert httpx2.post(f"{url}{UPLOAD}", files=files, trust_env=False).status_code == 202
    with bound("127.0.0.1", 0) as silent:
        # An embedding service that takes the call and never answers.
        silent.listen()
        waits = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/embeddings"
        env = environment(replace(quick, embeddings_url=waits))
        with started("worker", "ingest", env=env, log=log) as process:
            eventually(lambda: len(_begun(quick)) == 4, "as many tasks as it takes to start", 30)
            where = re.findall(r"http://127[.]0[.]0[.]1:[0-9]+/metrics", log.read_text())
            told = httpx2.get(where[-1], trust_env=False, timeout=30).text
            assert 'ingest_task_process_total{result="succeeded"} 0.0' in told
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0, log.read_text()
    with connect(quick.postgres_dsn or "") as connection:
        rows = connection.execute(
            "SELECT status, attempt_count, last_error FROM ingest.ingest_task"
        ).fetchall()
    assert sorted(row["status"] for row in rows) == ["QUEUED"] * 2 + ["RETRYING"] * 4
    assert {(row["attempt_count"], row["last_error"]) for row in rows} == {(0, None)}
    _flush(quick)
    with working(quick):
        eventually(lambda: all_done(quick, count), "every task to be done", 30)
        verdict(quick)
    with connect(quick.postgres_dsn or "") as connection:
        most = connection.execute("SELECT max(attempt_count) AS most FROM ingest.ingest_task").fetchone()
    assert most == {"most": 0}


def test_whatever_dies_during_the_uploads_every_document_is_in_once(
    quick: Settings, redis_server: EmbeddedRedis, scale: float, seed: int, tmp_path: Path
) -> None:
    """Workers killed at failpoints and at random; Redis emptied, Redis and PostgreSQL killed and started."""
    chance, count = random.Random(seed), int(80 * scale)
    with ExitStack() as held:
        postgres = held.enter_context(EmbeddedPostgres(tmp_path / "database"))
        migrate_all(postgres.dsn())
        hardy = replace(
            quick,
            postgres_dsn=postgres.dsn(),
            ingest_max_attempts=1000,
            ingest_lease_seconds=3.0,
            ingest_concurrency=2,
        )
        faults = [
            lambda: _flush(hardy),
            lambda: _restart(redis_server),
            lambda: _restart_database(postgres),
            *[lambda: None] * int(3 * scale),
        ]
        chance.shuffle(faults)
        workers = [held.enter_context(_worker(hardy, tmp_path)) for _ in range(2)]
        url = held.enter_context(serving(build_app(hardy)))
        callers = held.enter_context(ThreadPoolExecutor(4))
        sent = [callers.submit(_upload, url, n) for n in range(count)]

        def done(wanted: float) -> bool:
            for at, worker in enumerate(workers):
                if worker.poll() is not None:
                    workers[at] = held.enter_context(_worker(hardy, tmp_path))
            return _done(hardy) >= wanted

        for at, fault in enumerate(faults):
            eventually(lambda at=at: done(count * at / (2 * len(faults))), "some work", 60)
            fault()
            victim = chance.randrange(2)
            workers[victim].kill()
            workers[victim].wait(10)
            workers[victim] = held.enter_context(_worker(hardy, tmp_path, chance.choice(OF_THE_WORKER)))
        _expire_turn(hardy)
        eventually(lambda: done(count), "every task to be done", 60 + count / 10)
        promised = {reply.result(1) for reply in sent}
        verdict(hardy)
        with connect(hardy.postgres_dsn or "") as connection:
            kept = connection.execute("SELECT id FROM ingest.ingest_task").fetchall()
    assert promised == {str(row["id"]) for row in kept}


def _upload(url: str, number: int) -> str:
    """What a client does that takes only a promise for an answer; the task it was promised."""
    name, content = f"{number}.md", f"# Part {number}\n\n{'Some words of it. ' * 300}".encode()
    with httpx2.Client(base_url=url, trust_env=False, timeout=30) as client:

        def promise() -> str | None:
            try:
                reply = client.post(
                    UPLOAD, files={"file": (name, content)}, headers={"Idempotency-Key": f"upload-{number}"}
                )
            except httpx2.HTTPError:
                return None
            assert reply.status_code in (202, 409, 503), reply.text
            return reply.json()["taskId"] if reply.status_code == 202 else None

        return eventually(promise, f"a promise for {name}", 100)


def _done(settings: Settings) -> int:
    with connect(settings.postgres_dsn or "") as connection:
        row = connection.execute(
            "SELECT count(*) FROM ingest.ingest_task WHERE status = 'SUCCEEDED'"
        ).fetchone()
    return int(row["count"]) if row else 0


def _worker(
    settings: Settings, folder: Path, dies_at: str = ""
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    env = environment(settings, ENGRAM_FAILPOINT=dies_at)
    return started("worker", "ingest", env=env, log=folder / "workers.log")


def _flush(settings: Settings) -> None:
    with Redis.from_url(settings.redis_url) as redis:
        redis.flushall()


def _restart(server: EmbeddedRedis) -> None:
    with Redis.from_url(server.url()) as redis:
        redis.shutdown(nosave=True)
    server.start()


def _restart_database(server: EmbeddedPostgres) -> None:
    os.kill(server.pid or 0, signal.SIGKILL)
    server.start()


def _expire_turn(settings: Settings) -> None:
    with Redis.from_url(settings.redis_url) as redis:
        redis.delete("ingest:tasks:sweeper")


def _begun(settings: Settings) -> list[dict]:
    with connect(settings.postgres_dsn or "") as connection:
        return connection.execute("SELECT id FROM ingest.ingest_task WHERE status = 'RUNNING'").fetchall()
