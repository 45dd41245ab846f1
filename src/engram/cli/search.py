"""`engram search`: asks the running gateway, as an agent would, and shows it to a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_INDENT = "   "
_MAX_TERMS = 32


def search(
    text: Annotated[str, typer.Argument(help="What you want to know.")],
    top_k: Annotated[int, typer.Option(help="How many passages at most.")] = 3,
    document: Annotated[str | None, typer.Option(help="Look in this document only, by its id.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who is acting.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The reply as it is, for programs.")] = False,
) -> None:
    """Search documents, and show the passages that answer best."""
    from engram.cli.memory import call_tool

    given = {"query": text, "top_k": top_k, "document_id": document, "actor_user_id": actor}
    reply = call_tool("knowledge_search", {k: v for k, v in given.items() if v is not None})
    if as_json:
        print(json.dumps(reply, ensure_ascii=False, indent=2))
        return
    _show(reply["results"], text)
    if reply["words_only_because"]:
        print(f"by words only: {reply['words_only_because']}", file=sys.stderr)
    if not reply["results"]:
        print("nothing was found; `engram ingest upload PATH` brings documents in", file=sys.stderr)
        raise typer.Exit(1)


def _show(results: Sequence[Mapping[str, Any]], asked: str) -> None:
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    for number, hit in enumerate(results, start=1):
        if number > 1:
            console.print()
        console.print(_place(number, hit))
        for line in _lines(console, str(hit["passage"]), asked):
            console.print(line)


def _place(number: int, hit: Mapping[str, Any]) -> Text:
    """Title, then where in it; nothing of a document is read as markup."""
    from rich.text import Text

    place = Text.assemble((f"{number}. ", "dim"))
    place.append(str(hit["title"]), style="bold cyan")
    if hit["heading"]:
        place.append(f"  {hit['heading']}", style="cyan")
    if hit["page"] is not None:
        place.append(f"  p. {hit['page']}", style="magenta")
    place.append(f"  {hit['score']:.2f}", style="dim")
    return place


def _lines(console: Console, passage: str, asked: str) -> Iterator[Text]:
    """The passage, set in and wrapped, with the words that were asked for standing out."""
    from rich.text import Text

    from engram.search.asking import terms

    shown = Text("".join(c for c in passage if c.isprintable() or c in "\n\t"))
    words = [term.stem or term.word for term in terms(asked, _MAX_TERMS)]
    if words:
        shown.highlight_words(words, style="bold yellow", case_sensitive=False)
    for line in shown.wrap(console, max(20, console.width - len(_INDENT))):
        line.rstrip()
        yield Text.assemble(_INDENT, line) if line.plain else line
