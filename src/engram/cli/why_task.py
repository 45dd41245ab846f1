"""What `engram why` says of an ingest task: its transitions and its events in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from engram.gateway.timeline import Event, excerpt
from engram.gateway.why import Explanation, Step, Verdict

Story = dict[str, Any]


def explained(story: Story) -> Explanation:
    verdict = _verdict(story)
    return Explanation(
        subject=f"task:{story['id']}",
        space=f"of {excerpt(story['owner'])}",
        excerpt=excerpt(story["title"]),
        state=verdict.state,
        said=verdict.said,
        since=verdict.since,
        now=story["now"],
        next=verdict.steps,
        timeline=sorted(_happened(story), key=lambda event: event.at),
    )


def _happened(story: Story) -> Iterator[Event]:
    for step in story["transitions"]:
        more = f": {excerpt(step['message'], 200)}" if step["message"] else ""
        yield Event(_moment(step["at"]), "task", f"{step['said']}{more}")
    for event in story["events"]:
        yield Event(_moment(event["created_at"]), "event", f"event {event['id']} was written for Kafka")
        if event["sent_at"]:
            yield Event(_moment(event["sent_at"]), "event", f"event {event['id']} was published")


def _verdict(story: Story) -> Verdict:
    newest = story["events"][-1] if story["events"] else None
    since, again = story["updated_at"], Step(f"engram ingest retry {story['id']}", "tries it once more")
    match story["status"]:
        case "SUCCEEDED":
            return Verdict("SUCCEEDED", "its passages can be searched", since)
        case "DEAD":
            said = f"after {story['attempt_count']} failure(s): {excerpt(story['last_error'] or '', 300)}"
            return Verdict("DEAD", said, since, (again,))
        case "RUNNING":
            said = f"{story['locked_by']} works on it; its lease ends {story['lease_ends_at']:%H:%M:%S} UTC unless renewed"
            return Verdict("RUNNING", said, since)
    if newest and newest["status"] == "DEAD":
        said = f"Kafka could not be told of it, {newest['attempt_count']} times: {excerpt(newest['last_error'], 300)}"
        first = Step("engram doctor", "says whether the broker answers")
        return Verdict(story["status"], said, since, (first, again))
    if newest and newest["status"] in ("NEW", "RETRYING"):
        return Verdict(story["status"], _unpublished(newest), since, (_PUBLISHER,))
    if story["status"] == "RETRYING":
        due = story["next_retry_at"]
        when = "now" if due is None or due <= story["now"] else f"at {due:%Y-%m-%d %H:%M:%S} UTC"
        said = f"it failed {story['attempt_count']} time(s), last: {excerpt(story['last_error'] or '', 300)}; due {when}"
        return Verdict("RETRYING", said, since, (_WORKER,))
    told = "waits for a worker" if newest or story["stream_id"] else "is put on the queue within seconds"
    return Verdict("QUEUED", told, since, (_WORKER,))


_WORKER = Step("engram worker ingest", "if none runs; `engram up` runs one")
_PUBLISHER = Step("engram worker publisher", "if none runs; `engram up` runs one with INGEST_QUEUE=kafka")


def _unpublished(event: dict[str, Any]) -> str:
    if event["status"] == "NEW":
        return "its event waits to be published to Kafka"
    due = _moment(event["next_retry_at"])
    failed = f"its event could not be published {event['attempt_count']} time(s)"
    return f"{failed}: {excerpt(event['last_error'], 300)}; again at {due:%H:%M:%S} UTC"


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
