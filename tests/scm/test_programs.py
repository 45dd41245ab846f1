"""Programs that say more than anybody wants to hear."""

from __future__ import annotations

import asyncio
import sys

import pytest

from engram.kernel.errors import SourceError
from engram.scm.programs import Program

pytestmark = pytest.mark.anyio

ENDLESS = Program([sys.executable, "-c", "import sys\nwhile 1: sys.stdout.write('word ' * 1000)"], {}, 30.0)


async def test_one_that_never_stops_talking_is_ended_when_enough_was_heard() -> None:
    async with asyncio.timeout(20):
        with pytest.raises(SourceError, match="said more than"):
            await ENDLESS.output(most=1 << 20)


async def test_one_whose_output_nobody_takes_can_be_ended() -> None:
    stream = ENDLESS.stream()
    assert await anext(stream)
    # Long enough for the pipe and the buffer behind it to be full.
    await asyncio.sleep(0.3)
    began = asyncio.get_running_loop().time()
    await stream.aclose()
    assert asyncio.get_running_loop().time() - began < 4
