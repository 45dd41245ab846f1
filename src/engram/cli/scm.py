"""Commands that follow source control: add a repository, sync it, make memories of what happened there."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import asyncio

    from engram.assembly.scm import Scm
    from engram.gateway.scm_consumer import Consumed
    from engram.kernel.settings import Settings
    from engram.scm.store import Repo

Repos = Annotated[
    list[int] | None, typer.Argument(metavar="ID", help="Repositories; all of them unless given.")
]
Loop = Annotated[bool, typer.Option("--loop", help="Go on until stopped.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object for each repository.")]
Told = Callable[[str], None]
STOP_SECONDS = 7.0


def add(
    url: Annotated[str, typer.Argument(help="A folder or an address that git, svn or GitLab takes.")],
    kind: Annotated[
        str | None, typer.Option(help="git, svn or gitlab, where the address does not say.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Whose team reads it; by default PROJECT_KEY.")] = None,
    rules: Annotated[
        str | None,
        typer.Option(help="What makes cards in that project, as JSON or as @FILE; see docs/scm.md."),
    ] = None,
) -> None:
    """Follow a repository. Nothing is read yet."""

    async def work(scm: Scm) -> None:
        from engram.gateway.inputs import project_space
        from engram.scm.addresses import address

        found, where = address(url, kind)
        project_key = project_space(project or scm.settings.project_key).name
        if rules is not None:
            await scm.consumer_rules(project_key, _rules(rules))
        added = await scm.add(project_key, found, where)
        said = "follows" if added["fresh"] else "followed already:"
        print(f"{added['repo_id']}: {said} {found} {where} for team:{project_key}")

    _run(work)


def sync(
    ids: Repos = None,
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Leave out a row that cannot be written, and say so.")
    ] = False,
    patches: Annotated[bool, typer.Option("--patches/--no-patches", help="Keep the diffs too.")] = True,
    loop: Loop = False,
) -> None:
    """Read what is new, and its diffs. Exits 1 if a repository could not be read."""

    async def one(scm: Scm, repo: Repo, told: Told) -> None:
        counts = await scm.sync(repo, best_effort=best_effort, told=told)
        done = f"{counts.read} read, {counts.written} written"
        done += f", {counts.superseded} superseded" if counts.superseded else ""
        done += f", {counts.skipped} skipped" if counts.skipped else ""
        if patches:
            kept = await scm.materialize(repo, told=told)
            done += f", {kept.diffs + kept.diffstats} patches" + _missing(kept.missing)
        _say(repo, done)

    _each(ids, one, loop=loop)


def materialize(
    ids: Repos = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many of each repository at most.")] = None,
) -> None:
    """Keep the diffs that are not kept yet, newest first; those that failed are tried again."""

    async def one(scm: Scm, repo: Repo, told: Told) -> None:
        kept = await scm.materialize(repo, told=told, limit=limit)
        _say(
            repo,
            f"{kept.diffs} diffs, {kept.diffstats} diffstats, {kept.empty} empty{_missing(kept.missing)}",
        )

    _each(ids, one, loop=False)


def consume(
    ids: Repos = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Look at everything again, from the start.")
    ] = False,
    after: Annotated[int, typer.Option(min=0, help="With --replay: only what changed after this point.")] = 0,
    loop: Loop = False,
) -> None:
    """Make memories of what happened. What was made before is recognised."""
    diverted = False

    async def one(scm: Scm, repo: Repo, told: Told) -> None:
        nonlocal diverted
        async with scm.consumer(told) as consumer:
            if replay:
                await consumer.replay(repo.repo_id, after)
            done: Consumed = await consumer.run_once(repo.repo_id, repo.project_key)
        _say(repo, _told_consumed(done))
        diverted = diverted or done.diverted > 0

    _each(ids, one, loop=loop)
    if diverted:
        _told("the team's space is closed: `engram governance set --team-writes on`, then consume --replay")


def status(as_json: Json = False) -> None:
    """Show how far each repository is: rows, patches, and what lags behind."""

    async def work(scm: Scm) -> None:
        rows = await scm.status()
        if as_json:
            print("\n".join(json.dumps(row, ensure_ascii=False, default=str) for row in rows))
        else:
            print("\n".join(_table(rows)))

    _run(work)


def _run(work: Callable[[Scm], Awaitable[None]]) -> None:
    import asyncio

    from engram.assembly.addresses import addresses, require_schema
    from engram.assembly.scm import open_scm
    from engram.kernel import logs
    from engram.kernel.settings import Settings

    settings = Settings.load()
    logs.configure(settings.log_level if settings.log_level != "info" else "warning", settings.log_format)

    async def inside(found: Settings) -> None:
        async with open_scm(found) as scm:
            await work(scm)

    with addresses(settings, _told) as found:
        require_schema(found)
        asyncio.run(inside(found))


def _each(
    ids: Sequence[int] | None, one: Callable[[Scm, Repo, Told], Awaitable[None]], *, loop: bool
) -> None:
    failed = False

    async def once(scm: Scm, stop: asyncio.Event | None = None) -> int:
        """Every repository; one that fails holds up no other. Then there is nothing left to do now."""
        from engram.kernel.errors import EngramError

        nonlocal failed
        for repo in await scm.repos(ids):
            if stop is not None and stop.is_set():
                break
            try:
                with _progress(f"{repo.repo_id} {repo.kind}") as told:
                    await one(scm, repo, told)
            except EngramError as error:
                failed = True
                _told(f"✗ {repo.repo_id} {repo.kind} {repo.url}: {error}")
        return 0

    async def work(scm: Scm) -> None:
        from engram.kernel.runloop import run_loop, run_together, stop_on_signals

        if not loop:
            await once(scm)
            return
        stop = stop_on_signals()
        pause = scm.settings.scm_poll_seconds
        work = run_loop("scm", lambda: once(scm, stop), idle_seconds=pause, stop=stop)
        await run_together(work, stop=stop, patience_seconds=STOP_SECONDS)

    _run(work)
    if failed and not loop:
        raise typer.Exit(1)


@contextmanager
def _progress(name: str) -> Iterator[Told]:
    """A line that is written over, on a terminal; silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda said: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(name)
        yield lambda said: bar.update(task, description=f"{name}: {said}")


def _rules(given: str) -> dict[str, Any]:
    from pathlib import Path

    text = Path(given[1:]).read_text("utf-8") if given.startswith("@") else given
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--rules is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter("--rules is not a JSON object")
    return found


def _told_consumed(done: Consumed) -> str:
    counts = {
        "stored": done.stored,
        "repeated": done.repeated,
        "parked": done.parked,
        "diverted to private:scm": done.diverted,
        "rejected": done.rejected,
        **{f"no card ({reason})": count for reason, count in done.unworthy.items()},
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing new"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "no repository is followed; `engram scm add URL`"
        return
    yield f"{'id':>4}  {'kind':<7}{'project':<16}{'facts':>9}{'patches':>9}{'waiting':>9}{'skipped':>8}  {'lag':<8}last run"
    for row in rows:
        ended = row["status"] or "never synced"
        problem = f": {row['error'][:100]}" if row["status"] == "failed" and row["error"] else ""
        missing = f" ({row['missing']} patches missing)" if row["missing"] else ""
        yield (
            f"{row['repo_id']:>4}  {row['kind']:<7}{row['project_key'][:15]:<16}{row['facts']:>9}"
            f"{row['patches']:>9}{row['waiting']:>9}{row['skipped']:>8}  {_lag(row['lag_seconds']):<8}"
            f"{ended}{problem}{missing}"
        )
        yield f"      {row['url']}"


def _lag(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _missing(count: int) -> str:
    return f" ({count} could not be had yet)" if count else ""


def _say(repo: Repo, said: str) -> None:
    print(f"{repo.repo_id} {repo.kind} {repo.url}: {said}", flush=True)


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
