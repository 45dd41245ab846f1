"""Every route: behind the guards, with one error shape, and honest about what it depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest

from engram.assembly.gateway import build_app
from engram.kernel.errors import ConfigError
from engram.kernel.settings import Settings
from engram.postgres.pool import connect
from support.serving import serving

ROUTES = [
    ("POST", "/mcp"),
    ("GET", "/mcp"),
    ("DELETE", "/mcp"),
    ("POST", "/memory/store"),
    ("POST", "/memory/query"),
    ("POST", "/memory/forget"),
    ("POST", "/reliability/report"),
    ("GET", "/reliability/report"),
    ("POST", "/governance/settings/update"),
    ("POST", "/evidence/upload"),
    ("POST", "/evidence/read"),
    ("POST", "/logbook/items"),
    ("POST", "/logbook/events"),
    ("POST", "/logbook/query"),
    ("POST", "/api/knowledge/documents/upload-async"),
    ("GET", "/api/knowledge/documents"),
    ("GET", "/api/knowledge/documents/{documentId}"),
    ("GET", "/api/knowledge/tasks"),
    ("GET", "/api/knowledge/tasks/{taskId}"),
    ("GET", "/api/knowledge/tasks/{taskId}/events"),
    ("POST", "/api/knowledge/tasks/{taskId}/retry"),
    ("POST", "/api/knowledge/search"),
    ("POST", "/v1/sandboxes"),
    ("GET", "/v1/sandboxes"),
    ("GET", "/v1/sandboxes/{sandbox_id}"),
    ("DELETE", "/v1/sandboxes/{sandbox_id}"),
    ("POST", "/v1/sandboxes/{sandbox_id}/exec"),
    ("POST", "/v1/sandboxes/{sandbox_id}/extend_ttl"),
    ("POST", "/v1/sandboxes/{sandbox_id}/stop"),
    ("PUT", "/v1/sandboxes/{sandbox_id}/files/{path}"),
    ("POST", "/verify"),
    ("GET", "/health"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/route"),
]


def paths(routes) -> Iterator[str]:
    for route in routes:
        if hasattr(route, "path"):
            yield getattr(route, "path_format", route.path)
        else:
            yield from paths(route.original_router.routes)


def test_the_list_of_routes_is_whole(settings: Settings) -> None:
    served = set(paths(build_app(settings).routes))
    helpers = {"/docs/oauth2-redirect"}
    assert served - helpers == {path for _, path in ROUTES} - {"/no/such/route"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
    ids=["host", "origin", "null-origin"],
)
def test_no_route_answers_a_foreign_host_or_origin(http: httpx2.Client, headers: dict, status: int) -> None:
    given = {"content-type": "application/json", **headers}
    for method, path in ROUTES:
        reply = http.request(method, path, headers=given, content=b"{}")
        assert reply.status_code == status, path
        assert reply.json()["error_code"] == "REQUEST_REFUSED", path
        assert reply.headers["x-correlation-id"], path


@pytest.mark.parametrize("path", ["/mcp", "/memory/store", "/memory/query"])
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_no_route_reads_a_body_that_is_not_json(http: httpx2.Client, path: str, kind: str) -> None:
    body = b'{"tool": "memory_store", "arguments": {"payload_md": "x"}}'
    reply = http.post(path, content=body, headers={"content-type": kind} if kind else {})
    assert reply.status_code == 415


@pytest.mark.parametrize("path", ["/mcp", "/memory/store"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_refused_everywhere(
    http: httpx2.Client, settings: Settings, path: str, declared: bool
) -> None:
    body = b'{"payload_md": "' + b"x" * settings.max_body_bytes + b'"}'
    content = body if declared else iter([body[i : i + 65536] for i in range(0, len(body), 65536)])
    reply = http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 413
    assert reply.json()["error_code"] == "REQUEST_REFUSED"


def test_the_rest_twins_do_what_the_tools_do(http: httpx2.Client) -> None:
    stored = http.post("/memory/store", json={"payload_md": "A fact.", "actor_user_id": "ada"})
    assert (stored.status_code, stored.json()["space_written"]) == (200, "private:ada")
    found = http.post("/memory/query", json={"query": "fact", "actor_user_id": "ada"})
    assert [r["memory_id"] for r in found.json()["results"]] == [stored.json()["memory_id"]]


def test_invalid_bodies_name_the_field_and_never_the_value(http: httpx2.Client) -> None:
    reply = http.post("/memory/store", json={"payload_md": ["hunter2"]})
    assert reply.status_code == 400
    assert set(reply.json()["context"]["fields"]) == {"payload_md"}
    assert "hunter2" not in reply.text


@pytest.mark.parametrize("path", ["/memory/store", "/mcp"])
@pytest.mark.parametrize(
    "arguments",
    [
        b'{"payload_md": "x", "meta_json": {"a": NaN}}',
        b'{"payload_md": "x", "meta_json": {"a": 1e999}}',
        b'{"payload_md": "x", "meta_json": {"a\\u0000": 1}}',
        b'{"payload_md": "x", "meta_json": {"a": "\\ud800"}}',
        b'{"payload_md": "x", "kind": "a\\u0000"}',
        b'{"payload_md": "x", "target_space": "team:\\u0000"}',
        b'{"payload_md": "x", "evidence_refs": ["\\udfff"]}',
        b'{"payload_md": "x", "item_id": 99999999999999999999}',
        b'{"payload_md": "x", "meta_json": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}",
        b'{"payload_md": "x", "meta_json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
    ids=range(10),
)
def test_what_no_database_can_hold_is_the_callers_error(
    http: httpx2.Client, path: str, arguments: bytes
) -> None:
    body = arguments if path != "/mcp" else b'{"tool": "memory_store", "arguments": ' + arguments + b"}"
    reply = http.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400


def test_correlation_ids_are_kept_when_sane_and_made_when_not(http: httpx2.Client) -> None:
    assert (
        http.get("/health", headers={"x-correlation-id": "corr-1234"}).headers["x-correlation-id"]
        == "corr-1234"
    )
    for odd in ("x", "a b", "a" * 100, "<script>"):
        given = http.get("/health", headers={"x-correlation-id": odd}).headers["x-correlation-id"]
        assert given.startswith("corr-")
        assert len(given) == 21


def test_readiness_depends_on_the_database(http: httpx2.Client, dsn: str) -> None:
    assert http.get("/readyz").json()["capabilities"]["database"] == "ok"
    with connect(dsn) as connection:
        connection.execute("ALTER TABLE governance.settings RENAME TO elsewhere")
    reply = http.get("/readyz")
    assert (reply.status_code, reply.json()["ready"]) == (503, False)
    assert reply.json()["capabilities"]["database"].startswith("failed")
    assert http.get("/health").status_code == 200, "alive is not ready"


@pytest.mark.parametrize(("mode", "status"), [("DEGRADED", 200), ("FULL", 503)])
def test_a_missing_memory_server_matters_in_full_mode_only(
    settings: Settings, mode: str, status: int
) -> None:
    gone = replace(settings, gateway_mode=mode, openmemory_base_url="http://127.0.0.1:9")
    with serving(build_app(gone)) as url:
        reply = httpx2.get(f"{url}/readyz", trust_env=False)
    assert reply.status_code == status
    assert reply.json()["capabilities"]["openmemory"] == "failed: connection"


def test_metrics_count_what_happened(http: httpx2.Client) -> None:
    def stores() -> float:
        lines = http.get("/metrics").text.splitlines()
        counted = [line for line in lines if line.startswith('engram_memory_store_total{action="allow"}')]
        return float(counted[0].split()[-1]) if counted else 0.0

    before = stores()
    http.post("/memory/store", json={"payload_md": "A fact for the metrics."})
    assert stores() == before + 1


def test_an_error_nobody_expected_still_has_the_one_shape(settings: Settings) -> None:
    app = build_app(settings)

    @app.get("/boom")
    def boom() -> None:
        raise RuntimeError("secret inside")

    with serving(app) as url:
        reply = httpx2.get(f"{url}/boom", trust_env=False)
    assert (reply.status_code, reply.json()["error_code"]) == (500, "INTERNAL")
    assert "secret inside" not in reply.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "engram.internal"])  # noqa: S104
def test_an_address_others_can_reach_is_refused_without_tokens(settings: Settings, host: str) -> None:
    with pytest.raises(ConfigError, match="without tokens"):
        build_app(replace(settings, gateway_host=host))
