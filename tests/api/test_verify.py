"""`/verify` and `/readyz` on real parts: each capability broken by hand, and each way to skip one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engram.assembly.gateway import build_app
from engram.embedded import EmbeddedRedis
from engram.gateway.gate import CAPABILITIES
from engram.gateway.outbox_worker import HEARTBEATS
from engram.kernel.settings import Settings
from engram.logbook import kv
from engram.logbook.config import Config
from engram.postgres.pool import connect
from support.admission import admitted
from support.backend import Backend
from support.faults import Fault, Order
from support.serving import serving

ALL_OK = dict.fromkeys(CAPABILITIES, "ok")
NOBODY = "127.0.0.1:9"
DAY = 86_400.0


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis.url()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is broken fails; not what a slow machine takes its time over."""
    monkeypatch.setattr("engram.gateway.capabilities.LOOK_SECONDS", 30.0)
    monkeypatch.setattr("engram.gateway.redis_probe.PING_SECONDS", 30.0)


@pytest.fixture
def whole(settings: Settings, redis_url: str, config: Config, tmp_path: Path) -> Settings:
    """A gateway in FULL mode that lacks nothing."""
    kv.beat(HEARTBEATS, "outbox:w1", {}, DAY, config)
    kv.beat(HEARTBEATS, "reconcile:w1", {}, DAY, config)
    return replace(settings, gateway_mode="FULL", redis_url=redis_url, data_dir=tmp_path / "data")


@contextmanager
def gateway(settings: Settings, token: str | None = None) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with (
        serving(build_app(settings)) as url,
        httpx2.Client(base_url=url, trust_env=False, headers=headers, timeout=30) as http,
    ):
        yield http


def statuses(reply: httpx2.Response) -> dict[str, str]:
    return {name: found["status"] for name, found in reply.json()["capabilities"].items()}


def run_sql(dsn: str, *statements: str) -> None:
    with connect(dsn) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def test_a_whole_gateway_passes_and_says_what_it_saw(whole: Settings) -> None:
    with gateway(whole) as http:
        reply = http.post("/verify", json={})
        told = reply.json()
        assert (reply.status_code, told["passed"], told["reason"], told["mode"]) == (200, True, "", "FULL")
        assert statuses(reply) == ALL_OK
        assert set(told) == {"passed", "reason", "mode", "capabilities", "correlation_id"}
        assert told["correlation_id"] == reply.headers["x-correlation-id"]
        for found in told["capabilities"].values():
            assert set(found) == {"status", "reason", "milliseconds"}
            assert found["reason"]
            assert found["milliseconds"] >= 0
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        assert ready.json()["capabilities"] == ALL_OK
        assert http.get("/health").json()["mode"] == "FULL"
        assert http.post("/verify", headers={"content-type": "application/json"}).status_code == 200


def database_down(settings: Settings, server: str) -> Settings:
    with connect(settings.postgres_dsn or "") as connection:
        name = connection.info.dbname
    run_sql(
        server,
        f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false',
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",
    )
    return settings


def migrations_behind(settings: Settings, server: str) -> Settings:
    run_sql(
        settings.postgres_dsn or "",
        "DELETE FROM engram_schema_version WHERE version = (SELECT max(version) FROM engram_schema_version)",
    )
    return settings


def another_build(settings: Settings, server: str) -> Settings:
    run_sql(settings.postgres_dsn or "", "UPDATE engram_schema_version SET checksum = 'x' WHERE version = 1")
    return settings


def memory_server_down(settings: Settings, server: str) -> Settings:
    return replace(settings, openmemory_base_url=f"http://{NOBODY}")


def wrong_key(settings: Settings, server: str) -> Settings:
    return replace(settings, openmemory_api_key="another key")


def heart_stopped(settings: Settings, prefix: str, seconds: int) -> Settings:
    run_sql(
        settings.postgres_dsn or "",
        "UPDATE logbook.kv SET value_json ="
        f" jsonb_build_object('at', now() - interval '{seconds} seconds')"
        f" WHERE namespace = 'worker.heartbeat' AND starts_with(key, '{prefix}')",
    )
    return settings


def worker_stopped(settings: Settings, server: str) -> Settings:
    return heart_stopped(settings, "outbox:", 31)


def reconcile_stopped(settings: Settings, server: str) -> Settings:
    return heart_stopped(settings, "reconcile:", 61)


def no_worker_ever(settings: Settings, server: str) -> Settings:
    run_sql(settings.postgres_dsn or "", "DELETE FROM logbook.kv WHERE starts_with(key, 'outbox:')")
    return settings


def no_reconcile_ever(settings: Settings, server: str) -> Settings:
    run_sql(settings.postgres_dsn or "", "DELETE FROM logbook.kv WHERE starts_with(key, 'reconcile:')")
    return settings


def odd_heartbeat(settings: Settings, server: str) -> Settings:
    run_sql(
        settings.postgres_dsn or "",
        """UPDATE logbook.kv SET value_json = '{"at": "soon"}' WHERE starts_with(key, 'outbox:')""",
    )
    return settings


def evidence_not_writable(settings: Settings, server: str) -> Settings:
    """A file where the folder should be: also root cannot write there."""
    assert settings.artifacts_dir
    settings.artifacts_dir.write_text("in the way")
    return settings


def redis_down(settings: Settings, server: str) -> Settings:
    return replace(settings, redis_url=f"redis://:hunter2@{NOBODY}/0")


def redis_refuses_us(settings: Settings, server: str) -> Settings:
    assert settings.redis_url
    before, _, where = settings.redis_url.rpartition("@")
    return replace(settings, redis_url=f"{before}x@{where}")


def no_redis(settings: Settings, server: str) -> Settings:
    return replace(settings, redis_url=None)


Break = Callable[[Settings, str], Settings]
BROKEN: list[tuple[Break, str, str, str]] = [
    (migrations_behind, "migrations", "behind", "engram migrate"),
    (another_build, "migrations", "SCHEMA_MISMATCH", "other contents"),
    (memory_server_down, "openmemory", "connection", "cannot be reached"),
    (wrong_key, "openmemory", "unauthorized", "403"),
    (worker_stopped, "outbox_worker", "stale", " s ago"),
    (no_worker_ever, "outbox_worker", "missing", "engram worker outbox"),
    (odd_heartbeat, "outbox_worker", "DATABASE_ERROR", "seconds_since_beat"),
    (reconcile_stopped, "reconcile", "stale", " s ago"),
    (no_reconcile_ever, "reconcile", "missing", "engram worker outbox"),
    (evidence_not_writable, "evidence_store", "ARTIFACT_FAILED", "artifacts"),
    (redis_down, "redis", "REDIS_UNAVAILABLE", "REDIS_URL"),
    (redis_refuses_us, "redis", "REDIS_UNAVAILABLE", "REDIS_URL"),
    (no_redis, "redis", "missing", "REDIS_URL"),
]
CASES = [pytest.param(*case, id=case[0].__name__) for case in BROKEN]


@pytest.mark.parametrize(("broken", "name", "word", "told"), CASES)
def test_broken_by_hand_it_fails_full_and_says_why(
    whole: Settings, postgres_server: Any, broken: Break, name: str, word: str, told: str
) -> None:
    with gateway(broken(whole, postgres_server.dsn("postgres"))) as http:
        reply = http.post("/verify", json={})
        assert reply.status_code == 503
        assert reply.json()["passed"] is False
        assert reply.json()["reason"] == f"FULL mode: required capability {name} failed"
        assert statuses(reply) == {**ALL_OK, name: "failed"}
        assert told in reply.json()["capabilities"][name]["reason"]
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert ready.json()["reason"] == reply.json()["reason"]
        assert ready.json()["capabilities"] == {**ALL_OK, name: f"failed: {word}"}
        assert "hunter2" not in reply.text + ready.text
        assert NOBODY not in ready.text, "the public answer names no host"
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(("broken", "name", "word", "told"), CASES)
def test_degraded_goes_on_without_all_but_the_schema(
    whole: Settings, postgres_server: Any, broken: Break, name: str, word: str, told: str
) -> None:
    settings = broken(replace(whole, gateway_mode="DEGRADED"), postgres_server.dsn("postgres"))
    with gateway(settings) as http:
        ready, reply = http.get("/readyz"), http.post("/verify", json={})
    assert ready.json()["capabilities"] == {**ALL_OK, name: f"failed: {word}"}, "it shows all the same"
    if name == "migrations":
        assert (ready.status_code, reply.status_code) == (503, 503)
        assert reply.json()["reason"] == "DEGRADED mode: required capability migrations failed"
    else:
        assert (ready.status_code, reply.status_code) == (200, 200)
        assert reply.json()["reason"] == f"DEGRADED mode: going on without {name}"


@pytest.mark.parametrize("mode", ["FULL", "DEGRADED"])
def test_no_mode_is_ready_without_its_database(whole: Settings, postgres_server: Any, mode: str) -> None:
    with gateway(replace(whole, gateway_mode=mode)) as http:
        assert http.get("/readyz").status_code == 200
        database_down(whole, postgres_server.dsn("postgres"))
        with ThreadPoolExecutor(2) as both:  # each waits until it is sure
            asked = both.submit(http.post, "/verify", json={}), both.submit(http.get, "/readyz")
            reply, ready = (call.result() for call in asked)
        assert (reply.status_code, ready.status_code) == (503, 503)
        assert reply.json()["reason"] == f"{mode} mode: required capability database failed"
        failed = {name for name, status in statuses(reply).items() if status == "failed"}
        assert failed == {"database", "migrations", "outbox_worker", "reconcile"}, "what rests on it"
        assert ready.json()["capabilities"]["database"].startswith("failed: ")
        assert http.get("/health").status_code == 200, "alive is not ready"


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_request_may_skip_any_and_only_itself(whole: Settings, name: str) -> None:
    with gateway(replace(whole, redis_url=None)) as http:
        reply = http.post("/verify", json={"skip": ["redis", name, name]})
        assert (reply.status_code, reply.json()["passed"]) == (200, True)
        assert statuses(reply) == {**ALL_OK, "redis": "skipped", name: "skipped"}
        assert http.post("/verify", json={"skip": [name]}).json()["passed"] == (name == "redis")
        assert http.post("/verify", json={}).status_code == 503
        assert http.get("/readyz").status_code == 503


@pytest.mark.parametrize("how", ["environment", "file"])
def test_the_settings_may_skip_and_then_readyz_passes(whole: Settings, how: str, tmp_path: Path) -> None:
    path = tmp_path / "engram.toml"
    path.write_text("[gateway]\nskip_redis = true\n" if how == "file" else "")
    loaded = Settings.load({"GATEWAY_SKIP_REDIS": "1"} if how == "environment" else {}, file=path)
    with gateway(replace(whole, redis_url=None, skip_redis=loaded.skip_redis)) as http:
        assert http.get("/readyz").json()["capabilities"]["redis"] == "skipped"
        assert http.get("/readyz").status_code == 200
        reply = http.post("/verify", json={})
        assert reply.status_code == 200
        assert "GATEWAY_SKIP_REDIS" in reply.json()["capabilities"]["redis"]["reason"]


def test_there_is_no_other_way_to_skip(whole: Settings) -> None:
    with gateway(replace(whole, redis_url=None)) as http:
        for path, headers in (
            ("/verify?skip=redis", {}),
            ("/verify?skip_redis=true", {}),
            ("/verify", {"X-Skip": "redis", "Skip-Redis": "1"}),
        ):
            reply = http.post(path, json={}, headers=headers)
            assert (reply.status_code, statuses(reply)["redis"]) == (503, "failed")
        assert http.get("/readyz?skip=redis").status_code == 503
        for body in ({"skip_redis": True}, {"skip": "redis"}, {"skip": {"redis": True}}, {"mode": "NONE"}):
            reply = http.post("/verify", json=body)
            assert (reply.status_code, reply.json()["error_code"]) == (400, "INVALID_ARGUMENT")


def test_an_unknown_skip_is_refused_by_name(whole: Settings) -> None:
    with gateway(whole) as http:
        reply = http.post("/verify", json={"skip": ["redis", "kafka", "Redis"]})
    assert (reply.status_code, reply.json()["error_code"]) == (400, "INVALID_ARGUMENT")
    assert "'Redis', 'kafka'" in reply.json()["message"]
    assert "outbox_worker" in reply.json()["context"]["fields"]["skip"]


def test_a_degraded_gateway_can_be_asked_by_the_full_gate(whole: Settings) -> None:
    with gateway(replace(whole, gateway_mode="DEGRADED", redis_url=None)) as http:
        assert http.post("/verify", json={}).status_code == 200
        reply = http.post("/verify", json={"mode": "FULL"})
        assert (reply.status_code, reply.json()["mode"]) == (503, "FULL")
        assert reply.json()["reason"] == "FULL mode: required capability redis failed"


@pytest.mark.parametrize(("scopes", "status"), [(["read"], 200), (["write"], 403), (["admin"], 403)])
def test_verifying_takes_the_scope_read(
    whole: Settings, tmp_path: Path, scopes: list[str], status: int
) -> None:
    file = tmp_path / "tokens.toml"
    secret = admitted(file, "ada", scopes)
    with gateway(replace(whole, tokens_file=file), secret) as http:
        assert http.post("/verify", json={}).status_code == status
        del http.headers["Authorization"]
        assert http.post("/verify", json={}).status_code == 401
        assert http.get("/readyz").status_code == 200


def test_the_gate_never_refuses_a_store(whole: Settings) -> None:
    lacking = replace(whole, redis_url=None, openmemory_base_url=f"http://{NOBODY}")
    with gateway(lacking) as http:
        assert http.get("/readyz").status_code == 503
        reply = http.post("/memory/store", json={"payload_md": "Kept all the same."})
    assert (reply.status_code, reply.json()["action"]) == (200, "deferred")


def test_looking_neither_asks_nor_tells_the_breaker(whole: Settings, backend: Backend) -> None:
    """Somebody who polls /readyz must not decide whether stores are tried."""
    wary = replace(whole, breaker_failures=1, breaker_cooldown_seconds=600)
    with gateway(wary) as http:
        backend.faults.fail(*[Order(Fault.STATUS, 503)] * 3, path="/memory/all")
        assert [http.get("/readyz").json()["capabilities"]["openmemory"] for _ in range(4)] == [
            *["failed: unavailable"] * 3,
            "ok",
        ]
        assert http.post("/memory/store", json={"payload_md": "Tried."}).json()["action"] == "allow"
        backend.faults.fail(Order(Fault.STATUS, 503))
        assert http.post("/memory/store", json={"payload_md": "Opens it."}).json()["action"] == "deferred"
        parked = http.post("/memory/store", json={"payload_md": "Not tried."}).json()
        assert "left alone" in parked["message"]
        assert http.get("/readyz").json()["capabilities"]["openmemory"] == "ok", "the server is well"


def test_looking_at_the_evidence_store_leaves_nothing_there(whole: Settings) -> None:
    with gateway(whole) as http:
        for _ in range(3):
            assert http.post("/verify", json={}).status_code == 200
    assert whole.artifacts_dir
    assert [path for path in whole.artifacts_dir.rglob("*") if path.is_file()] == []


def test_the_embedded_redis_of_the_folder_is_found(whole: Settings, tmp_path: Path) -> None:
    lone = replace(whole, redis_url=None, data_dir=tmp_path / "its own")
    with gateway(lone) as http:
        with EmbeddedRedis(lone.data_dir):
            assert http.get("/readyz").status_code == 200
        reply = http.post("/verify", json={})
        assert reply.json()["reason"] == "FULL mode: required capability redis failed"


def test_a_heartbeat_is_fresh_for_a_while(whole: Settings) -> None:
    heart_stopped(whole, "outbox:", 20)
    heart_stopped(whole, "reconcile:", 50)
    with gateway(whole) as http:
        assert http.get("/readyz").json()["capabilities"] == ALL_OK


def test_a_heart_that_beats_again_is_alive_and_one_of_many_is_enough(whole: Settings, config: Config) -> None:
    worker_stopped(whole, "")
    kv.beat(HEARTBEATS, "outbox:w2", {}, DAY, config)
    with gateway(whole) as http:
        assert http.get("/readyz").status_code == 200
        worker_stopped(whole, "")
        assert http.get("/readyz").json()["capabilities"]["outbox_worker"] == "failed: stale"
        kv.beat(HEARTBEATS, "outbox:w1", {}, DAY, config)
        assert http.get("/readyz").status_code == 200
