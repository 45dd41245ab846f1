"""Asks a Redis whether it is there."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from engram.kernel.errors import RedisUnavailable

PING_SECONDS = 2.0


async def ping(url: str) -> None:
    """Raises `RedisUnavailable` when it does not answer, or not to us."""
    try:
        async with Redis.from_url(
            url,
            socket_timeout=PING_SECONDS,
            socket_connect_timeout=PING_SECONDS,
            retry=Retry(NoBackoff(), 0),
        ) as client:
            await client.ping()
    except (RedisError, OSError, ValueError) as error:
        raise RedisUnavailable(f"Redis does not answer: {error}", hint="check REDIS_URL") from error
