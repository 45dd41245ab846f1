"""What a tool is: its arguments, its result, its words for agents, and what its caller must be allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from engram.api.services import Services
from engram.gateway.callers import Caller
from engram.kernel.content import why_unstorable
from engram.logbook.idempotency import KEY_PATTERN
from engram.postgres.query import Query

A = TypeVar("A", bound="Arguments")

# For the schema only: a key is judged, in better words than a pattern's, where it is used.
KEY_SHAPE: dict[str, Any] = {"pattern": f"^{KEY_PATTERN}$"}


class Checked(BaseModel):
    """Knows every field it is given, and can be kept in the database."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="after")
    @classmethod
    def _can_be_kept(cls, value: Any) -> Any:
        if problem := why_unstorable(value):
            raise ValueError(problem)
        return value


class Arguments(Checked):
    actor_user_id: str | None = Field(
        default=None, description="Who is acting. Leave out unless you act for a named user."
    )


class WriteArguments(Arguments):
    idempotency_key: str | None = Field(
        default=None,
        description="Your own id for this call. Repeat it when you retry: the effect happens once "
        "and you get the first answer. Up to 128 letters, digits, dashes and underscores.",
        json_schema_extra=KEY_SHAPE,
    )


@dataclass(frozen=True)
class Call(Generic[A]):
    """One call of a tool: by whom, with what. With an idempotency key, what it makes has `request_id`,
    the same for every try, so that a try after a crash finds it."""

    services: Services
    caller: Caller
    asked: A
    correlation_id: str
    request_id: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A result that holds once `step` is done; it is done in the statement that stores the answer.

    `otherwise` finds out what became of it, if the step came too late.
    """

    result: Any
    step: Query[Any]
    otherwise: Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class Tool:
    """`path` is the REST twin's; `scope` is what a token must have: read, write or admin.

    `repeatable`: the same call again, even without an idempotency key, changes nothing more.
    `resumable`: a try whose outcome is unknown may be gone on with. `twin`: the route at `path` is made
    from this table; else it is written out in `api/routes`.
    """

    name: str
    title: str
    path: str
    scope: str
    arguments: type[Arguments]
    result: type[Any]
    run: Callable[[Call[Any]], Awaitable[Any]]
    destructive: bool = False
    repeatable: bool = True
    resumable: bool = True
    status_code: int = 200
    twin: bool = True

    @property
    def read_only(self) -> bool:
        return not issubclass(self.arguments, WriteArguments)

    @property
    def description(self) -> str:
        return "\n".join(line.strip() for line in (self.run.__doc__ or "").strip().splitlines())

    @cached_property
    def input_schema(self) -> dict[str, Any]:
        return self.arguments.model_json_schema()

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.result)

    @cached_property
    def output_schema(self) -> dict[str, Any]:
        return self._adapter.json_schema(mode="serialization")

    def dump(self, result: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = self._adapter.dump_python(result, mode="json")
        return dumped
