"""Items, what happened to them, and the files that belong to them.

`request_id` is the id that an idempotency key stands for: what was made under
it is found again, never made twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.types.json import Jsonb

from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, Read, Row, T, any_row, maybe_row, one_row, rows, scalar
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import any_of, tokenize, tsvector

SQL = load_sql("engram.logbook", "items.sql")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; who may read it follows from its space."""

    event_type: str
    target_space: str
    content_md: str = ""
    item_id: int | None = None
    actor_user_id: str | None = None
    payload_json: dict[str, Any] | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Where an event is: a repeated request finds it where its first try put it."""

    event_id: int
    target_space: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file whose bytes are in the artifact store under `artifact_key`."""

    kind: str
    artifact_key: str
    sha256: str
    size_bytes: int
    item_id: int | None = None
    owner: str | None = None
    meta_json: dict[str, Any] | None = None
    target_space: str | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """`fresh` False: its owner had the same bytes in this space and item already."""

    attachment_id: int
    fresh: bool


@primitive
def create_item(
    item_type: str,
    title: str,
    project_key: str,
    owner_user_id: str | None = None,
    meta_json: dict[str, Any] | None = None,
    config: Config | None = None,
    *,
    request_id: str | None = None,
) -> Query[int]:
    params = {
        "item_type": item_type,
        "title": title,
        "project_key": project_key,
        "owner_user_id": owner_user_id,
        "meta_json": Jsonb(meta_json or {}),
        "request_id": request_id,
        "words": tsvector(tokenize(f"{item_type} {title}")),
    }
    return Query(SQL["create_item"], scalar, params)


@primitive
def get_item(item_id: int, config: Config | None = None) -> Query[dict[str, Any] | None]:
    return Query(SQL["get_item"], maybe_row, {"item_id": item_id})


@primitive
def close_item(item_id: int, config: Config | None = None) -> Query[bool]:
    """False: there is no such item, or it was closed before."""
    return Query(SQL["close_item"], any_row, {"item_id": item_id})


@primitive
def list_items(
    project_key: str | Sequence[str],
    status: str | None = None,
    limit: int = 100,
    before_id: int | None = None,
    config: Config | None = None,
    *,
    item_id: int | None = None,
    text: str | None = None,
) -> Query[list[dict[str, Any]]]:
    """Items of one project or of several, newest first; `before_id` continues after the last of a page."""
    projects = [project_key] if isinstance(project_key, str) else project_key
    params = {
        "project_keys": list(dict.fromkeys(projects)),
        "item_id": item_id,
        "status": status,
        "asked": _asked(text),
        "limit": limit,
        "before_id": before_id,
    }
    return Query(SQL["list_items"], rows, params)


@primitive
def add_event(
    event_type: str,
    target_space: str,
    content_md: str = "",
    item_id: int | None = None,
    actor_user_id: str | None = None,
    payload_json: dict[str, Any] | None = None,
    config: Config | None = None,
) -> Query[int]:
    """Something that happened; who may read it follows from its space."""
    event = Event(event_type, target_space, content_md, item_id, actor_user_id, payload_json)
    return _event(event, lambda found: int(one_row(found)["event_id"]))


def record_event(event: Event) -> Query[Recorded]:
    return _event(event, lambda found: Recorded(**one_row(found)))


@primitive
def list_events(
    spaces: Sequence[str],
    item_id: int | None = None,
    event_type: str | None = None,
    text: str | None = None,
    limit: int = 100,
    before_id: int | None = None,
    config: Config | None = None,
) -> Query[list[dict[str, Any]]]:
    """Events within the given spaces, newest first; `text` keeps those with any of its words."""
    params = {
        "spaces": list(dict.fromkeys(spaces)),
        "item_id": item_id,
        "event_type": event_type,
        "asked": _asked(text),
        "limit": limit,
        "before_id": before_id,
    }
    return Query(SQL["list_events"], rows, params)


@primitive
def add_attachment(
    kind: str,
    artifact_key: str,
    sha256: str,
    size_bytes: int,
    item_id: int | None = None,
    owner: str | None = None,
    meta_json: dict[str, Any] | None = None,
    config: Config | None = None,
    *,
    target_space: str | None = None,
) -> Query[int]:
    """Record a file whose bytes are in the artifact store; what its owner has there keeps its id.

    `target_space` says who may read it: its owner alone unless told otherwise.
    """
    attachment = Attachment(kind, artifact_key, sha256, size_bytes, item_id, owner, meta_json, target_space)
    return _attachment(attachment, lambda found: int(one_row(found)["attachment_id"]))


def attach(attachment: Attachment) -> Query[Attached]:
    return _attachment(attachment, lambda found: Attached(**one_row(found)))


@primitive
def get_attachment(attachment_id: int, config: Config | None = None) -> Query[dict[str, Any] | None]:
    return Query(SQL["get_attachment"], maybe_row, {"attachment_id": attachment_id})


@primitive
def list_attachments(item_id: int, config: Config | None = None) -> Query[list[dict[str, Any]]]:
    return Query(SQL["list_attachments"], rows, {"item_id": item_id})


def _event(event: Event, read: Read[T]) -> Query[T]:
    params = {
        "item_id": event.item_id,
        "event_type": event.event_type,
        "target_space": event.target_space,
        "actor_user_id": event.actor_user_id,
        "content_md": event.content_md,
        "payload_json": Jsonb(event.payload_json or {}),
        "request_id": event.request_id,
        "words": tsvector(tokenize(f"{event.event_type} {event.content_md}")),
    }
    return Query(SQL["add_event"], read, params)


def _attachment(attachment: Attachment, read: Read[T]) -> Query[T]:
    params: Row = {
        "item_id": attachment.item_id,
        "kind": attachment.kind,
        "artifact_key": attachment.artifact_key,
        "sha256": attachment.sha256,
        "size_bytes": attachment.size_bytes,
        "owner": attachment.owner,
        "meta_json": Jsonb(attachment.meta_json or {}),
        "target_space": attachment.target_space or f"private:{attachment.owner or 'local'}",
    }
    return Query(SQL["add_attachment"], read, params)


def _asked(text: str | None) -> str | None:
    return None if text is None else any_of(tokenize(text))
