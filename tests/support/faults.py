"""A real memory server that fails when told to, before or after it has done the work.

Faults are given per call of `/memory/add` (or any path), in order; once they
are used up the server behaves. `Fault.AFTER_*` let the server apply the write
first: the caller cannot know. `Fault.WAIT` holds the call until `let_go` is set.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Fault(Enum):
    NONE = "none"
    STATUS = "status"
    HTML = "html"
    NONSENSE = "nonsense"
    HUGE = "huge"
    HANG = "hang"
    DROP = "drop"
    WAIT = "wait"
    AFTER_HANG = "after_hang"
    AFTER_DROP = "after_drop"
    AFTER_500 = "after_500"


@dataclass
class Order:
    fault: Fault
    status: int = 500
    body: dict | None = None
    headers: dict | None = None


@dataclass
class FaultyServer:
    """Wraps the application; `calls` records every path that came in."""

    app: ASGIApp
    orders: dict[str, deque[Order]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def fail(self, *orders: Order | Fault, path: str = "/memory/add") -> None:
        queue = self.orders.setdefault(path, deque())
        queue.extend(o if isinstance(o, Order) else Order(o) for o in orders)

    def reset(self) -> None:
        """Behave, and forget what was asked."""
        self.orders.clear()
        self.calls.clear()
        self.let_go.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.calls.append(f"{scope['method']} {scope['path']}")
        queue = self.orders.get(scope["path"]) or self.orders.get("*")
        order = queue.popleft() if queue else Order(Fault.NONE)
        await self._act(order, scope, receive, send)

    async def _act(self, order: Order, scope: Scope, receive: Receive, send: Send) -> None:
        match order.fault:
            case Fault.NONE:
                await self.app(scope, receive, send)
            case Fault.STATUS:
                body = order.body if order.body is not None else {"error": "told to"}
                await JSONResponse(body, order.status, headers=order.headers)(scope, receive, send)
            case Fault.HTML:
                await Response("<html>welcome</html>", media_type="text/html")(scope, receive, send)
            case Fault.NONSENSE:
                await JSONResponse(["no", "object"])(scope, receive, send)
            case Fault.HUGE:
                await Response(b'{"id": "' + b"x" * (5 << 20) + b'"}')(scope, receive, send)
            case Fault.HANG:
                await _hang()
            case Fault.DROP:
                await _drop(send)
            case Fault.WAIT:
                while not self.let_go.is_set():
                    await asyncio.sleep(0.005)
                await self.app(scope, receive, send)
            case _:
                await self.app(scope, receive, _swallow)
                await self._after(order, scope, receive, send)

    async def _after(self, order: Order, scope: Scope, receive: Receive, send: Send) -> None:
        if order.fault is Fault.AFTER_HANG:
            await _hang()
        elif order.fault is Fault.AFTER_DROP:
            await _drop(send)
        else:
            await JSONResponse({"error": "internal"}, 500)(scope, receive, send)


async def _swallow(message: Message) -> None:
    return None


async def _hang() -> None:
    """Longer than any deadline in the tests; ended by the server's shutdown."""
    await asyncio.sleep(30)


async def _drop(send: Send) -> None:
    """Promise more than is sent, then stop: the connection breaks under the client."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
    await send({"type": "http.response.body", "body": b'{"id"', "more_body": False})
