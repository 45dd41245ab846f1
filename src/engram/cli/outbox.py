"""Commands for whoever looks after the outbox; they ask the database itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from engram.logbook.config import Config

PAGE = 500
PREVIEW_CHARS = 60


def list_(
    status: Annotated[str | None, typer.Option(help="pending, sent or dead.")] = None,
    space: Annotated[str | None, typer.Option(help="Rows of this space.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Rows older than this: 90s, 15m, 24h, 7d.")] = None,
    text: Annotated[str | None, typer.Option(help="Rows with this in their text or error.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each row.")] = False,
) -> None:
    """List rows of the outbox, oldest first."""
    from engram.logbook import outbox

    if status not in (None, "pending", "sent", "dead"):
        raise typer.BadParameter("--status is pending, sent or dead")
    found = outbox.list_rows(status, space, _seconds(older_than), text, limit, config=_config())
    if not as_json:
        print(f"{'id':>8}  {'status':<8} {'tries':>5}  {'created':<20} {'space':<24} text")
    for row in found:
        print(_json(row) if as_json else _line(row))
    if len(found) == limit:
        print(f"the first {limit}; there may be more (--limit)", file=sys.stderr)


def show(outbox_id: Annotated[int, typer.Argument(help="The row.", min=1)]) -> None:
    """Show one row, whole, and everything that was decided about it."""
    from engram.kernel.errors import NotFound
    from engram.logbook import governance, outbox

    config = _config()
    row = outbox.get(outbox_id, config)
    if row is None:
        raise NotFound(f"there is no outbox row {outbox_id}", hint="`engram outbox list` shows what there is")
    payload = row.pop("payload_md")
    for name, value in row.items():
        print(f"{name:<20} {json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value}")
    print("audits")
    for audit in governance.audits_of_outbox(outbox_id, config):
        said = f"{audit['action']:<9} {audit['reason'] or '-'}"
        print(f"  {audit['audit_id']:>8}  {audit['created_at']:%Y-%m-%d %H:%M:%S}  {said}")
    print(f"text\n{payload}")


def requeue(
    outbox_ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Dead rows.")] = None,
    all_dead: Annotated[bool, typer.Option("--all-dead", help="Every row that is dead now.")] = False,
    actor: Annotated[str | None, typer.Option(help="Who is asking, for the audit.")] = None,
) -> None:
    """Try dead rows again, as new rows; says what became of each, and exits 1 if one was not dead."""
    from engram.logbook import outbox

    if bool(outbox_ids) == all_dead:
        raise typer.BadParameter("give ids, or --all-dead")
    config = _config()
    counts = {"requeued": 0, "there already": 0, "not dead": 0}
    for outbox_id in _all_dead(config) if all_dead else dict.fromkeys(outbox_ids or ()):
        done = outbox.requeue(outbox_id, actor, config)
        if done is None:
            kind, said = "not dead", "there is no dead row of this id that may be sent"
        elif done.fresh:
            kind, said = "requeued", f"requeued as {done.outbox_id}"
        else:
            kind, said = "there already", f"{done.outbox_id} has the same content already"
        counts[kind] += 1
        print(f"{outbox_id}: {said}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), file=sys.stderr)
    raise typer.Exit(1 if counts["not dead"] and not all_dead else 0)


def _all_dead(config: Config) -> list[int]:
    """The rows that are dead at the start: one that dies again meanwhile is the next run's."""
    return [row["outbox_id"] for row in _pages(config) if row["forgotten_at"] is None]


def _pages(config: Config) -> Iterator[dict[str, Any]]:
    from engram.logbook import outbox

    after_id = 0
    while page := outbox.list_rows("dead", limit=PAGE, after_id=after_id, config=config):
        yield from page
        after_id = page[-1]["outbox_id"]


def _config() -> Config:
    from engram.cli.database import running_database
    from engram.logbook.config import Config

    return Config(postgres_dsn=running_database())


def _seconds(span: str | None) -> int | None:
    from engram.kernel.durations import seconds_of

    try:
        return None if span is None else seconds_of(span)
    except ValueError as error:
        raise typer.BadParameter(f"--older-than {error}") from error


def _line(row: dict[str, Any]) -> str:
    told = row["last_error"] if row["status"] == "dead" else row["payload_md"]
    text = " ".join((told or "").split())
    status = "forgotten" if row["forgotten_at"] else row["status"]
    return (
        f"{row['outbox_id']:>8}  {status:<9}{row['retry_count']:>5}  {row['created_at']:%Y-%m-%d %H:%M:%S}"
        f"  {row['target_space']:<24} {text[:PREVIEW_CHARS]}"
    )


def _json(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str)
