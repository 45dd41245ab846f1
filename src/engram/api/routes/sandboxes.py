"""One sandbox and what is in it. Making one is a tool; see `api/tools/sandboxes.py`.

A command's output comes as it is written when the caller accepts
`text/event-stream`: `started`, then `stdout` and `stderr`, then `exit` with the
outcome, or `error`. Hanging up ends the command.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Path, Query, Request
from pydantic import BaseModel, Field, TypeAdapter
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engram.api.caller import caller_of
from engram.api.errors import envelope_of
from engram.api.routes.tools import FAILURES
from engram.api.services import Services
from engram.api.tools.base import KEY_SHAPE, Checked
from engram.api.tools.sandboxes import (
    CommandArguments,
    ExecReply,
    SandboxReply,
    exec_reply,
    sandbox_reply,
)
from engram.gateway import callers
from engram.kernel import correlation
from engram.kernel.errors import EngramError, InputError
from engram.logbook.idempotency import IdempotentRequest
from engram.logbook.idempotency_keys import Answer
from engram.sandboxes.driver import Ended, Output, Stream
from engram.sandboxes.lifecycle import SANDBOX
from engram.sandboxes.service import outcome_of

FILE_PATHS = "/v1/sandboxes/.+/files/.*"
STREAM = "text/event-stream"
BYTES = "application/octet-stream"

routes = APIRouter(prefix="/v1/sandboxes", tags=["v1"])

Actor = Annotated[
    str | None,
    Query(alias="actor_user_id", max_length=200, description="Who is acting, where no tokens are used."),
]
SandboxId = Annotated[str, Path(max_length=64, description="As the reply to its making said.")]
FilePath = Annotated[str, Path(description="Below the sandbox's folder; no links, no '..'.")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", json_schema_extra=KEY_SHAPE)]
_BODY = {
    "requestBody": {"required": False, "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}
}
_SANDBOX = TypeAdapter(SandboxReply)


class TtlArguments(Checked):
    ttl_seconds: int = Field(ge=1, lt=1 << 31, description="So long from now; it never becomes shorter.")


class SandboxesReply(BaseModel):
    sandboxes: list[SandboxReply]
    next_cursor: str | None = Field(description="For the next page; null: this is the last.")
    correlation_id: str


class FileReply(BaseModel):
    path: str
    size_bytes: int
    correlation_id: str


@routes.get("", response_model=SandboxesReply, responses=FAILURES, name="list_sandboxes")
async def list_(
    request: Request,
    actor: Actor = None,
    status: Annotated[str | None, Query(description=f"Only these: {', '.join(SANDBOX.states)}.")] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="How many at most.")] = 50,
    cursor: Annotated[str | None, Query(max_length=20, description="next_cursor of the page before.")] = None,
) -> Response:
    """The caller's sandboxes, newest first."""
    owner, services = _owner(request, actor, callers.READ)
    found = await services.sandboxes.page(owner, status=status, before=_place(cursor), limit=limit + 1)
    more = len(found) > limit
    reply = SandboxesReply(
        sandboxes=[sandbox_reply(row) for row in found[:limit]],
        next_cursor=str(found[limit - 1].number) if more else None,
        correlation_id=correlation.current_or_new(),
    )
    return JSONResponse(reply.model_dump(mode="json"))


@routes.get("/{sandbox_id}", response_model=SandboxReply, responses=FAILURES, name="get_sandbox")
async def get(request: Request, sandbox_id: SandboxId, actor: Actor = None) -> Response:
    """One sandbox."""
    owner, services = _owner(request, actor, callers.READ)
    return _told(sandbox_reply(await services.sandboxes.get(owner, sandbox_id)))


@routes.delete("/{sandbox_id}", status_code=204, responses=FAILURES, name="delete_sandbox")
async def delete(request: Request, sandbox_id: SandboxId, actor: Actor = None) -> Response:
    """End what runs in it and remove its files. To do so again changes nothing."""
    owner, services = _owner(request, actor, callers.WRITE)
    await services.sandboxes.delete(owner, sandbox_id)
    return Response(status_code=204)


@routes.post(
    "/{sandbox_id}/extend_ttl", response_model=SandboxReply, responses=FAILURES, name="extend_sandbox"
)
async def extend(
    request: Request, sandbox_id: SandboxId, asked: Annotated[TtlArguments, Body()], actor: Actor = None
) -> Response:
    """Put its end off."""
    owner, services = _owner(request, actor, callers.WRITE)
    return _told(sandbox_reply(await services.sandboxes.extend(owner, sandbox_id, asked.ttl_seconds)))


@routes.post("/{sandbox_id}/stop", response_model=SandboxReply, responses=FAILURES, name="stop_sandbox")
async def stop(request: Request, sandbox_id: SandboxId, actor: Actor = None) -> Response:
    """End what runs in it, and run nothing more. Its files can still be read."""
    owner, services = _owner(request, actor, callers.WRITE)
    return _told(sandbox_reply(await services.sandboxes.stop(owner, sandbox_id)))


@routes.post(
    "/{sandbox_id}/exec",
    response_model=ExecReply,
    responses={**FAILURES, 200: {"model": ExecReply, "content": {STREAM: {"schema": {"type": "string"}}}}},
    name="exec_in_sandbox",
)
async def exec_(
    request: Request,
    sandbox_id: SandboxId,
    asked: Annotated[CommandArguments, Body()],
    actor: Actor = None,
    key: Key = None,
) -> Response:
    """Run a command and wait for its end, or follow it as a stream of events. With a key, never twice."""
    owner, services = _owner(request, actor, callers.WRITE)
    running = _Exec(services, owner, sandbox_id, asked, key)
    if STREAM in request.headers.get("accept", ""):
        events = running.streamed()
        # Until something has started, what is wrong is a reply of its own.
        first = await anext(events)
        return _EndsWhenNobodyListens(first, events)
    return await running.answered()


@routes.put(
    "/{sandbox_id}/files/{path:path}",
    response_model=FileReply,
    responses=FAILURES,
    openapi_extra=_BODY,
    name="put_sandbox_file",
)
async def put_file(request: Request, sandbox_id: SandboxId, path: FilePath, actor: Actor = None) -> Response:
    """Write a file, whole or not at all; the folders above it are made."""
    owner, services = _owner(request, actor, callers.WRITE)
    async with aclosing(request.stream()) as content:
        size = await services.sandboxes.put_file(owner, sandbox_id, path, content)
    reply = FileReply(path=path, size_bytes=size, correlation_id=correlation.current_or_new())
    return JSONResponse(reply.model_dump())


@routes.get(
    "/{sandbox_id}/files/{path:path}",
    response_class=Response,
    responses={**FAILURES, 200: {"content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}},
    name="get_sandbox_file",
)
async def get_file(request: Request, sandbox_id: SandboxId, path: FilePath, actor: Actor = None) -> Response:
    """Read a file."""
    owner, services = _owner(request, actor, callers.READ)
    size, content = await services.sandboxes.get_file(owner, sandbox_id, path)
    return StreamingResponse(content, media_type=BYTES, headers=_file_headers(size))


@routes.delete(
    "/{sandbox_id}/files/{path:path}", status_code=204, responses=FAILURES, name="delete_sandbox_file"
)
async def delete_file(
    request: Request, sandbox_id: SandboxId, path: FilePath, actor: Actor = None
) -> Response:
    """Remove a file: also when the disk is so full that no command runs."""
    owner, services = _owner(request, actor, callers.WRITE)
    await services.sandboxes.delete_file(owner, sandbox_id, path)
    return Response(status_code=204)


class _EndsWhenNobodyListens(StreamingResponse):
    """The server by itself would notice a client that hung up only when there is something to send.

    Whatever comes first, the events are closed: who is cancelled while it sends leaves them as they are.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._rest, self._all = rest, _chained(first, rest)
        super().__init__(self._all, media_type=STREAM)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest), aclosing(self._all), asyncio.TaskGroup() as group:
            sending = group.create_task(self.stream_response(send))
            listening = group.create_task(_gone(receive))
            await asyncio.wait((sending, listening), return_when=asyncio.FIRST_COMPLETED)
            sending.cancel()
            listening.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Exec:
    """One command, once for its key."""

    def __init__(
        self, services: Services, owner: str, sandbox_id: str, asked: CommandArguments, key: str | None
    ) -> None:
        self._services = services
        self._owner, self._id, self._key = owner, sandbox_id, key
        self._asked, self._command = asked, asked.command()
        self._begun = False

    def _request(self) -> Any:
        path = f"/v1/sandboxes/{self._id}/exec"
        body = self._asked.model_dump_json()
        return self._services.idempotency.request(
            self._owner, self._key, path=path, method="POST", body=body, resumable=False
        )

    async def _known(self) -> None:
        """A key is not spent on what is not there. Without one, running it finds out."""
        if self._key is not None:
            await self._services.sandboxes.get(self._owner, self._id)

    async def answered(self) -> Response:
        await self._known()
        async with self._request() as request:
            if request.response is None:
                outcome = await self._services.sandboxes.run(self._owner, self._id, self._command)
                await request.save(status_code=200, body=asdict(exec_reply(outcome)))
            answer: Answer = request.response
            return JSONResponse(answer.body, answer.status_code, headers=answer.headers)

    async def streamed(self) -> AsyncGenerator[bytes, None]:
        await self._known()
        try:
            async with self._request() as request:
                if request.response is not None:
                    for event in _replayed(request.response.body):
                        yield event
                    return
                async with aclosing(self._followed(request)) as events:
                    async for event in events:
                        yield event
        except EngramError as error:
            if not self._begun:
                raise
            yield _event("error", envelope_of(error))

    async def _followed(self, request: IdempotentRequest) -> AsyncGenerator[bytes, None]:
        written: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        async with self._services.sandboxes.exec(self._owner, self._id, self._command) as events:
            self._begun = True
            yield _event("started", {"correlation_id": correlation.current_or_new()})
            async for event in events:
                if isinstance(event, Output):
                    written[event.stream] += event.data
                    yield _event(event.stream, _carried(event.data))
                else:
                    yield _event("exit", await self._saved(request, event, written))

    async def _saved(
        self, request: IdempotentRequest, ended: Ended, written: Mapping[Stream, bytearray]
    ) -> dict[str, Any]:
        outcome = outcome_of(ended, bytes(written["stdout"]), bytes(written["stderr"]))
        answer = await request.save(status_code=200, body=asdict(exec_reply(outcome)))
        return _without_output(answer.body)


def _replayed(body: dict[str, Any]) -> list[bytes]:
    output = [_event(name, {"text": body[name]}) for name in ("stdout", "stderr") if body[name]]
    started = _event("started", {"correlation_id": body["correlation_id"], "replayed": True})
    return [started, *output, _event("exit", _without_output(body))]


def _without_output(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("stdout", "stderr")}


def _carried(data: bytes) -> dict[str, str]:
    """As text if it is, exactly; else in base64."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for part in rest:
        yield part


def _owner(request: Request, actor: str | None, scope: str) -> tuple[str, Services]:
    services: Services = request.app.state.services
    return callers.acting(caller_of(request.scope), actor).allowed(scope).actor, services


def _told(reply: SandboxReply) -> Response:
    return JSONResponse(_SANDBOX.dump_python(reply, mode="json"))


def _place(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise InputError("that is no cursor", fields={"cursor": "must be next_cursor of the page before"})
    return int(cursor)


def _file_headers(size: int) -> dict[str, str]:
    """A file of a stranger's: nothing a browser would show or run."""
    return {
        "Content-Length": str(size),
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
    }
