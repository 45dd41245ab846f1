"""The bare way to serve memories: the same libraries and statements, no guards, checks, keys or tenants."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import psycopg_pool
import uvicorn
from fastapi import FastAPI, Request
from psycopg.rows import dict_row

from engram.memory import store
from engram.postgres.arrays import Reals
from engram.search.embeddings import embed_locally

dsn, port = sys.argv[1:3]
pool = psycopg_pool.AsyncConnectionPool(
    dsn, kwargs={"autocommit": True, "row_factory": dict_row}, max_size=16, open=False
)


async def lifespan(_: FastAPI) -> Any:
    async with pool:
        await asyncio.to_thread(embed_locally, ["warm"])
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/memory/add")
async def add(asked: dict[str, Any], request: Request) -> dict[str, Any]:
    rows = await asyncio.to_thread(embed_locally, [asked["content"]])
    query = store.add(
        "default",
        asked["content"],
        asked["tags"],
        asked["metadata"],
        key=request.headers["idempotency-key"],
        vector=Reals(rows[0]),
    )
    async with pool.connection() as connection:
        cursor = await connection.execute(query.statement.text, query.params)
        added = query.read(await cursor.fetchall())  # type: ignore[arg-type]  # the pool makes mappings
    return {"id": str(added.id), "primary_sector": "semantic", "sectors": ["semantic"]}


uvicorn.run(app, port=int(port), loop="uvloop", http="httptools", log_level="warning", access_log=False)
