"""Items, what happened to them, and the files that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.types.json import Jsonb

from engram.logbook.config import Config
from engram.logbook.primitive import primitive
from engram.postgres.query import Query, any_row, maybe_row, rows, scalar
from engram.postgres.sqlfile import load_sql
from engram.search.tokens import any_of, tokenize, tsvector

SQL = load_sql("engram.logbook", "items.sql")


@primitive
def create_item(
    item_type: str,
    title: str,
    project_key: str,
    owner_user_id: str | None = None,
    meta_json: dict[str, Any] | None = None,
    config: Config | None = None,
) -> Query[int]:
    params = {
        "item_type": item_type,
        "title": title,
        "project_key": project_key,
        "owner_user_id": owner_user_id,
        "meta_json": Jsonb(meta_json or {}),
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
    project_key: str,
    status: str | None = None,
    limit: int = 100,
    before_id: int | None = None,
    config: Config | None = None,
) -> Query[list[dict[str, Any]]]:
    """Newest first; `before_id` continues after the last one of a page."""
    params = {"project_key": project_key, "status": status, "limit": limit, "before_id": before_id}
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
    params = {
        "item_id": item_id,
        "event_type": event_type,
        "target_space": target_space,
        "actor_user_id": actor_user_id,
        "content_md": content_md,
        "payload_json": Jsonb(payload_json or {}),
        "words": tsvector(tokenize(f"{event_type} {content_md}")),
    }
    return Query(SQL["add_event"], scalar, params)


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
        "spaces": list(spaces),
        "item_id": item_id,
        "event_type": event_type,
        "asked": any_of(tokenize(text)) if text is not None else None,
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
) -> Query[int]:
    """Record a file whose bytes are in the artifact store under `artifact_key`."""
    params = {
        "item_id": item_id,
        "kind": kind,
        "artifact_key": artifact_key,
        "sha256": sha256,
        "size_bytes": size_bytes,
        "owner": owner,
        "meta_json": Jsonb(meta_json or {}),
    }
    return Query(SQL["add_attachment"], scalar, params)


@primitive
def get_attachment(attachment_id: int, config: Config | None = None) -> Query[dict[str, Any] | None]:
    return Query(SQL["get_attachment"], maybe_row, {"attachment_id": attachment_id})


@primitive
def list_attachments(item_id: int, config: Config | None = None) -> Query[list[dict[str, Any]]]:
    return Query(SQL["list_attachments"], rows, {"item_id": item_id})
