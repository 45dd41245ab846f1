"""Named statements from a `.sql` file.

    -- name: claim
    -- Lease due rows, oldest first.
    SELECT ...

Each statement starts with its name and a line of purpose; a file without them,
or with a name twice, is refused when it is loaded. Comments stay behind; no
line of a string literal may start with `--`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from engram.postgres.query import Statement

_HEADER = re.compile(r"^-- name: (?P<name>\w+)\n-- (?P<purpose>\S.*)\n", re.MULTILINE)
_ANY_NAME = re.compile(r"^\s*--\s*name\s*:", re.MULTILINE)


def load_sql(package: str, filename: str) -> Mapping[str, Statement]:
    """The statements of `filename` beside the module `package`, by name."""
    text = files(package).joinpath(filename).read_text(encoding="utf-8")
    return parse_sql(text, filename.removesuffix(".sql"))


def parse_sql(text: str, stem: str) -> Mapping[str, Statement]:
    headers = list(_HEADER.finditer(text))
    if not headers or len(headers) != len(_ANY_NAME.findall(text)):
        raise ValueError(f"{stem}.sql: every statement needs '-- name: x' and a line of purpose")
    if text[: headers[0].start()].strip():
        raise ValueError(f"{stem}.sql: something stands before the first '-- name: x'")
    statements: dict[str, Statement] = {}
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        body = _sent(text[header.end() : following.start() if following else None])
        name = header["name"]
        if name in statements or not body:
            raise ValueError(f"{stem}.sql: {name} is empty or there twice")
        statements[name] = Statement(f"{stem}.{name}", body)
    return MappingProxyType(statements)


def _sent(body: str) -> str:
    """Without what is for readers: comments and indentation. psycopg keeps its reading of a
    statement only while that is short, and the server gets it every time."""
    lines = (line.strip() for line in body.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("--"))
