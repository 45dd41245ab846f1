"""The bare composite's work: two commits and one call to store, one call and one look-up to query."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import httpx2
import psycopg_pool

from engram.search.tokens import tokenize, tsvector

BEGIN = """
WITH audit AS (
    INSERT INTO governance.write_audit
        (actor_user_id, requested_space, target_space, action, status, payload_sha)
    VALUES ('local', 'private:local', 'private:local', 'pending', 'pending', %(sha)s) RETURNING audit_id)
INSERT INTO logbook.memories
    (target_space, payload_sha, payload_md, state, audit_id, intent_at, intent_seconds, words)
SELECT 'private:local', %(sha)s, %(text)s, 'intent', audit_id, now(), 8, %(words)s::tsvector
FROM audit RETURNING audit_id"""
FINISH = """
WITH memory AS (UPDATE logbook.memories SET state = 'stored', memory_id = %(id)s WHERE audit_id = %(audit)s)
UPDATE governance.write_audit
SET action = 'allow', status = 'success', memory_id = %(id)s, finalized_at = now()
WHERE audit_id = %(audit)s"""
KNOWN = "SELECT memory_id, payload_md, target_space FROM logbook.memories WHERE memory_id = ANY(%(ids)s)"

dsn, url, key, port = sys.argv[1:5]
pool = psycopg_pool.AsyncConnectionPool(dsn, kwargs={"autocommit": True}, max_size=16, open=False)
# The server ends a connection that was idle for five seconds.
http = httpx2.AsyncClient(
    base_url=url, headers={"x-api-key": key}, trust_env=False, limits=httpx2.Limits(keepalive_expiry=2)
)


async def run(sql: str, **params: Any) -> list[Any]:
    async with pool.connection() as connection:
        cursor = await connection.execute(sql, params)
        return await cursor.fetchall() if cursor.description else []


async def memory_store(payload_md: str) -> dict[str, Any]:
    sha = hashlib.sha256(payload_md.encode()).hexdigest()
    ((audit,),) = await run(BEGIN, sha=sha, text=payload_md, words=tsvector(tokenize(payload_md)))
    body = {"content": payload_md, "tags": ["space:private:local", f"sha:{sha}"], "metadata": {}}
    answer = (await http.post("/memory/add", json=body, headers={"Idempotency-Key": sha})).json()
    await run(FINISH, id=answer["id"], audit=audit)
    return {"ok": True, "action": "allow", "memory_id": answer["id"]}


async def memory_query(query: str) -> dict[str, Any]:
    hits = (await http.post("/memory/query", json={"query": query, "k": 30})).json()["matches"]
    rows = await run(KNOWN, ids=[hit["id"] for hit in hits])
    found = [{"memory_id": i, "content": content, "space": space} for i, content, space in rows[:10]]
    return {"ok": True, "results": found}
