"""The logbook's tools: items that work is about, events that happened, and looking both up.

An item is read by those who may read its project's team space; an event by
those who may read its own space. To everybody else they do not exist.

Policy judges an event as it judges a memory. An item is no more than a title
that its project sees, and is not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engram.gateway.callers import Caller
from engram.gateway.inputs import (
    actor_problem,
    json_problem,
    number_problem,
    project_space,
    refuse,
    text_problem,
)
from engram.gateway.placement import Placement
from engram.gateway.spaces import parse_space, private_space, team_space
from engram.kernel.content import MAX_ID
from engram.kernel.errors import NotFound
from engram.logbook import items
from engram.logbook.items import Event
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

MAX_TYPE_CHARS = 64
MAX_TITLE_CHARS = 300
MAX_EVENT_CHARS = 20_000
MAX_ASKED_CHARS = 1_000
MAX_PAGE = 100
MAX_SPACES = 50
STATUSES = ("open", "closed")


@dataclass(frozen=True, slots=True)
class ItemRequest:
    caller: Caller
    correlation_id: str
    item_type: str
    title: str
    project_key: str | None = None
    meta_json: dict[str, Any] = field(default_factory=dict)
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class ItemReply:
    ok: bool
    item_id: int
    project_key: str
    correlation_id: str
    message: str


@dataclass(frozen=True, slots=True)
class EventRequest:
    caller: Caller
    correlation_id: str
    event_type: str
    content_md: str
    target_space: str | None = None
    item_id: int | None = None
    payload_json: dict[str, Any] = field(default_factory=dict)
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class EventReply:
    """`space_written` is where it is; `diverted`: policy did not let it into the space asked for."""

    ok: bool
    event_id: int
    space_written: str
    diverted: bool
    correlation_id: str
    message: str


@dataclass(frozen=True, slots=True)
class LookRequest:
    """`before_id` continues the events of an earlier page, `before_item_id` its items."""

    caller: Caller
    correlation_id: str
    text: str | None = None
    item_id: int | None = None
    event_type: str | None = None
    spaces: list[str] | None = None
    status: str | None = None
    limit: int = 20
    before_id: int | None = None
    before_item_id: int | None = None


@dataclass(frozen=True, slots=True)
class LookReply:
    """Newest first. A `next_...` that is not null continues that list."""

    ok: bool
    items: list[dict[str, Any]]
    events: list[dict[str, Any]]
    next_before_item_id: int | None
    next_before_id: int | None
    spaces_searched: list[str]
    correlation_id: str
    message: str


class Notebook:
    def __init__(self, db: AsyncExecutor, placement: Placement, project_key: str) -> None:
        self._db = db
        self._placement = placement
        self._project = project_key

    async def create_item(self, request: ItemRequest) -> ItemReply:
        refuse(
            {
                "actor_user_id": actor_problem(request.caller.actor),
                "item_type": text_problem(request.item_type, MAX_TYPE_CHARS),
                "title": text_problem(request.title, MAX_TITLE_CHARS),
                "meta_json": json_problem(request.meta_json),
            }
        )
        project = self._project if request.project_key is None else request.project_key
        request.caller.check_writable(str(project_space(project)))
        query = items.create_item.query(
            request.item_type,
            request.title,
            project,
            request.caller.actor,
            request.meta_json,
            request_id=request.request_id,
        )
        item_id = await self._db.run(query)
        said = f"item {item_id} of {project}"
        return ItemReply(True, item_id, project, request.correlation_id, said)

    async def add_event(self, request: EventRequest) -> EventReply:
        refuse(
            {
                "event_type": text_problem(request.event_type, MAX_TYPE_CHARS),
                "content_md": text_problem(request.content_md, MAX_EVENT_CHARS),
                "payload_json": json_problem(request.payload_json),
            }
        )
        placed = await self._placement.place(request.caller, request.target_space)
        if request.item_id is not None:
            await require_item(self._db, request.caller, request.item_id)
        recorded = await self._db.run(items.record_event(_event(request, placed.space)))
        return EventReply(
            ok=True,
            event_id=recorded.event_id,
            space_written=recorded.target_space,
            diverted=recorded.target_space != placed.requested,
            correlation_id=request.correlation_id,
            message=f"event {recorded.event_id} {placed.told(recorded.target_space)}",
        )

    async def look(self, request: LookRequest) -> LookReply:
        _check(request)
        spaces = self._readable(request)
        found_items = await self._items(request, spaces) if _wants_items(request) else []
        found_events = await self._events(request, spaces) if _wants_events(request) else []
        shown_items, more_items = _page(found_items, request.limit, "item_id")
        shown_events, more_events = _page(found_events, request.limit, "event_id")
        return LookReply(
            ok=True,
            items=shown_items,
            events=shown_events,
            next_before_item_id=more_items,
            next_before_id=more_events,
            spaces_searched=spaces,
            correlation_id=request.correlation_id,
            message=f"{len(shown_items)} item(s), {len(shown_events)} event(s)"
            + ("; there are more" if more_items or more_events else ""),
        )

    def _readable(self, request: LookRequest) -> list[str]:
        caller = request.caller
        if request.spaces is None:
            return caller.readable([str(team_space(self._project)), str(private_space(caller.actor))])
        caller.check_readable(request.spaces)
        return list(dict.fromkeys(request.spaces))

    async def _items(self, request: LookRequest, spaces: Sequence[str]) -> list[Row]:
        parsed = [space for text in spaces if (space := parse_space(text))]
        query = items.list_items.query(
            [space.name for space in parsed if space.kind == "team"],
            request.status,
            request.limit + 1,
            request.before_item_id,
            item_id=request.item_id,
            text=request.text,
        )
        return await self._db.run(query)

    async def _events(self, request: LookRequest, spaces: Sequence[str]) -> list[Row]:
        query = items.list_events.query(
            spaces, request.item_id, request.event_type, request.text, request.limit + 1, request.before_id
        )
        return await self._db.run(query)


async def require_item(db: AsyncExecutor, caller: Caller, item_id: int) -> None:
    """`NotFound` unless the caller may see the item; whether it exists is not told."""
    found = (
        await db.run(items.get_item.query(item_id)) if number_problem(item_id, 1, MAX_ID) is None else None
    )
    if found is None or not caller.may_read(team_space(found["project_key"])):
        raise NotFound(f"there is no item {item_id}", hint="logbook_query lists the items you can see")


def _event(request: EventRequest, space: str) -> Event:
    return Event(
        event_type=request.event_type,
        target_space=space,
        content_md=request.content_md,
        item_id=request.item_id,
        actor_user_id=request.caller.actor,
        payload_json=request.payload_json,
        request_id=request.request_id,
    )


def _check(request: LookRequest) -> None:
    ids = {name: getattr(request, name) for name in ("item_id", "before_id", "before_item_id")}
    refuse(
        {
            "actor_user_id": actor_problem(request.caller.actor),
            "text": None if request.text is None else text_problem(request.text, MAX_ASKED_CHARS),
            "event_type": None
            if request.event_type is None
            else text_problem(request.event_type, MAX_TYPE_CHARS),
            "status": None
            if request.status in (None, *STATUSES)
            else f"must be one of {', '.join(STATUSES)}",
            "spaces": None if len(request.spaces or ()) <= MAX_SPACES else f"must be at most {MAX_SPACES}",
            "limit": number_problem(request.limit, 1, MAX_PAGE),
            **{name: None if n is None else number_problem(n, 1, MAX_ID) for name, n in ids.items()},
        }
    )


def _wants_items(request: LookRequest) -> bool:
    """Not on a further page of events alone, nor when only a type of event is asked for."""
    further = request.before_id is not None and request.before_item_id is None
    return not further and (request.event_type is None or request.status is not None)


def _wants_events(request: LookRequest) -> bool:
    further = request.before_item_id is not None and request.before_id is None
    return not further and (request.status is None or request.event_type is not None)


def _page(found: list[Row], limit: int, key: str) -> tuple[list[dict[str, Any]], int | None]:
    """At most `limit` of them, and where the next page starts if there is one."""
    shown = found[:limit]
    return [_shown(row) for row in shown], shown[-1][key] if len(found) > limit else None


def _shown(row: Row) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}
