"""Commands that bring documents in, by the running gateway; `rebuild` works on the parts themselves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx2

TASKS = "/api/knowledge/tasks"
DOCUMENTS = "/api/knowledge/documents"
UPLOAD = "/api/knowledge/documents/upload-async"
FINAL = ("SUCCEEDED", "DEAD")
LOOK_SECONDS = 0.3
ANSWER_SECONDS = 120.0
PATIENCE_SECONDS = 3.0
PAGE = 200


def upload(
    paths: Annotated[list[Path], typer.Argument(help="Files, and folders with everything below them.")],
    wait: Annotated[bool, typer.Option("--wait", help="Stay until every document is in.")] = False,
    title: Annotated[str | None, typer.Option(help="What to call it; for a single file.")] = None,
) -> None:
    """Bring documents in. Exits 1 if one was refused or, with --wait, is dead."""
    files = list(_files(paths))
    if title is not None and len(files) != 1:
        raise typer.BadParameter("--title goes with a single file")
    if not files:
        raise typer.BadParameter("there is no file")
    with _gateway() as http:
        sent, refused = _sent(http, files, title)
        dead = _awaited(http, sent) if wait else []
    for path, why in [*refused, *dead]:
        print(f"✗ {path}: {why}", file=sys.stderr)
    done = "in" if wait else "on their way; `engram ingest status` tells how they are"
    print(f"{len(sent) - len(dead)} document(s) {done}")
    raise typer.Exit(1 if refused or dead else 0)


def status(
    task: Annotated[str | None, typer.Argument(help="One task; by default the newest.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="How many at most.")] = 20,
) -> None:
    """Show how tasks are; one task with everything that became of it."""
    from engram.gateway.timeline import excerpt

    with _gateway() as http:
        titles = _Titles(http)
        if task is None:
            for row in _asked(http.get(TASKS, params={"limit": limit}))["tasks"]:
                print(_line(row, titles[row["documentId"]]))
            return
        row = _asked(http.get(f"{TASKS}/{task}"))
        print(_line(row, titles[row["documentId"]]))
    for step in row["transitions"]:
        came = f"{step['fromStatus'] or '·'} → {step['toStatus']}"
        print(f"    {step['createdAt'][:19]}  {came:<24} {excerpt(step['message'] or '', 200)}")


def retry(tasks: Annotated[list[str], typer.Argument(metavar="TASK", help="Dead tasks.")]) -> None:
    """Try dead tasks again, with all their attempts."""
    with _gateway() as http:
        for task in tasks:
            made = _asked(http.post(f"{TASKS}/{task}/retry", json={}))
            print(f"{made['taskId']} {made['status']}")


class EventStatus(StrEnum):
    new = "NEW"
    retrying = "RETRYING"
    sent = "SENT"
    dead = "DEAD"


def list_events(
    status: Annotated[EventStatus | None, typer.Option(help="Events in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="How many at most.")] = 20,
) -> None:
    """Show the events for Kafka, the newest first. `engram why ID` explains one."""
    from engram.cli.outbox import running_config
    from engram.gateway.timeline import excerpt
    from engram.ingest import events
    from engram.logbook.connection import run

    for row in run(events.list_events(status and status.value, limit), running_config()):
        when = row["sent_at"] or row["next_retry_at"] or row["created_at"]
        said = excerpt(row["last_error"] or "", 200)
        print(
            f"{row['id']}  {row['status']:<8} {row['attempt_count']:>3} failed  {when:%Y-%m-%d %H:%M:%S}  "
            f"task {row['task_id'] or '-'}  {said}".rstrip()
        )


def rebuild() -> None:
    """Tell the queue of every unfinished task that it does not have. May be run at any time."""
    import asyncio

    from engram.assembly.queues import open_sweeper
    from engram.cli.database import running_database
    from engram.kernel.settings import Settings

    settings = Settings.load()

    async def put() -> int:
        from dataclasses import replace

        async with open_sweeper(replace(settings, postgres_dsn=running_database())) as sweeper:
            return await sweeper.rebuild()

    print(f"put {asyncio.run(put())} task(s) on the queue")


def _files(paths: list[Path]) -> Iterator[Path]:
    """What was named, and in folders everything that is not hidden."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for found in sorted(path.rglob("*")):
            inside = found.relative_to(path)
            if found.is_file() and not any(part.startswith(".") for part in inside.parts):
                yield found


def _sent(
    http: httpx2.Client, files: list[Path], title: str | None
) -> tuple[dict[str, Path], list[tuple[Path, str]]]:
    from engram.kernel.errors import EngramError, GatewayUnavailable

    sent: dict[str, Path] = {}
    refused: list[tuple[Path, str]] = []
    with _bar("sending", len(files)) as (advance, _):
        for path in files:
            try:
                with path.open("rb") as file:
                    given = {"title": title} if title else None
                    reply = _asked(http.post(UPLOAD, files={"file": (path.name, file)}, data=given))
                sent[reply["taskId"]] = path
            except GatewayUnavailable:
                raise
            except (EngramError, OSError) as error:
                refused.append((path, str(error)))
            advance()
    return sent, refused


def _awaited(http: httpx2.Client, sent: dict[str, Path]) -> list[tuple[Path, str]]:
    """Until every task is final; those that died, and why."""
    waiting, dead = dict(sent), []
    with _bar("reading", len(sent)) as (advance, tell):
        patience = _Patience(tell)
        while waiting:
            seen = {task_id: _asked(http.get(f"{TASKS}/{task_id}")) for task_id in list(waiting)[:PAGE]}
            for task_id, row in seen.items():
                if row["status"] in FINAL:
                    del waiting[task_id]
                    advance()
                    if row["status"] == "DEAD":
                        dead.append((sent[task_id], row["errorMessage"]))
            if waiting:
                patience.look([row for task_id, row in seen.items() if task_id in waiting])
                time.sleep(LOOK_SECONDS)
    return dead


class _Patience:
    """Says what is waited for when nothing has moved for a while, and again whenever that changes."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._moved = time.monotonic()
        self._far: object = None
        self._told: set[str] = set()

    def look(self, waiting: list[dict[str, Any]]) -> None:
        far = {row["taskId"]: row["processedSegments"] for row in waiting}
        if far != self._far:
            self._far, self._moved = far, time.monotonic()
        if time.monotonic() - self._moved < PATIENCE_SECONDS:
            return
        said = dict.fromkeys(_waits(row) for row in waiting)
        for line in said:
            if line not in self._told:
                self._tell(line)
        self._told = set(said)


def _waits(row: dict[str, Any]) -> str:
    """Why a task is not final yet, in the same words for all that wait alike."""
    from engram.gateway.timeline import excerpt

    if row["errorMessage"]:
        return f"waiting: {row['status']} after {excerpt(row['errorMessage'], 200)}"
    idle = ", no worker has begun it (`engram doctor` says whether one runs)"
    return f"waiting: {row['status']}{idle if row['status'] == 'QUEUED' else ''}"


@contextmanager
def _gateway() -> Iterator[httpx2.Client]:
    """A client of the running gateway; one that does not answer is told plainly."""
    import httpx2

    from engram.cli.memory import _authorization
    from engram.kernel.errors import GatewayUnavailable
    from engram.kernel.settings import Settings

    settings = Settings.load()
    url, headers = settings.gateway_url, _authorization(settings.token)
    try:
        with httpx2.Client(base_url=url, timeout=ANSWER_SECONDS, trust_env=False, headers=headers) as http:
            yield http
    except httpx2.HTTPError as error:
        raise GatewayUnavailable(
            f"no gateway answers at {url}: {type(error).__name__}", hint="start one with `engram up`"
        ) from error


def _asked(reply: httpx2.Response) -> dict[str, Any]:
    """The reply's object; an error reply becomes an `EngramError`."""
    from engram.kernel.errors import EngramError, GatewayUnavailable

    try:
        told: dict[str, Any] = reply.json()
    except ValueError as error:
        raise GatewayUnavailable("what answers is not engram", hint="check GATEWAY_PORT") from error
    if reply.is_error:
        raise EngramError(told.get("message", f"HTTP {reply.status_code}"))
    return told


@contextmanager
def _bar(doing: str, total: int) -> Iterator[tuple[Callable[[], object], Callable[[str], object]]]:
    """How to go a step further, and how to say something. A progress bar on a terminal, and none elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(doing, total=total)
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        yield lambda: progress.advance(bar), say


class _Titles(dict[str, str]):
    """What documents are called, by their ids; each is asked for once."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    def __missing__(self, document_id: str) -> str:
        from engram.gateway.timeline import excerpt

        reply = self._http.get(f"{DOCUMENTS}/{document_id}")
        self[document_id] = "-" if reply.status_code == 404 else excerpt(_asked(reply)["title"], 40)
        return self[document_id]


def _line(row: dict[str, Any], title: str) -> str:
    from engram.gateway.timeline import excerpt

    total = "?" if row["totalSegments"] is None else row["totalSegments"]
    counts = f"{row['processedSegments']}/{total}"
    tries = f"{row['attemptCount']} failed" if row["attemptCount"] else ""
    said = excerpt(row["errorMessage"] or "", 200)
    return (
        f"{row['taskId']}  {row['status']:<9} {row['progress']:>3}%  {counts:>9}  {title:<40}  {tries:<10} {said}"
    ).rstrip()
