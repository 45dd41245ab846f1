"""Documents in: upload, what became of it, try again, delete. Field names are camelCase here."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from engram.api.caller import caller_of
from engram.api.routes.tools import FAILURES
from engram.api.services import Services
from engram.api.tools.base import KEY_SHAPE
from engram.gateway import callers
from engram.ingest.lifecycle import FINAL
from engram.ingest.tasks import Place
from engram.ingest.uploads import Kept, Uploads
from engram.kernel.content import why_unstorable
from engram.kernel.errors import InputError, NotFound
from engram.kernel.logs import fields
from engram.logbook.idempotency_keys import Answer
from engram.postgres.query import Row

log = logging.getLogger(__name__)

UPLOAD_PATH = "/api/knowledge/documents/upload-async"
# What the multipart wrapping may add to a document.
WRAPPING_BYTES = 64 << 10
MAX_TITLE_CHARS = 300
EVENT_SECONDS = 0.25
SILENCE_SECONDS = 15.0

routes = APIRouter(prefix="/api/knowledge", tags=["knowledge"])

Status = Literal["QUEUED", "RUNNING", "RETRYING", "SUCCEEDED", "DEAD"]
Limit = Annotated[int, Query(ge=1, le=200, description="How many at most.")]
Cursor = Annotated[str | None, Query(max_length=200, description="nextCursor of the page before.")]


class _Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class UploadReply(_Camel):
    task_id: UUID
    document_id: UUID
    status: Status


class TransitionReply(_Camel):
    from_status: str | None
    to_status: str
    attempt_count: int
    message: str | None
    created_at: datetime


class TaskSummary(_Camel):
    task_id: UUID
    document_id: UUID
    status: Status
    progress: int
    processed_segments: int
    total_segments: int | None
    attempt_count: int
    next_retry_at: datetime | None
    last_error: str | None
    error_message: str | None
    created_at: datetime
    updated_at: datetime


class TaskReply(TaskSummary):
    transitions: list[TransitionReply]


class TasksReply(_Camel):
    tasks: list[TaskSummary]
    next_cursor: str | None


class DocumentReply(_Camel):
    document_id: UUID
    title: str
    filename: str
    media_type: str
    sha256: str
    bytes: int
    status: Literal["PENDING", "READY", "FAILED"]
    segments: int
    created_at: datetime
    updated_at: datetime


class DocumentsReply(_Camel):
    documents: list[DocumentReply]
    next_cursor: str | None


class DeletedReply(_Camel):
    document_id: UUID
    deleted: bool


_UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "The document."},
                        "title": {"type": "string", "maxLength": MAX_TITLE_CHARS},
                    },
                }
            }
        },
    }
}


@routes.post(
    "/documents/upload-async",
    status_code=202,
    response_model=UploadReply,
    responses={**FAILURES, 422: FAILURES[400]},
    openapi_extra=_UPLOAD_BODY,
)
async def upload(
    request: Request,
    idempotency_key: Annotated[
        str | None, Header(alias="Idempotency-Key", json_schema_extra=KEY_SHAPE)
    ] = None,
) -> Response:
    """Take a document in and answer at once; the task says what becomes of it.

    The same bytes again are the same document, with a new task.
    """
    owner = _owner(request, callers.WRITE)
    services: Services = request.app.state.services
    try:
        async with request.form(max_files=1, max_fields=4) as form:
            file, title = _file(form), _title(form)
            async with services.uploads.keep(file.file, file.filename or "") as kept:
                answer = await _entered(services, owner, kept, title, idempotency_key)
    except ClientDisconnect:
        log.info("upload.broken_off", extra=fields(owner=owner))
        return Response(status_code=400)  # nobody is left to read it
    return JSONResponse(answer.body, answer.status_code, headers=answer.headers)


@routes.get("/tasks", response_model=TasksReply, responses=FAILURES)
async def list_tasks(
    request: Request,
    status: Status | None = None,
    document_id: Annotated[UUID | None, Query(alias="documentId")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    """Your tasks, the newest first."""
    owner, before = _owner(request, callers.READ), _place(cursor)
    found = await _uploads(request).list_tasks(
        owner, limit + 1, status=status, document_id=document_id, before=before
    )
    tasks = [_summary(row) for row in found[:limit]]
    return _json(TasksReply(tasks=tasks, next_cursor=_next(found, limit)))


@routes.get("/tasks/{taskId}", response_model=TaskReply, responses=FAILURES)
async def show_task(request: Request, task_id: Annotated[UUID, Path(alias="taskId")]) -> Response:
    """A task: its state, how far it is, what went wrong, and everything that became of it."""
    return _json(_task(await _uploads(request).task(_owner(request, callers.READ), task_id)))


@routes.get(
    "/tasks/{taskId}/events",
    response_class=StreamingResponse,
    responses={**FAILURES, 200: {"content": {"text/event-stream": {}}}},
)
async def task_events(request: Request, task_id: Annotated[UUID, Path(alias="taskId")]) -> Response:
    """The task whenever it changes, as server-sent events; ends when it is SUCCEEDED or DEAD."""
    owner, uploads = _owner(request, callers.READ), _uploads(request)
    first = await uploads.task(owner, task_id)
    return StreamingResponse(
        _changes(uploads, owner, task_id, first),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@routes.post("/tasks/{taskId}/retry", status_code=202, response_model=UploadReply, responses=FAILURES)
async def retry_task(request: Request, task_id: Annotated[UUID, Path(alias="taskId")]) -> Response:
    """Try a DEAD task again, with all its attempts."""
    made = await _uploads(request).retry(_owner(request, callers.WRITE), task_id)
    reply = UploadReply(task_id=made["id"], document_id=made["document_id"], status=made["status"])
    return _json(reply, 202)


@routes.get("/documents", response_model=DocumentsReply, responses=FAILURES)
async def list_documents(request: Request, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Your documents, the newest first."""
    owner, before = _owner(request, callers.READ), _place(cursor)
    found = await _uploads(request).documents(owner, limit + 1, before)
    documents = [_document(row) for row in found[:limit]]
    return _json(DocumentsReply(documents=documents, next_cursor=_next(found, limit)))


@routes.get("/documents/{documentId:uuid}", response_model=DocumentReply, responses=FAILURES)
async def show_document(request: Request, document_id: Annotated[UUID, Path(alias="documentId")]) -> Response:
    """One document."""
    return _json(_document(await _uploads(request).document(_owner(request, callers.READ), document_id)))


@routes.delete("/documents/{documentId:uuid}", response_model=DeletedReply, responses=FAILURES)
async def delete_document(
    request: Request, document_id: Annotated[UUID, Path(alias="documentId")]
) -> Response:
    """Delete a document with its tasks and everything that could be found of it."""
    await _uploads(request).delete(_owner(request, callers.WRITE), document_id)
    return _json(DeletedReply(document_id=document_id, deleted=True))


async def _changes(uploads: Uploads, owner: str, task_id: UUID, row: Row) -> AsyncIterator[str]:
    told, silent = "", 0.0
    while True:
        said = _task(row).model_dump_json(by_alias=True)
        if said != told:
            yield f"event: task\ndata: {said}\n\n"
            told, silent = said, 0.0
        elif silent >= SILENCE_SECONDS:
            yield ": still here\n\n"
            silent = 0.0
        if row["status"] in FINAL:
            return
        await asyncio.sleep(EVENT_SECONDS)
        silent += EVENT_SECONDS
        try:
            row = await uploads.task(owner, task_id)
        except NotFound:
            yield 'event: gone\ndata: {"message": "the document was deleted"}\n\n'
            return


def _owner(request: Request, scope: str) -> str:
    return callers.acting(caller_of(request.scope), None).allowed(scope).actor


def _uploads(request: Request) -> Uploads:
    services: Services = request.app.state.services
    return services.uploads


async def _entered(services: Services, owner: str, kept: Kept, title: str | None, key: str | None) -> Answer:
    """Its document and task, once for the key."""
    asked = json.dumps([kept.artifact.sha256, kept.filename, title])
    async with services.idempotency.request(
        owner, key, path=UPLOAD_PATH, method="POST", body=asked
    ) as reserved:
        if reserved.response is not None:
            return reserved.response
        made = await services.uploads.enter(owner, kept, title, UUID(reserved.resource_id))
        reply = UploadReply(task_id=made["id"], document_id=made["document_id"], status=made["status"])
        return await reserved.save(status_code=202, body=reply.model_dump(mode="json", by_alias=True))


def _file(form: FormData) -> UploadFile:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InputError("there is no file", fields={"file": "must be a part with a file name"})
    return file


def _title(form: FormData) -> str | None:
    title = form.get("title")
    if title is None or title == "":
        return None
    problem = "must be text" if not isinstance(title, str) else why_unstorable(title)
    if problem is None and isinstance(title, str) and len(title) <= MAX_TITLE_CHARS:
        return title
    problem = problem or f"must have at most {MAX_TITLE_CHARS} characters"
    raise InputError(f"title {problem}", fields={"title": problem})


def _progress(row: Row) -> int:
    """Per cent."""
    if row["status"] == "SUCCEEDED":
        return 100
    return min(99, 100 * row["processed_segments"] // row["total_segments"]) if row["total_segments"] else 0


def _summary(row: Row) -> TaskSummary:
    return TaskSummary.model_validate({**row, "task_id": row["id"], "progress": _progress(row)})


def _task(row: Row) -> TaskReply:
    return TaskReply.model_validate({**row, "task_id": row["id"], "progress": _progress(row)})


def _document(row: Row) -> DocumentReply:
    return DocumentReply.model_validate({**row, "document_id": row["id"]})


def _json(reply: _Camel, status_code: int = 200) -> Response:
    return JSONResponse(reply.model_dump(mode="json", by_alias=True), status_code)


def _next(found: list[Row], limit: int) -> str | None:
    """Where the next page starts, if there is one."""
    if len(found) <= limit:
        return None
    last: dict[str, Any] = found[limit - 1]
    return base64.urlsafe_b64encode(f"{last['created_at'].isoformat()} {last['id']}".encode()).decode()


def _place(cursor: str | None) -> Place | None:
    if cursor is None:
        return None
    try:
        at, _, last = base64.urlsafe_b64decode(cursor.encode("ascii")).decode("ascii").partition(" ")
        place = Place(datetime.fromisoformat(at), UUID(last))
        place.at.utctimetuple()
    except (ValueError, OverflowError, binascii.Error):
        raise InputError(
            "this is no cursor", fields={"cursor": "must be nextCursor of the page before"}
        ) from None
    if place.at.tzinfo is None:
        raise InputError("this is no cursor", fields={"cursor": "must be nextCursor of the page before"})
    return place
