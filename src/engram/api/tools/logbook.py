"""The team's record: items, events, and looking them up."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engram.api.tools.base import Arguments, Call, Tool, WriteArguments
from engram.gateway.notebook import (
    MAX_ASKED_CHARS,
    MAX_EVENT_CHARS,
    MAX_PAGE,
    MAX_SPACES,
    MAX_TITLE_CHARS,
    MAX_TYPE_CHARS,
    EventReply,
    EventRequest,
    ItemReply,
    ItemRequest,
    LookReply,
    LookRequest,
)


class ItemArguments(WriteArguments):
    item_type: str = Field(
        description="What it is, in a word: task, incident, review, ...", max_length=MAX_TYPE_CHARS
    )
    title: str = Field(description="One line.", max_length=MAX_TITLE_CHARS)
    project_key: str | None = Field(
        default=None,
        description="The project it belongs to; those who may read team:<project_key> see it."
        " By default this gateway's own.",
        max_length=128,
    )
    meta_json: dict[str, Any] | None = Field(default=None, description="Anything worth keeping beside it.")


class EventArguments(WriteArguments):
    event_type: str = Field(
        description="What happened, in a word: deploy, decision, note, ...", max_length=MAX_TYPE_CHARS
    )
    content_md: str = Field(description="What happened, as Markdown.", max_length=MAX_EVENT_CHARS)
    target_space: str | None = Field(
        default=None,
        description="Who may read it: private:<actor> (the default), team:<project> or org:<name>.",
        max_length=200,
    )
    item_id: int | None = Field(default=None, ge=1, lt=1 << 63, description="The item it happened to.")
    payload_json: dict[str, Any] | None = Field(
        default=None,
        description="The same for programs. A list of URIs as evidence_refs counts as its evidence.",
    )


class LookArguments(Arguments):
    text: str | None = Field(
        default=None, description="Keep what has any of these words.", max_length=MAX_ASKED_CHARS
    )
    item_id: int | None = Field(default=None, ge=1, lt=1 << 63, description="This item and its events.")
    event_type: str | None = Field(
        default=None, description="Events of this type; without status, no items.", max_length=MAX_TYPE_CHARS
    )
    spaces: list[str] | None = Field(
        default=None,
        description="Where to look. By default the project's team space and the actor's own.",
        max_length=MAX_SPACES,
    )
    status: Literal["open", "closed"] | None = Field(
        default=None, description="Items of this status; without event_type, no events."
    )
    limit: int = Field(
        default=20, ge=1, le=MAX_PAGE, description=f"How many of each at most, 1 to {MAX_PAGE}."
    )
    before_id: int | None = Field(
        default=None, ge=1, lt=1 << 63, description="More events: next_before_id of the page before."
    )
    before_item_id: int | None = Field(
        default=None, ge=1, lt=1 << 63, description="More items: next_before_item_id of the page before."
    )


async def logbook_create_item(call: Call[ItemArguments]) -> ItemReply:
    """Open an item in the team's record: a task, an incident, a review that events will belong to.

    Everybody who may read the project's team space sees it. Calling it twice opens
    two, unless you give an idempotency_key: look first with logbook_query.
    """
    asked = call.asked
    return await call.services.notebook.create_item(
        ItemRequest(
            caller=call.caller,
            correlation_id=call.correlation_id,
            item_type=asked.item_type,
            title=asked.title,
            project_key=asked.project_key,
            meta_json=asked.meta_json or {},
            request_id=call.request_id,
        )
    )


async def logbook_add_event(call: Call[EventArguments]) -> EventReply:
    """Record that something happened: a deployment, a decision, an outage, a step of a task.

    For what is true at a moment; what stays true belongs in memory_store. If policy
    closes the shared space, the event is kept in your private one, and diverted is
    true. Calling it twice records it twice, unless you give an idempotency_key.
    """
    asked = call.asked
    return await call.services.notebook.add_event(
        EventRequest(
            caller=call.caller,
            correlation_id=call.correlation_id,
            event_type=asked.event_type,
            content_md=asked.content_md,
            target_space=asked.target_space,
            item_id=asked.item_id,
            payload_json=asked.payload_json or {},
            request_id=call.request_id,
        )
    )


async def logbook_query(call: Call[LookArguments]) -> LookReply:
    """Look up what happened: items and events that you may read, newest first.

    Use it to see what was done before, and by whom. Give next_before_id or
    next_before_item_id back to get the next page of events or items.
    """
    asked = call.asked
    return await call.services.notebook.look(
        LookRequest(
            caller=call.caller,
            correlation_id=call.correlation_id,
            text=asked.text,
            item_id=asked.item_id,
            event_type=asked.event_type,
            spaces=asked.spaces,
            status=asked.status,
            limit=asked.limit,
            before_id=asked.before_id,
            before_item_id=asked.before_item_id,
        )
    )


TOOLS = (
    Tool(
        "logbook_create_item",
        "Open an item",
        "/logbook/items",
        "write",
        ItemArguments,
        ItemReply,
        logbook_create_item,
        repeatable=False,
    ),
    Tool(
        "logbook_add_event",
        "Record an event",
        "/logbook/events",
        "write",
        EventArguments,
        EventReply,
        logbook_add_event,
        repeatable=False,
    ),
    Tool("logbook_query", "Look it up", "/logbook/query", "read", LookArguments, LookReply, logbook_query),
)
