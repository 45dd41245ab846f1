"""What engram needs of a memory server, as one suite: over the embedded server, over a plain
stand-in, and over a real OpenMemory where OPENMEMORY_BASE_URL (and OPENMEMORY_API_KEY) name one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from engram.gateway.breaker import Breaker
from engram.gateway.openmemory_client import Memory, OpenMemoryClient
from engram.kernel.content import payload_sha
from engram.kernel.errors import BackendError
from support.backend import Backend
from support.parts import used
from support.plain_server import PlainServer
from support.serving import serving

pytestmark = pytest.mark.anyio

REAL = os.environ.get("OPENMEMORY_BASE_URL")


@dataclass
class Address:
    url: str
    key: str | None


WITH_KEYS = ["embedded", *(["real"] if REAL else [])]


@pytest.fixture(params=[*WITH_KEYS, "plain"])
def address(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Address]:
    if request.param == "embedded":
        yield Address(backend.url, backend.key)
    elif request.param == "plain":
        with serving(PlainServer()) as url:
            yield Address(url, None)
    else:
        used("OpenMemory", f"real: {REAL}")
        yield Address(str(REAL), os.environ.get("OPENMEMORY_API_KEY"))


def client_of(address: Address, key: str | None) -> OpenMemoryClient:
    breaker = Breaker(failures=1000, cooldown=0.05)
    return OpenMemoryClient(address.url, api_key=key, timeout=10, breaker=breaker)


@pytest.fixture
async def client(address: Address) -> AsyncIterator[OpenMemoryClient]:
    client = client_of(address, address.key)
    yield client
    await client.close()


def memory(text: str, space: str = "team:contract") -> Memory:
    """Different in every run: a real server keeps what earlier runs left there."""
    content = f"{text} {secrets.token_hex(8)}"
    return Memory(
        content=content,
        space=space,
        payload_sha=payload_sha(content),
        idempotency_key=f"engram-{secrets.token_hex(8)}",
        metadata={"kind": "FACT", "actor_user_id": "ada"},
    )


async def test_what_is_stored_is_found_by_its_words(client: OpenMemoryClient) -> None:
    given = memory("The billing webhook is retried three times")
    memory_id, found = await client.store(given, find_first=False)
    assert memory_id
    assert not found
    hits = await client.query(given.content, k=10)
    assert (memory_id, given.content) in [(hit.memory_id, hit.content) for hit in hits]


async def test_an_earlier_delivery_is_found_instead_of_repeated(client: OpenMemoryClient) -> None:
    given = memory("The lease is renewed before the call")
    memory_id, _ = await client.store(given, find_first=False)
    assert await client.store(given, find_first=True) == (memory_id, True)
    assert await client.copies(given) == [memory_id]


async def test_the_same_words_in_another_space_are_another_memory(client: OpenMemoryClient) -> None:
    ours = memory("The outbox is drained at night")
    await client.store(ours, find_first=False)
    theirs = Memory(ours.content, "team:other", ours.payload_sha, f"engram-{secrets.token_hex(8)}")
    assert await client.copies(theirs) == []


async def test_unicode_and_markdown_come_back_as_they_were(client: OpenMemoryClient) -> None:
    given = memory("# 租约\n\n```python\nprint('\u00e9\U0001f680')\n```\n\ttabbed | piped")
    memory_id, _ = await client.store(given, find_first=False)
    assert await client.copies(given) == [memory_id]


async def test_what_is_deleted_is_gone_and_may_come_again(client: OpenMemoryClient) -> None:
    given = memory("The cache is flushed on deploy")
    memory_id, _ = await client.store(given, find_first=False)
    await client.delete(memory_id)
    assert await client.copies(given) == []
    await client.delete(memory_id)
    anew = Memory(given.content, given.space, given.payload_sha, f"engram-{secrets.token_hex(8)}")
    again, found = await client.store(anew, find_first=False)
    assert not found
    assert await client.copies(given) == [again]


async def test_the_probe_is_an_authenticated_read(client: OpenMemoryClient) -> None:
    await client.probe()
    assert not client.breaker.is_open


# The stand-in keeps whatever it is given and takes any key.
@pytest.mark.parametrize("address", WITH_KEYS, indirect=True)
async def test_an_empty_memory_is_refused_for_good(client: OpenMemoryClient) -> None:
    empty = Memory("", "team:contract", payload_sha(""), f"engram-{secrets.token_hex(8)}")
    with pytest.raises(BackendError) as refused:
        await client.store(empty, find_first=False)
    assert (refused.value.reason, refused.value.retryable) == ("refused", False)


@pytest.mark.parametrize("address", WITH_KEYS, indirect=True)
@pytest.mark.parametrize("key", [None, "a-wrong-key"])
@pytest.mark.parametrize("doing", ["probe", "store", "query"])
async def test_a_wrong_key_says_nothing_about_the_memory(
    address: Address, key: str | None, doing: str
) -> None:
    client = client_of(address, key)
    calls = {
        "probe": client.probe,
        "store": lambda: client.store(memory("A fact"), find_first=False),
        "query": lambda: client.query("a fact", k=1),
    }
    try:
        with pytest.raises(BackendError) as refused:
            await calls[doing]()
    finally:
        await client.close()
    told = refused.value
    assert (told.reason, told.outage, told.retryable) == ("unauthorized", True, True)
