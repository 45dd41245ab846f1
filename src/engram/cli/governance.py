"""Commands about governance, by the running gateway: the report, the settings and their history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from engram.cli.memory import call_tool

Json = Annotated[bool, typer.Option("--json", help="Print the reply as it came.")]


class Switch(StrEnum):
    on = "on"
    off = "off"


Project = Annotated[str | None, typer.Argument(help="The project; by default the gateway's own.")]
Actor = Annotated[str | None, typer.Option(help="Who is acting.")]


def report(
    since: Annotated[str | None, typer.Option(help="A time or a span: 2026-01-30, 24h, 7d.")] = None,
    as_json: Json = False,
) -> None:
    """Show what became of the writes, how the outbox stands, and whether the sums agree."""
    reply = call_tool("reliability_report", {} if since is None else {"since": since})
    _print(reply, as_json, _report_lines)


def show(project: Project = None, actor: Actor = None, as_json: Json = False) -> None:
    """Show a project's settings and their last changes."""
    _print(_governance(project_key=project, actor_user_id=actor), as_json, _settings_lines)


def set_(
    project: Project = None,
    team_write: Annotated[
        bool | None, typer.Option("--team-write/--no-team-write", help="Whether shared spaces take writes.")
    ] = None,
    team_writes: Annotated[Switch | None, typer.Option(help="The same, in a word.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="The whole new policy, as JSON or as @FILE; {} restricts nothing.")
    ] = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Change a project's settings; what is not given stays as it is."""
    if team_writes is not None:
        team_write = team_writes is Switch.on
    if team_write is None and policy is None:
        raise typer.BadParameter("give --team-writes or --policy")
    reply = _governance(
        project_key=project,
        team_write_enabled=team_write,
        policy_json=None if policy is None else _policy(policy),
        actor_user_id=actor,
    )
    _print(reply, as_json, _settings_lines)


def _governance(**given: Any) -> dict[str, Any]:
    return call_tool("governance_update", {k: v for k, v in given.items() if v is not None})


def _policy(given: str) -> Any:
    text = Path(given[1:]).read_text("utf-8") if given.startswith("@") else given
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--policy is not JSON: {error}") from error


def _print(reply: dict[str, Any], as_json: bool, lines: Any) -> None:
    print(json.dumps(reply, ensure_ascii=False, indent=2) if as_json else "\n".join(lines(reply)))


def _report_lines(reply: dict[str, Any]) -> Iterator[str]:
    yield f"writes        {reply['total_writes']}" + (f" since {reply['since']}" if reply["since"] else "")
    yield f"succeeded     {_share(reply['success_rate'])}"
    for title, name in (("by action", "by_action"), ("by status", "by_status"), ("by reason", "by_reason")):
        yield title
        yield from (f"  {count:>10}  {word}" for word, count in reply[name].items() if count)
    outbox, evidence = reply["outbox"], reply["evidence"]
    yield "outbox"
    for word in ("pending", "due", "sent", "dead", "forgotten"):
        yield f"  {outbox[word]:>10}  {word}"
    for title, word in (
        ("oldest", "oldest_pending"),
        ("median", "pending_age_p50"),
        ("p95", "pending_age_p95"),
    ):
        yield f"  {outbox[f'{word}_seconds']:>8.0f} s  {title} age of pending"
    yield f"evidence      {evidence['with_evidence']} of {evidence['stores']} stores ({_share(evidence['coverage'])})"
    for sum_ in reply["invariants"]:
        yield f"{'✓' if sum_['ok'] else '✗'} {sum_['name']}: {sum_['left']} and {sum_['right']}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _settings_lines(reply: dict[str, Any]) -> Iterator[str]:
    yield f"project       {reply['project_key']}"
    yield f"team writes   {_open(reply['team_write_enabled'])}"
    yield f"policy        {json.dumps(reply['policy_json'], ensure_ascii=False)}"
    if reply["updated_at"]:
        yield f"changed       {reply['updated_at']} by {reply['updated_by'] or '-'}"
    if reply["history"]:
        yield "last changes"
    for change in reply["history"]:
        yield f"  {change['changed_at']} {change['changed_by'] or '-'}: {_difference(change)}"


def _difference(change: dict[str, Any]) -> str:
    before, after = change["before"], change["after"]
    if before is None:
        return f"created, {_open(after['team_write_enabled'])}, {json.dumps(after['policy_json'])}"
    told = []
    if before["team_write_enabled"] != after["team_write_enabled"]:
        told.append(_open(after["team_write_enabled"]))
    if before["policy_json"] != after["policy_json"]:
        told.append(f"{json.dumps(before['policy_json'])} -> {json.dumps(after['policy_json'])}")
    return ", ".join(told) or "touched"


def _open(enabled: bool) -> str:
    return "open" if enabled else "closed"
