"""The memory server's HTTP face: OpenMemory's routes over `store`.

Every reply about a write is sent after its statement has committed. The server
does not classify what it stores: every memory is `semantic`, and nothing decays,
so salience is always 1. Times are milliseconds since 1970, as OpenMemory has them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from engram import __version__
from engram.kernel.errors import ConstraintViolated, EngramError, NotFound, StateConflict
from engram.kernel.logs import fields
from engram.kernel.runloop import run_loop
from engram.memory import store
from engram.memory.connections import memory_pool
from engram.memory.keys import ApiKeys
from engram.memory.replies import reply_to, reply_to_status, reply_to_unexpected
from engram.memory.requests import (
    SALIENCE,
    SECTOR,
    parse_json,
    read_add,
    read_change,
    read_id,
    read_page,
    read_search,
)
from engram.memory.search import HybridSearch
from engram.memory.upkeep import Upkeep
from engram.memory.vectors import Vectors
from engram.postgres import AsyncExecutor, Query, Row
from engram.search.embeddings import Embedder, LocalEmbedder
from engram.web.guards import Guards

log = logging.getLogger(__name__)

T = TypeVar("T")
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

MAX_BODY_BYTES = 2 << 20

# How often memories without a vector are looked for, if nobody says that there are some.
_FILL_SECONDS = 5.0
_UPKEEP_SECONDS = 60.0

routes = APIRouter()


def create_app(
    dsn: str,
    api_keys: Mapping[str, str] | None = None,
    allowed_hosts: Collection[str] = (),
    instance: str | None = None,
    embedder: Embedder | None = None,
) -> FastAPI:
    """The server as an ASGI application; it opens and closes its own pool of connections."""
    lifespan = _lifespan(dsn, embedder or LocalEmbedder())
    app = FastAPI(title="engram memory server", version=__version__, lifespan=lifespan)
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
    vectors: Vectors = request.app.state.vectors
    vector = await vectors.of(asked.content)
    statement = store.add(tenant, asked.content, asked.tags, asked.metadata, key=asked.key, vector=vector)
    added = await _run(request, statement)
    if vector is None:
        vectors.wake.set()
    if not added.same_request:
        raise StateConflict("this Idempotency-Key was used for another memory")
    reply: dict[str, Any] = {"id": str(added.id), **_sectors()}
    if added.deduplicated:
        reply["deduplicated"] = True
    return JSONResponse(reply)


@routes.post("/memory/query")
async def query(request: Request) -> Response:
    """The `k` memories that match `query` best, by words and by meaning, best first."""
    tenant = _tenant(request)
    asked = read_search(parse_json(await request.body()), tenant)
    search: HybridSearch = request.app.state.search
    found = await search.matches(tenant, asked)
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


@routes.patch("/memory/{memory_id}")
async def change(request: Request, memory_id: str) -> Response:
    """Change content, tags or metadata; what is not given stays."""
    tenant, known_as = _tenant(request), read_id(memory_id)
    asked = read_change(parse_json(await request.body()), tenant)
    try:
        changed = await _run(request, store.change(tenant, known_as, asked))
    except ConstraintViolated as error:
        if error.constraint != "memories_once_per_space":
            raise
        said = "another memory of this space has this content"
        raise StateConflict(said, context={"error": "duplicate"}) from error
    if not changed:
        raise NotFound("no such memory")
    if asked.content is not None:
        await request.app.state.vectors.refill(known_as, asked.content)
    return JSONResponse({"id": str(known_as), "updated": True})


@routes.delete("/memory/{memory_id}")
async def delete(request: Request, memory_id: str) -> Response:
    if not await _run(request, store.delete(_tenant(request), read_id(memory_id))):
        raise NotFound("no such memory")
    return JSONResponse({"ok": True})


@routes.get("/health")
async def health(request: Request) -> Response:
    """Public. Asks the database, so that `ok` means a write would be accepted.

    Without vectors the server is well: it searches by words alone, and says why.
    """
    try:
        await _run(request, store.ping())
    except EngramError:
        return JSONResponse({"ok": False}, 503)
    vectors: Vectors = request.app.state.vectors
    told = {"ok": True, "server": "engram", "version": __version__, "instance": request.app.state.instance}
    told["vectors"] = vectors.state
    if vectors.because:
        told["words_only_because"] = vectors.because
    return JSONResponse(told)


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
        "last_seen_at": _milliseconds(row["created_at"]),
    }


def _memory(row: Row) -> dict[str, Any]:
    created = _milliseconds(row["created_at"])
    return {
        "id": str(row["id"]),
        "content": row["content"],
        **_sectors(),
        "tags": row["tags"],
        "metadata": row["metadata"],
        "created_at": created,
        "updated_at": _milliseconds(row["changed_at"] or row["created_at"]),
        "last_seen_at": created,
        "salience": SALIENCE,
        "user_id": row["tenant"],
    }


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _lifespan(dsn: str, embedder: Embedder) -> Lifespan:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _shut_after(embedder), memory_pool(dsn) as pool:
            executor = AsyncExecutor(pool)
            vectors = Vectors(executor, embedder)
            upkeep = Upkeep(dsn, executor, vectors)
            app.state.executor, app.state.vectors = executor, vectors
            app.state.search = HybridSearch(executor, vectors, upkeep)
            async with _in_background(vectors, upkeep):
                yield

    return lifespan


@asynccontextmanager
async def _shut_after(embedder: Embedder) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await embedder.shut()


@asynccontextmanager
async def _in_background(vectors: Vectors, upkeep: Upkeep) -> AsyncIterator[None]:
    """Side tasks: what they have in hand at the end is done again at the next start."""
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(
            run_loop("vectors", vectors.run_once, idle_seconds=_FILL_SECONDS, stop=stop, wake=vectors.wake)
        ),
        asyncio.create_task(run_loop("upkeep", upkeep.run_once, idle_seconds=_UPKEEP_SECONDS, stop=stop)),
    ]
    for task in tasks:
        task.add_done_callback(_died)
    try:
        yield
    finally:
        # Both: a statement that was just answered may not notice that it was cancelled.
        stop.set()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("memory.background_died", extra=fields(error=f"{type(error).__name__}: {error}"))


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
