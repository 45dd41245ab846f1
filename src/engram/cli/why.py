"""`engram why`: for whoever looks after engram. It asks the database itself, not a gateway."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engram.gateway.why import Explanation
    from engram.logbook.config import Config
    from engram.logbook.trace import Found

AT_ONCE = 10
WIDTH = 100


def why(
    wanted: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="An outbox row (42, outbox:42), a memory (the memory server's id, or memory:9), "
            "an audit (audit:7), a request (corr-…), or an ingest task, its document or its event. A number is an outbox row if there is such a "
            "row; corr:X is a request, whatever X looks like.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each write.")] = False,
) -> None:
    """Say what became of a write, what it waits for, since when, and what to do next.

    For operators: it reads the database itself, and shows the beginning of the
    memory's text, whoever's memory it is.
    """
    from engram.cli.outbox import running_config
    from engram.kernel.errors import NotFound
    from engram.logbook import trace

    asked = trace.Wanted.parse(wanted)
    config = running_config()
    found = trace.find(asked, AT_ONCE + 1, config)
    if not found and (told := _of_document(wanted, config)):
        print(_json(told) if as_json else "\n".join(_lines(told)), flush=True)
        return
    if not found:
        raise NotFound(
            f"nothing has the id {wanted.strip()}", hint=f"looked for it in {', '.join(asked.places())}"
        )
    meant = [one for one in found if one.kind == found[0].kind]
    for one in meant[:AT_ONCE]:
        explanation = _explained(one, config)
        print(_json(explanation) if as_json else "\n".join(_lines(explanation)), flush=True)
    if len(meant) > AT_ONCE:
        print(f"the first {AT_ONCE}; the id stands for more", file=sys.stderr)
    for other in found[len(meant) :]:
        print(f"{wanted.strip()} is also {_NAMED[other.kind].format(other.id)}", file=sys.stderr)


_NAMED = {
    "outbox": "outbox:{}",
    "memory": "memory:{}",
    "memory_id": "the memory server's id of memory:{}",
    "audit": "audit:{}",
    "correlation": "the correlation id of audit:{}",
}


def _explained(found: Found, config: Config) -> Explanation:
    from engram.gateway.outbox_worker import HEARTBEATS
    from engram.gateway.reconcile_outbox import DEADLINES_BEFORE_PARKING
    from engram.gateway.why import explain
    from engram.kernel.settings import Settings
    from engram.logbook import trace

    story = trace.story(found, heartbeats=HEARTBEATS, parked_after=DEADLINES_BEFORE_PARKING, config=config)
    return explain(found, story, max_retries=Settings.load().outbox_max_retries)


def _of_document(wanted: str, config: Config) -> Explanation | None:
    from uuid import UUID

    from engram.cli.why_task import explained
    from engram.ingest import events
    from engram.logbook.connection import run

    try:
        known_as = UUID(wanted.strip().removeprefix("task:").removeprefix("event:"))
    except ValueError:
        return None
    story = run(events.story(known_as), config)
    return explained(story) if story else None


def _lines(told: Explanation) -> Iterator[str]:
    from engram.gateway.why import at, clock

    yield f"{told.subject}  {told.space}" + (f"  “{told.excerpt}”" if told.excerpt else "")
    if told.asked:
        yield from _wrapped(f"decided: {told.asked}")
    since = f" since {at(told.since, told.now)}" if told.since else ""
    yield from _wrapped(f"{told.state}{since}: {told.said}")
    yield "what happened"
    if told.audits_left_out:
        yield f"  ({told.audits_left_out} audits are left out)"
    for event in told.timeline:
        often = f" ({event.times} times, last {clock(event.last_at)})" if event.last_at else ""
        yield f"  {clock(event.at)}  {event.source:<10}  {event.said}{often}"
    yield "what to do"
    if not told.next:
        yield "  nothing"
    for step in told.next:
        yield f"  {step.command}\n      {step.why}"


def _wrapped(text: str) -> list[str]:
    from textwrap import wrap

    return wrap(
        text,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _json(told: Explanation) -> str:
    from dataclasses import asdict

    return json.dumps(asdict(told), ensure_ascii=False, default=lambda value: value.isoformat())
