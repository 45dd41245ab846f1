"""`engram verify`: the gate, and with `--full` what a failing memory server costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from engram.cli.degradation import Step
    from engram.cli.outage import Bench
    from engram.kernel.settings import Settings

START_SECONDS = 30.0
# Without these the test of a failing memory server cannot even begin.
_NEEDED = ("database", "migrations", "openmemory")
_OF_THE_WORKER = ("outbox_worker", "reconcile")


def verify(
    full: Annotated[
        bool,
        typer.Option("--full", help="Judge as in FULL mode, and test what a failing memory server costs."),
    ] = False,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", help="Leave a capability out; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at everything engram depends on, and say whether it is fit for use; exit 1 if it is not."""
    from engram.gateway.gate import checked_skips
    from engram.kernel import logs
    from engram.kernel.settings import Settings

    logs.configure("error", "human")
    settings = Settings.load()
    skips = sorted(checked_skips(skip or []))
    report = _fully(settings, skips) if full else _ask_gate(settings.gateway_url, settings, skips)
    if as_json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report["passed"] else 1)


def _fully(settings: Settings, skips: list[str]) -> dict[str, Any]:
    """The gate of FULL mode, then the test."""
    from engram.cli.degradation import Degradation

    _clean_up_when_terminated()
    with _bench(settings, skips) as (bench, report):
        test: dict[str, Any] = {"how": bench and bench.how, "not_run": _why_not(report), "steps": []}
        report["degradation"] = test
        for step in () if bench is None or test["not_run"] else Degradation(bench).run():
            test["steps"].append(_told(step))
            if not step.passed and report["passed"]:
                report |= {"passed": False, "reason": f"{step.name}: {step.seen}"}
    return report


@contextmanager
def _bench(settings: Settings, skips: list[str]) -> Iterator[tuple[Bench | None, dict[str, Any]]]:
    """What the test works on, if it can be run, and what the gate says of what is running."""
    import tempfile
    from pathlib import Path

    from engram.cli.outage import beside, own_stack

    with ExitStack() as held:
        if _gateway_answers(settings):
            _say(f"the gateway at {settings.gateway_url} is verified")
            report = _ask_gate(settings.gateway_url, settings, skips, mode="FULL")
            if _why_not(report):
                yield None, report
                return
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="engram-verify-"))
            yield held.enter_context(beside(settings, Path(folder))), report
        else:
            _say(
                f"no gateway answers at {settings.gateway_url}: a stack of its own"
                f" is started in {settings.data_dir}, and stopped afterwards"
            )
            bench = held.enter_context(own_stack(settings, _say))
            yield bench, _gate_of_a_new_stack(bench, settings, skips)


def _gate_of_a_new_stack(bench: Bench, settings: Settings, skips: list[str]) -> dict[str, Any]:
    """Its worker needs a moment to say that it is alive."""
    from engram.embedded.waiting import wait_for

    report: dict[str, Any] = {}

    def is_alive() -> bool:
        report.update(_ask_gate(bench.gateway_url, settings, skips, mode="FULL"))
        return "failed" not in {report["capabilities"][name]["status"] for name in _OF_THE_WORKER}

    wait_for(is_alive, START_SECONDS)
    return report


def _why_not(report: dict[str, Any]) -> str | None:
    states = {name: found["status"] for name, found in report["capabilities"].items()}
    missing = [f"{name} {states[name]}" for name in _NEEDED if states[name] != "ok"]
    return f"not run: {', '.join(missing)}" if missing else None


def _ask_gate(url: str, settings: Settings, skips: list[str], *, mode: str | None = None) -> dict[str, Any]:
    import httpx2

    from engram.cli.memory import _authorization
    from engram.kernel.errors import EngramError, GatewayUnavailable

    asked = {"skip": skips, **({"mode": mode} if mode else {})}
    try:
        with httpx2.Client(timeout=60, trust_env=False, headers=_authorization(settings.token)) as http:
            reply: dict[str, Any] = http.post(f"{url}/verify", json=asked).json()
    except (httpx2.HTTPError, ValueError) as error:
        raise GatewayUnavailable(f"no gateway answers at {url}", hint="start one with `engram up`") from error
    if "capabilities" not in reply:
        raise EngramError(
            str(reply.get("message", "the answer is not engram's")),
            hint=f"correlation id {reply.get('correlation_id')}",
        )
    return reply


def _gateway_answers(settings: Settings) -> bool:
    import httpx2

    try:
        return httpx2.get(f"{settings.gateway_url}/health", trust_env=False, timeout=5).is_success
    except httpx2.HTTPError:
        return False


def _clean_up_when_terminated() -> None:
    """A stack of its own must not outlive us, nor a memory server stay down."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _told(step: Step) -> dict[str, Any]:
    from dataclasses import asdict

    _say(f"{_mark(step.passed)} {step.name}")
    return asdict(step)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    # In a file or a pipe a line is a line.
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False)
    console.print(_table("capability", report["capabilities"].items()))
    if degradation := report.get("degradation"):
        steps = ((s["name"], {**s, "reason": s["seen"]}) for s in degradation["steps"])
        console.print(_table("while the memory server is away", steps))
        if degradation["not_run"]:
            console.print(degradation["not_run"])
    reason = report["reason"] or f"{report['mode']} mode: passed"
    console.print(f"{_mark(report['passed'])} {reason}")


def _table(of: str, rows: Any) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in (of, "status", "what was seen", "ms"):
        table.add_column(name, justify="right" if name == "ms" else "left")
    colours = {"ok": "green", "failed": "red", "skipped": "yellow"}
    for name, found in rows:
        status = found.get("status") or ("ok" if found["passed"] else "failed")
        table.add_row(
            name, Text(status, colours[status]), Text(found["reason"]), f"{found['milliseconds']:.0f}"
        )
    return table


def _mark(passed: bool) -> str:
    return "✓" if passed else "✗"


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
