"""The tools, each defined once. MCP, the bare form and the REST routes all end in `perform`,
so that a tool behaves the same wherever it is reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engram.api.errors import invalid_arguments
from engram.api.services import Services
from engram.api.tools import evidence, governance, knowledge, logbook, memory, sandboxes
from engram.api.tools.base import Arguments, Call, Prepared, Tool, WriteArguments
from engram.gateway import callers
from engram.gateway.callers import Caller
from engram.kernel import correlation
from engram.kernel.errors import NotFound
from engram.logbook.idempotency_keys import Answer

__all__ = ["TOOLS", "Arguments", "Call", "Tool", "WriteArguments", "call", "perform"]

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        *memory.TOOLS,
        *governance.TOOLS,
        *evidence.TOOLS,
        *logbook.TOOLS,
        *knowledge.TOOLS,
        *sandboxes.TOOLS,
    )
}


async def call(services: Services, name: str, arguments: Any, caller: Caller | None) -> Answer:
    """Run a tool by name; raises `EngramError` for anything that is not a result."""
    tool = TOOLS.get(name)
    if tool is None:
        raise NotFound(f"there is no tool {name!r}", hint=f"tools: {', '.join(TOOLS)}")
    try:
        asked = tool.arguments.model_validate({} if arguments is None else arguments)
    except ValidationError as error:
        raise invalid_arguments(error) from error
    return await perform(services, tool, asked, caller)


async def perform(services: Services, tool: Tool, asked: Arguments, caller: Caller | None) -> Answer:
    """Run a tool once for its idempotency key, however the call came in."""
    acting = callers.acting(caller, asked.actor_user_id).allowed(tool.scope)
    key = asked.idempotency_key if isinstance(asked, WriteArguments) else None
    asked_for = asked.model_dump_json(exclude={"idempotency_key"})
    async with services.idempotency.request(
        acting.actor, key, path=tool.name, method="TOOL", body=asked_for, resumable=tool.resumable
    ) as request:
        if request.response is not None:
            return request.response
        made_under = request.resource_id if key else None
        result = await tool.run(Call(services, acting, asked, correlation.current_or_new(), made_under))
        if isinstance(result, Prepared):
            body = tool.dump(result.result)
            if answer := await request.save_with(result.step, status_code=tool.status_code, body=body):
                return answer
            result = await result.otherwise()
        return await request.save(status_code=tool.status_code, body=tool.dump(result))
