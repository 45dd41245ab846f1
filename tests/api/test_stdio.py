"""The bridge of `engram mcp` by itself: who is looked for, how often, and what is taken for an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from mcp import Client
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engram.api.stdio import bridged
from engram.kernel.errors import ConfigError, GatewayUnavailable
from engram.kernel.settings import Settings
from support.faults import Fault, FaultyServer
from support.serving import serving

pytestmark = pytest.mark.anyio


class Search:
    """Says when it is over, and counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.over = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> None:
        self.begun += 1
        await self.over.wait()
        if self.error:
            raise self.error


def at(settings: Settings, url: str) -> Settings:
    return replace(settings, gateway_port=urlsplit(url).port)


async def test_all_who_wait_share_one_search_and_its_outcome(settings: Settings, gateway: str) -> None:
    search = Search()
    search.error = GatewayUnavailable("nobody is there")
    async with bridged(at(settings, gateway), search) as bridge, Client(bridge.server()) as client:
        calls = [asyncio.create_task(client.call_tool("memory_query", {"query": "x"})) for _ in range(20)]
        while not search.begun:
            await asyncio.sleep(0)
        search.over.set()
        assert all(result.is_error for result in await asyncio.gather(*calls))
        assert search.begun == 1
        search.error = None
        for _ in range(3):
            assert not (await client.call_tool("memory_query", {"query": "x"})).is_error
        assert search.begun == 2, "who was found is not looked for again"


async def test_a_caller_that_gives_up_does_not_end_the_search_of_others(
    settings: Settings, gateway: str
) -> None:
    search = Search()
    async with bridged(at(settings, gateway), search) as bridge, Client(bridge.server()) as client:
        first, second = [
            asyncio.create_task(client.call_tool("memory_query", {"query": "x"})) for _ in range(2)
        ]
        while not search.begun:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        search.over.set()
        assert not (await second).is_error
    assert search.begun == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda: PlainTextResponse("welcome"),
        lambda: JSONResponse(["no", "object"]),
        lambda: JSONResponse({"detail": "not found"}, 404),
        lambda: Response(status_code=302, headers={"location": "http://127.0.0.1:9/"}),
    ],
)
async def test_what_is_no_answer_of_engrams_is_told_and_somebody_looked_for_anew(
    settings: Settings, answer: Callable[[], Response]
) -> None:
    search = Search()
    search.over.set()
    with serving(answer()) as url:
        async with bridged(at(settings, url), search) as bridge, Client(bridge.server()) as client:
            for n in (1, 2):
                result = await client.call_tool("memory_query", {"query": "x"})
                assert result.is_error
                told = json.loads(result.content[0].text)
                assert told["error_code"] == "GATEWAY_UNAVAILABLE"
                assert "is not engram" in told["message"]
                assert search.begun == n


async def test_a_token_that_no_header_can_carry_is_refused_by_name(settings: Settings) -> None:
    for token in ("tokén", "to\nken"):
        with pytest.raises(ConfigError, match="ENGRAM_TOKEN") as refused:
            async with bridged(replace(settings, token=token), Search()):
                pass
        assert token not in str(refused.value)


@pytest.mark.parametrize(
    ("tool", "arguments", "next_step"),
    [
        ("memory_store", {"payload_md": "x"}, "repeat the call as it was"),
        ("memory_query", {"query": "x"}, "repeat the call as it was"),
        ("logbook_create_item", {"item_type": "task", "title": "x"}, "look whether it did"),
        ("logbook_create_item", {"title": "x", "idempotency_key": "k-1"}, "repeat the call as it was"),
    ],
)
async def test_a_call_whose_answer_is_lost_is_sent_once_and_told_how_to_repeat(
    settings: Settings, tool: str, arguments: dict, next_step: str
) -> None:
    search = Search()
    search.over.set()
    breaking = FaultyServer(PlainTextResponse("welcome"))
    breaking.fail(Fault.DROP, path="/mcp")
    with serving(breaking) as url:
        async with bridged(at(settings, url), search) as bridge, Client(bridge.server()) as client:
            told = json.loads((await client.call_tool(tool, arguments)).content[0].text)
    assert "may or may not have taken effect" in told["message"]
    assert next_step in told["message"]
    assert breaking.calls == ["POST /mcp"]
