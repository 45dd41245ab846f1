"""Commands for whoever looks after the outbox; they ask the database itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import typer

if TYPE_CHECKING:
    from engram.logbook.config import Config

PAGE = 500
PREVIEW_CHARS = 60


class Status(StrEnum):
    pending = "pending"
    sent = "sent"
    dead = "dead"


Space = Annotated[str | None, typer.Option(help="Rows of this space.")]
OlderThan = Annotated[str | None, typer.Option(help="Rows older than this: 90s, 15m, 24h, 7d.")]
Text = Annotated[str | None, typer.Option(help="Rows with this in their text or error.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object for each row.")]


def list_(
    status: Annotated[Status | None, typer.Option(help="Rows in this state.")] = None,
    space: Space = None,
    older_than: OlderThan = None,
    text: Text = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 100,
    after: Annotated[int, typer.Option(min=0, help="Rows after this id.")] = 0,
    as_json: Json = False,
) -> None:
    """List rows of the outbox, oldest first."""
    marks = _marks(status, space, older_than, text)
    last = None
    for count, row in enumerate(_rows(running_config(), marks, after, limit + 1)):
        if count == limit:
            print(f"there are more: --after {last}, or a larger --limit", file=sys.stderr)
            return
        if count == 0 and not as_json:
            print(f"{'id':>8}  {'status':<9}{'tries':>5}  {'created':<20} {'space':<24} text or error")
        print(_json(row) if as_json else _line(row))
        last = row["outbox_id"]
    if last is None:
        print("no such row", file=sys.stderr)


def show(
    outbox_id: Annotated[int, typer.Argument(help="The row.", min=1)],
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show one row, whole, and everything that was decided about it.

    `engram why ID` says what it means and what to do.
    """
    from engram.kernel.errors import NotFound
    from engram.logbook import governance, outbox

    config = running_config()
    found = outbox.get(outbox_id, config)
    if found is None:
        raise NotFound(f"there is no outbox row {outbox_id}", hint="`engram outbox list` shows what there is")
    row = _readable(found)
    audits = governance.audits_of_outbox(outbox_id, config)
    print(_json({**row, "audits": audits}) if as_json else "\n".join(_whole(row, audits)))


def requeue(
    outbox_ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Dead rows.", min=1)] = None,
    all_dead: Annotated[
        bool, typer.Option("--all-dead", help="Every row that is dead now, or those that the options name.")
    ] = False,
    space: Space = None,
    older_than: OlderThan = None,
    text: Text = None,
    actor: Annotated[str | None, typer.Option(help="Who is asking, for the audit.")] = None,
    as_json: Json = False,
) -> None:
    """Try dead rows again, as new rows; says what became of each, and exits 1 if one was not dead."""
    if bool(outbox_ids) == all_dead:
        raise typer.BadParameter("give ids, or --all-dead")
    marks = _marks(Status.dead, space, older_than, text)
    if outbox_ids and any((space, older_than, text)):
        raise typer.BadParameter("--space, --older-than and --text go with --all-dead")
    config = running_config()
    counts = {"requeued": 0, "there already": 0, "not dead": 0}
    for outbox_id in _dead_now(config, marks) if all_dead else dict.fromkeys(outbox_ids or ()):
        kind, now_at = _requeued(outbox_id, actor, config)
        counts[kind] += 1
        done = {"outbox_id": outbox_id, "result": kind, "requeued_as": now_at}
        print(_json(done) if as_json else f"{outbox_id}: {_SAID[kind].format(now_at)}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), file=sys.stderr)
    raise typer.Exit(1 if counts["not dead"] and not all_dead else 0)


_SAID = {
    "requeued": "requeued as {}",
    "there already": "{} has the same content already",
    "not dead": "there is no dead row of this id that may be sent",
}


def running_config() -> Config:
    from engram.cli.database import running_database
    from engram.logbook.config import Config
    from engram.postgres.pool import connect

    dsn = running_database()
    connect(dsn).close()  # says at once why it cannot be reached; a pool would go on trying
    return Config(postgres_dsn=dsn)


def _requeued(outbox_id: int, actor: str | None, config: Config) -> tuple[str, int | None]:
    from engram.logbook import outbox

    done = outbox.requeue(outbox_id, actor, config)
    if done is None:
        return "not dead", None
    return "requeued" if done.fresh else "there already", done.outbox_id


def _dead_now(config: Config, marks: dict[str, Any]) -> list[int]:
    """The rows that are dead at the start: one that dies again meanwhile is the next run's."""
    return [row["outbox_id"] for row in _rows(config, marks) if row["forgotten_at"] is None]


def _rows(
    config: Config, marks: dict[str, Any], after_id: int = 0, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """A page at a time, however many there are."""
    return islice(_pages(config, marks, after_id, min(limit or PAGE, PAGE)), limit)


def _pages(config: Config, marks: dict[str, Any], after_id: int, size: int) -> Iterator[dict[str, Any]]:
    from engram.logbook import outbox

    while page := outbox.list_rows(**marks, limit=size, after_id=after_id, config=config):
        yield from map(_readable, page)
        after_id = page[-1]["outbox_id"]


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """What was forgotten is shown to nobody, though the row stays."""
    return {**row, "payload_md": None} if row["forgotten_at"] else row


def _marks(
    status: Status | None, space: str | None, older_than: str | None, text: str | None
) -> dict[str, Any]:
    return {
        "status": status and status.value,
        "target_space": space,
        "older_than_seconds": _seconds(older_than),
        "text": text,
    }


def _seconds(span: str | None) -> int | None:
    from engram.kernel.durations import seconds_of

    try:
        return None if span is None else seconds_of(span)
    except ValueError as error:
        raise typer.BadParameter(f"--older-than {error}") from error


def _line(row: dict[str, Any]) -> str:
    from engram.gateway.timeline import excerpt

    told = row["last_error"] if row["status"] == "dead" else row["payload_md"] or "(forgotten)"
    status = "forgotten" if row["forgotten_at"] else row["status"]
    return (
        f"{row['outbox_id']:>8}  {status:<9}{row['retry_count']:>5}  {row['created_at']:%Y-%m-%d %H:%M:%S}"
        f"  {excerpt(row['target_space']):<24} {excerpt(told, PREVIEW_CHARS)}"
    )


def _whole(row: dict[str, Any], audits: list[dict[str, Any]]) -> Iterator[str]:
    for name, value in row.items():
        if name != "payload_md":
            shown = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
            yield f"{name:<20} {_harmless(shown)}"
    yield "audits"
    for audit in audits:
        said = f"{audit['action']:<9} {audit['reason'] or '-'}"
        yield f"  {audit['audit_id']:>8}  {audit['created_at']:%Y-%m-%d %H:%M:%S}  {_harmless(said)}"
    yield f"text\n{_harmless(row['payload_md'] or '(forgotten)')}"


def _harmless(text: str) -> str:
    """Text as it is, but for what a terminal would obey; `--json` has that too."""
    return "".join("\ufffd" if category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _json(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
