"""Writes `docs/reference/` from the code: settings, tools, errors, metrics, commands.

    make docs

A test compares what stands there with what this makes, so the reference cannot
fall behind.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main
from prometheus_client.metrics import MetricWrapperBase
from typer.testing import CliRunner

from engram.api.tools import TOOLS, Tool
from engram.cli import app
from engram.kernel import errors, metrics
from engram.kernel.errors import EngramError, ErrorCode
from engram.kernel.settings import Settings, described

REFERENCE = Path(__file__).parent / "reference"


def pages() -> dict[str, str]:
    """Each file of the reference, by its name."""
    made = {
        "settings.md": ("kernel/settings.py", settings_page()),
        "tools.md": ("api/tools/", tools_page()),
        "errors.md": ("kernel/errors.py", errors_page()),
        "metrics.md": ("kernel/metrics.py", metrics_page()),
        "cli.md": ("cli/", cli_page()),
    }
    return {
        name: f"<!-- Made by `make docs` from src/engram/{source}; do not edit. -->\n\n"
        + "\n".join(lines)
        + "\n"
        for name, (source, lines) in made.items()
    }


def settings_page() -> Iterator[str]:
    defaults = {f.name: f.default for f in fields(Settings)} | {"data_dir": "~/.local/share/engram"}
    yield "# Settings\n"
    yield "A value comes from the environment, else from `engram.toml` in the working directory (`ENGRAM_CONFIG`"
    yield "names another file), else it is the default. A value that cannot be read, and a key in the file that"
    yield "no setting has, is refused by name. `engram settings` shows the values that apply here; secrets are"
    yield "never shown or logged."
    tables: dict[str, list[tuple[str, ...]]] = {}
    for name, setting in described():
        table, _, key = setting.key.partition(".")
        default = _default(defaults[name])
        secret = " A secret." if setting.secret else ""
        example = "" if default == f"`{setting.example}`" else f" E.g. `{setting.example}`"
        row = (f"`{setting.env}`", f"`{key}`", default, f"{_text(setting.doc)}{secret}{example}")
        tables.setdefault(table, []).append(row)
    for table, rows in tables.items():
        yield f"\n## [{table}]\n"
        yield from _table(("variable", "key", "default", "meaning"), rows)


def _default(value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def tools_page() -> Iterator[str]:
    yield "# Tools\n"
    yield "Each is an MCP tool at `/mcp` and over `engram mcp`, a bare call"
    yield '(`POST /mcp` with `{"tool": …, "arguments": {…}}`) and a route of its own, all with the same'
    yield "arguments, result and [errors](errors.md). A token needs the scope; without tokens everybody on the"
    yield "machine may call everything ([who may call](../security.md)). Tools that write take an"
    yield "`idempotency_key`, or an `Idempotency-Key` header on their route ([idempotency](../idempotency.md)).\n"
    rows = [
        (f"[`{t.name}`](#{t.name})", f"`POST {t.path}`", t.scope, _text(t.description.split(".")[0]))
        for t in TOOLS.values()
    ]
    yield from _table(("tool", "route", "scope", ""), rows)
    for tool in TOOLS.values():
        yield from _tool(tool)


def _tool(tool: Tool) -> Iterator[str]:
    marks = [
        f"`POST {tool.path}`",
        f"scope `{tool.scope}`",
        "changes nothing" if tool.read_only else "writes",
        *(["destructive"] if tool.destructive else []),
        *([] if tool.repeatable else ["each call without an idempotency key has its own effect"]),
    ]
    yield f"\n## {tool.name}\n"
    yield f"{', '.join(marks)}\n"
    yield _text(tool.description)
    for title, schema in (("Arguments", tool.input_schema), ("Result", tool.output_schema)):
        yield f"\n### {title}\n"
        yield from _object(schema, given=title == "Arguments")
        for name, part in schema.get("$defs", {}).items():
            said = "" if part.get("description", "").startswith(f"{name}(") else part.get("description", "")
            yield f"\n`{name}`{': ' if said else ''}{_text(said)}\n"
            yield from _object(part, given=title == "Arguments")


def _object(schema: dict[str, Any], *, given: bool) -> Iterator[str]:
    """What an object has: one that is given, with defaults; one that is got, with what may be null."""
    required = schema.get("required", ())
    rows = []
    for name, part in schema.get("properties", {}).items():
        default = "required" if name in required else _json_default(part.get("default"))
        said = _text(part.get("description", ""))
        rows.append(
            (f"`{name}`", _type(part), default, said) if given else (f"`{name}`", _type(part, "null"))
        )
    yield from _table(("name", "type", "default", "meaning") if given else ("name", "type"), rows)


def _json_default(value: Any) -> str:
    return "" if value is None or value is False or value in ([], {}) else f"`{value}`"


def _type(part: dict[str, Any], null: str = "") -> str:
    """A JSON schema's type in words; `null` is the word for null, if it is worth saying."""
    if "anyOf" in part:
        words = [_type(one, null) for one in part["anyOf"]]
        return " or ".join(dict.fromkeys(word for word in words if word))
    if "$ref" in part:
        return f"`{part['$ref'].rpartition('/')[2]}`"
    if "enum" in part or "const" in part:
        return ", ".join(f"`{one}`" for one in part.get("enum") or [part["const"]])
    if part.get("type") == "array":
        return f"list of {_type(part.get('items', {}), null)}"
    known = {"integer": "whole number", "string": "text", "boolean": "true or false", "null": null}
    kind = part.get("format", part.get("type", "anything"))
    return known.get(kind, kind)


def errors_page() -> Iterator[str]:
    yield "# Errors\n"
    yield "Whatever fails, over REST and the bare form, answers with the status and"
    yield '`{"success": false, "error_code", "message", "correlation_id", "context": {…}}`; over MCP the same'
    yield "object is the text of a result with `isError`. `message` says what is wrong and what to do next;"
    yield "`context.fields` names wrong arguments. Retryable: the same request may succeed later."
    yield "`engram why <correlation_id>` says what became of a write.\n"
    remarks = _remarks()
    rows = []
    for code in ErrorCode:
        kinds = [kind for kind in _classes() if kind.code is code]
        rows += [
            (
                f"`{code.value}`",
                _status(kind),
                _retryable(kind),
                f"`{kind.__name__}`",
                _text(remarks.get(kind.__name__, "")),
            )
            for kind in kinds
        ] or [(f"`{code.value}`", "200", "", "", _text(_WITHOUT_CLASS[code]))]
    yield from _table(("error_code", "status", "retryable", "raised as", "meaning"), rows)


_WITHOUT_CLASS = {
    ErrorCode.OUTBOX_DEDUP_HIT: "no failure: a deferred store whose content was waiting already, as `outbox_id`",
}


def _classes() -> list[type[EngramError]]:
    found = [
        kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, EngramError)
    ]
    return sorted(found, key=lambda kind: inspect.getsourcelines(kind)[1])


def _remarks() -> dict[str, str]:
    """What the tree in the module's docstring says of each class."""
    found = {"EngramError": "anything unexpected; the log has it under the correlation id"}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"[\s│├└─]+── (?P<name>\w+)\s+(?P<said>.*)", line):
            said = re.sub(r"\s*\((retryable|see its attributes)\)$", "", match["said"])
            above = getattr(errors, match["name"]).__base__.__name__
            found[match["name"]] = said.replace("... ", f"{found[above]}; ")
    return found


def _status(kind: type[EngramError]) -> str:
    chosen = "http_status" in inspect.signature(kind.__init__).parameters
    return f"{kind.http_status}, or the guard's own" if chosen else str(kind.http_status)


def _retryable(kind: type[EngramError]) -> str:
    if "retryable" in inspect.signature(kind.__init__).parameters:
        return "depends"
    return "yes" if kind.retryable else "no"


def metrics_page() -> Iterator[str]:
    yield "# Metrics\n"
    yield "In Prometheus's text form. What to watch, and what to do about it: [operations](../operations.md).\n"
    known = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    rows = [
        (
            f"`{metric._name}{'_total' if metric._type == 'counter' else ''}`",
            metric._type,
            ", ".join(f"`{label}`" for label in metric._labelnames),
            _text(metric._documentation),
        )
        for metric in known
    ]
    yield from _table(("name", "type", "labels", "meaning"), rows)


def cli_page() -> Iterator[str]:
    yield "# Commands\n"
    yield "As `engram COMMAND --help` says it. A command that fails says why and what to do next, on standard"
    yield "error, and exits 1; a wrong option exits 2."
    for words in _commands(typer.main.get_command(app)):
        said = CliRunner().invoke(app, [*words, "--help"], prog_name="engram", env={"COLUMNS": "100"}).output
        lines = [line for line in said.splitlines() if "Show this message and exit." not in line]
        text = "\n".join(lines).strip().removeprefix("Usage: ").removesuffix("Options:").strip()
        yield f"\n## engram {' '.join(words)}\n\n```text\n{text}\n```"


def _commands(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """Each command by its words; groups are only ways to them."""
    if not hasattr(command, "commands"):
        yield words
        return
    for word, below in command.commands.items():
        yield from _commands(below, *words, word)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        yield "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _text(said: str) -> str:
    """Prose for Markdown: `<actor>` is no tag."""
    return re.sub(r"(?<!`)<(?=\w)", r"\\<", said)


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, "utf-8")
        print(f"docs/reference/{name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
