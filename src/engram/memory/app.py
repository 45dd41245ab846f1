"""The memory server's HTTP face: OpenMemory's routes over `store`.

Every reply about a write is sent after its statement has committed. The server
does not classify what it stores: every memory is `semantic`, and nothing decays,
so salience is always 1. Times are milliseconds since 1970, as OpenMemory has them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from engram import __version__
from engram.kernel.errors import EngramError, NotFound, StateConflict
from engram.memory import store
from engram.memory.keys import ApiKeys
from engram.memory.replies import reply_to, reply_to_status, reply_to_unexpected
from engram.memory.requests import parse_json, read_add, read_id, read_page, read_search
from engram.postgres import AsyncExecutor, Query, Row
from engram.postgres.pool import AsyncPool, async_pool
from engram.web.guards import Guards

T = TypeVar("T")
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

MAX_BODY_BYTES = 2 << 20
SECTOR = "semantic"
SALIENCE = 1.0

# A caller waits at most this long to hear that the database is away, and a
# reconnection gives up as soon, so that the next request tries anew at once.
_OUTAGE_SECONDS = 2.0

routes = APIRouter()


def create_app(
    database: AsyncExecutor | str,
    api_keys: Mapping[str, str] | None = None,
    allowed_hosts: Collection[str] = (),
    instance: str | None = None,
) -> FastAPI:
    """The server as an ASGI application; given a DSN, it opens and closes its own pool."""
    app = FastAPI(title="engram memory server", version=__version__, lifespan=_lifespan(database))
    app.state.keys = ApiKeys(api_keys or {})
    app.state.instance = instance
    app.include_router(routes)
    app.add_middleware(Guards, refuse=reply_to, max_body_bytes=MAX_BODY_BYTES, allowed_hosts=allowed_hosts)
    _answer_errors(app)
    return app


@routes.post("/memory/add")
async def add(request: Request) -> Response:
    """Store `content`; the same content in the same space is stored once."""
    tenant = _tenant(request)
    asked = read_add(parse_json(await request.body()), request.headers.get("idempotency-key"), tenant)
    added = await _run(request, store.add(tenant, asked.content, asked.tags, asked.metadata, key=asked.key))
    if not added.same_request:
        raise StateConflict("this Idempotency-Key was used for another memory")
    reply: dict[str, Any] = {"id": str(added.id), **_sectors()}
    if added.deduplicated:
        reply["deduplicated"] = True
    return JSONResponse(reply)


@routes.post("/memory/query")
async def query(request: Request) -> Response:
    """The `k` memories that match the words of `query` best, best first."""
    tenant = _tenant(request)
    asked = read_search(parse_json(await request.body()), tenant)
    search = store.search(tenant, asked.query, asked.k, asked.tags)
    found = await _run(request, search) if search else []
    return JSONResponse({"query": asked.query, "matches": [_match(row) for row in found]})


@routes.get("/memory/all")
async def newest(request: Request) -> Response:
    """A page of memories, newest first: `l` of them after the first `u`."""
    tenant = _tenant(request)
    page = read_page(request.query_params, tenant)
    found = await _run(request, store.newest(tenant, page.limit, page.offset))
    return JSONResponse({"items": [_memory(row) for row in found]})


@routes.get("/memory/{memory_id}")
async def get(request: Request, memory_id: str) -> Response:
    row = await _run(request, store.get(_tenant(request), read_id(memory_id)))
    if row is None:
        raise NotFound("no such memory")
    return JSONResponse(_memory(row))


@routes.delete("/memory/{memory_id}")
async def delete(request: Request, memory_id: str) -> Response:
    if not await _run(request, store.delete(_tenant(request), read_id(memory_id))):
        raise NotFound("no such memory")
    return JSONResponse({"ok": True})


@routes.get("/health")
async def health(request: Request) -> Response:
    """Public. Asks the database, so that `ok` means a write would be accepted."""
    try:
        await _run(request, store.ping())
    except EngramError:
        return JSONResponse({"ok": False}, 503)
    instance = request.app.state.instance
    return JSONResponse({"ok": True, "server": "engram", "version": __version__, "instance": instance})


def _tenant(request: Request) -> str:
    keys: ApiKeys = request.app.state.keys
    return keys.tenant(request.headers.get("x-api-key"))


async def _run(request: Request, query: Query[T]) -> T:
    executor: AsyncExecutor = request.app.state.executor
    return await executor.run(query)


def _sectors() -> dict[str, Any]:
    return {"primary_sector": SECTOR, "sectors": [SECTOR]}


def _match(row: Row) -> dict[str, Any]:
    return {
        "id": str(row["id"]),
        "content": row["content"],
        "score": row["score"],
        **_sectors(),
        "path": [],
        "salience": SALIENCE,
        "last_seen_at": _milliseconds(row),
    }


def _memory(row: Row) -> dict[str, Any]:
    created = _milliseconds(row)
    return {
        "id": str(row["id"]),
        "content": row["content"],
        **_sectors(),
        "tags": row["tags"],
        "metadata": row["metadata"],
        "created_at": created,
        "updated_at": created,
        "last_seen_at": created,
        "salience": SALIENCE,
        "user_id": row["tenant"],
    }


def _milliseconds(row: Row) -> int:
    return int(row["created_at"].timestamp() * 1000)


def _lifespan(database: AsyncExecutor | str) -> Lifespan:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if isinstance(database, AsyncExecutor):
            app.state.executor = database
            yield
            return
        async with _pool(database) as pool:
            app.state.executor = AsyncExecutor(pool)
            yield

    return lifespan


def _pool(dsn: str) -> AsyncPool:
    # The best plan depends on how rare the asked tags are, so plans are not reused.
    options = f"-c plan_cache_mode=force_custom_plan {conninfo_to_dict(dsn).get('options') or ''}"
    pool = async_pool(make_conninfo(dsn, options=options), application_name="engram-memory")
    pool.timeout = pool.reconnect_timeout = _OUTAGE_SECONDS
    return pool


def _answer_errors(app: FastAPI) -> None:
    handlers: dict[type[Exception], Callable[[Any], Response]] = {
        EngramError: reply_to,
        HTTPException: reply_to_status,
        ClientDisconnect: lambda _: Response(status_code=400),  # nobody is left to read it
        Exception: reply_to_unexpected,
    }
    for kind, answer in handlers.items():
        app.add_exception_handler(kind, _handler(answer))


def _handler(answer: Callable[[Any], Response]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return answer(error)

    return handle
