"""Commands for the tokens file: who may call this gateway.

A token is shown once, when it is made; the file keeps its hash. On standard
output is the token alone, so that a script can take it from there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from engram.api.tokens import Token
    from engram.kernel.settings import Settings

MIN_PREFIX = 4

TokensPath = Annotated[
    Path | None, typer.Option("--file", help="The tokens file; by default ENGRAM_TOKENS_FILE.")
]


def create(
    owner: Annotated[str, typer.Argument(help="Whose token it is: private:OWNER is their own space.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="read, write or admin; may be repeated. By default read, write.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="All scopes.")] = False,
    space: Annotated[
        list[str] | None, typer.Option(help="A shared space it is limited to; may be repeated.")
    ] = None,
    expires_days: Annotated[
        int | None, typer.Option(min=1, max=36500, help="Valid for so many days.")
    ] = None,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
    file: TokensPath = None,
) -> None:
    """Make a token. It is shown once, now."""
    if scope and admin:
        raise typer.BadParameter("--scope and --admin exclude each other")
    from datetime import timedelta

    from engram.api import tokens, tokens_file
    from engram.gateway.callers import READ, SCOPES, WRITE
    from engram.kernel.clock import SYSTEM_CLOCK
    from engram.kernel.settings import Settings

    settings = Settings.load()
    path = _path(file, settings)
    secret = tokens.new_secret()
    entry: dict[str, Any] = {
        "sha256": tokens.sha256_of(secret),
        "owner": owner,
        "scopes": list(SCOPES) if admin else scope or [READ, WRITE],
        "note": note,
    }
    if space:
        entry["spaces"] = space
    if expires_days is not None:
        now = SYSTEM_CLOCK.now().replace(microsecond=0)
        entry["expires_at"] = now + timedelta(days=expires_days)
    token = tokens.checked(entry, "the new entry")
    tokens_file.edit(path, lambda text: tokens.with_table(text or tokens.PREAMBLE, token))
    print(secret)
    sys.stdout.flush()
    _tell_how_to_use(token, path, settings)


def list_(file: TokensPath = None) -> None:
    """Show whose tokens there are; never a token itself."""
    from engram.api import tokens_file
    from engram.kernel.clock import SYSTEM_CLOCK
    from engram.kernel.settings import Settings

    path = _path(file, Settings.load())
    now = SYSTEM_CLOCK.now()
    rows = [
        (
            token.name,
            token.owner,
            ",".join(sorted(token.scopes)),
            "all" if token.spaces is None else ",".join(sorted(token.spaces)) or "none",
            _expiry(token) + (" (over)" if token.expired(now) else ""),
            token.note,
        )
        for token in tokens_file.read(path)
    ]
    if not rows:
        print(f"{path} has no token; make one with `engram token create OWNER`", file=sys.stderr)
        return
    _print_table([("HASH", "OWNER", "SCOPES", "SHARED SPACES", "EXPIRES", "NOTE"), *rows])


def revoke(
    prefix: Annotated[
        str, typer.Argument(help="The first digits of its hash, as `engram token list` shows.")
    ],
    file: TokensPath = None,
) -> None:
    """Take a token back. A running gateway refuses it a second later."""
    from engram.api import tokens, tokens_file
    from engram.kernel.settings import Settings

    path = _path(file, Settings.load())
    gone: list[Token] = []

    def cut(text: str) -> str:
        known = tokens.parse(text, str(path))
        gone.append(_the_one(known, prefix))
        return tokens.without_table(text, gone[0], str(path))

    tokens_file.edit(path, cut)
    print(f"revoked {gone[0].name} of {gone[0].owner}")
    if not tokens_file.read(path):
        print(f"{path} has no token left: nobody can call, and no gateway starts with it", file=sys.stderr)


def _path(given: Path | None, settings: Settings) -> Path:
    found = given or settings.tokens_file or settings.data_dir / "tokens.toml"
    return found.expanduser().absolute()


def _the_one(known: tuple[Token, ...], prefix: str) -> Token:
    from engram.kernel.errors import InputError

    if len(prefix) < MIN_PREFIX:
        raise InputError(f"give at least {MIN_PREFIX} digits of the hash", hint="see `engram token list`")
    found = [token for token in known if token.sha256.startswith(prefix.lower())]
    if not found:
        raise InputError("no token has a hash that begins so", hint="see `engram token list`")
    if len(found) > 1:
        told = ", ".join(f"{token.sha256[: len(prefix) + 8]} ({token.owner})" for token in found)
        raise InputError(f"{len(found)} tokens have a hash that begins so", hint=f"they are {told}")
    return found[0]


def _tell_how_to_use(token: Token, path: Path, settings: Settings) -> None:
    url = settings.gateway_url
    lines = [
        "",
        f"The token of {token.owner} ({', '.join(sorted(token.scopes))}), valid {_validity(token)}.",
        f"It is not kept: {path} has its hash, {token.name}….",
        "",
        "  engram:       export ENGRAM_TOKEN=<the token>",
        f'  curl:         curl -H "Authorization: Bearer $ENGRAM_TOKEN" {url}/metrics',
        "  Claude Code:  claude mcp add --transport http engram "
        f'{url}/mcp --header "Authorization: Bearer $ENGRAM_TOKEN"',
        '  Cursor:       "headers": {"Authorization": "Bearer <the token>"}  beside "url"',
    ]
    if settings.tokens_file != path:
        lines += ["", f"The gateway asks for tokens when it is started with ENGRAM_TOKENS_FILE={path}"]
    print("\n".join(lines), file=sys.stderr)


def _expiry(token: Token) -> str:
    return token.expires_at.strftime("%Y-%m-%d %H:%M %Z") if token.expires_at else "never"


def _validity(token: Token) -> str:
    return f"until {_expiry(token)}" if token.expires_at else "until it is revoked"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
