"""One definition of an operation, two ways to run it.

A primitive is a pure function that returns a `Query`, with the specification's
parameters and a last one, `config`. Calling it runs the query and blocks, as a
script wants; `.query(...)` gives the value itself, which the servers run
asynchronously and `config` does not concern.

    rows = claim_outbox("worker-1", limit=10)                 # a script
    rows = await db.run(claim_outbox.query("worker-1", 10))   # a server
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

from engram.logbook.config import Config
from engram.logbook.connection import run
from engram.postgres.query import Query

P = ParamSpec("P")
T = TypeVar("T")


class Primitive(Generic[P, T]):
    def __init__(self, build: Callable[P, Query[T]]) -> None:
        self._build = build
        self._signature = inspect.signature(build)
        update_wrapper(self, build)

    def query(self, *args: P.args, **kwargs: P.kwargs) -> Query[T]:
        return self._build(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        config: Config | None = self._signature.bind(*args, **kwargs).arguments.get("config")
        return run(self._build(*args, **kwargs), config)


def primitive(build: Callable[P, Query[T]]) -> Primitive[P, T]:
    return Primitive(build)
