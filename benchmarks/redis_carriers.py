"""Implements carriers of delayed messages on Redis: with Tarry and a relay, and with a sorted set and a Lua script.

It has the producer and the consumer. `carrier_settings` alone uses this module, which stands apart as one of three
brokers. The relay is `examples.redis_relay`, or `tarry-relay` with the same names; `sorted_set_worker` moves due
members out of the sorted set.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import redis.asyncio

import tarry
from benchmarks import load, sorted_set_worker
from benchmarks.carrying import RETRY_MS, Delivery, Message, Take
from benchmarks.handing_back import HandingBack
from examples import redis_relay

GROUP, PORTION, ONCE_S = "consumer", 1_000, 3_600
# Scripts that change nothing if they are repeated
PUBLISH = """
if redis.call('SET', KEYS[2], '', 'NX', 'EX', ARGV[1]) then
    redis.call('XADD', KEYS[1], '*', 'deliver-at-ms', ARGV[2], 'message', ARGV[3])
end
"""
SCHEDULE = """
if redis.call('SET', KEYS[2], '', 'NX', 'EX', ARGV[1]) then redis.call('ZADD', KEYS[1], ARGV[2], ARGV[3]) end
"""


class RedisRelayed:
    """A carrier with Tarry and a relay.

    Failed deliveries go back through the relay, or some of them to Tarry directly (`handing_back`).
    """

    def __init__(self, url: str, handing_back: HandingBack | None) -> None:
        self.failures = (redis.RedisError, OSError, *HandingBack.failures)
        self._url = url
        self._handing_back = handing_back

    async def publish(self, messages: Sequence[Message]) -> None:
        async with redis.asyncio.Redis.from_url(self._url) as broker:
            await _publish(broker, PUBLISH, redis_relay.SOURCE, messages)

    async def consume(self, take: Take) -> None:
        async with redis.asyncio.Redis.from_url(self._url) as broker:
            async for entries in _portions(broker, redis_relay.DUE):
                through_relay = []
                for each in take([_relayed(*entry) for entry in entries]):
                    if self._handing_back is not None and self._handing_back.takes(each):
                        await self._handing_back.hand_back(each)
                    else:
                        through_relay.append(each)
                async with broker.pipeline() as commit:
                    for each in through_relay:
                        _ = commit.xadd(redis_relay.FAILED, {"tarry-delivery-id": each.handle})
                    _ = commit.xack(redis_relay.DUE, GROUP, *[place for place, _ in entries])
                    await commit.execute()


class RedisSortedSet:
    """A sorted set by due time, and a worker that moves its due members to a stream by a Lua script."""

    failures = (redis.RedisError, OSError)

    def __init__(self, url: str) -> None:
        self._url = url

    async def publish(self, messages: Sequence[Message]) -> None:
        async with redis.asyncio.Redis.from_url(self._url) as broker:
            await _publish(broker, SCHEDULE, sorted_set_worker.WAITING, messages)

    async def consume(self, take: Take) -> None:
        async with redis.asyncio.Redis.from_url(self._url) as broker:
            async for entries in _portions(broker, sorted_set_worker.DUE):
                failed = take([_moved(*entry) for entry in entries])
                async with broker.pipeline() as commit:
                    for each in failed:
                        member = f"{each.number}:{each.attempt + 1}"
                        _ = commit.zadd(sorted_set_worker.WAITING, {member: each.received_ms + RETRY_MS})
                    _ = commit.xack(sorted_set_worker.DUE, GROUP, *[place for place, _ in entries])
                    await commit.execute()


async def _publish(broker: Any, script: str, to: str, messages: Sequence[Message]) -> None:
    publish = broker.register_script(script)
    async with broker.pipeline(transaction=False) as calls:
        for each in messages:
            await publish([to, f"published:{each.number}"], [ONCE_S, each.due_ms, f"{each.number}:0"], client=calls)
        await calls.execute()


async def _portions(broker: Any, stream: str) -> AsyncIterator[list[tuple[bytes, dict[bytes, bytes]]]]:
    """Yield entries that were read and not committed, then new ones."""
    with contextlib.suppress(redis.ResponseError):
        await broker.xgroup_create(stream, GROUP, id="0", mkstream=True)
    after = "0"
    while True:
        found = await broker.xreadgroup(GROUP, GROUP, {stream: after}, count=PORTION, block=1_000)
        if entries := found[0][1] if found else []:
            yield entries
        else:
            after = ">"


def _relayed(place: bytes, fields: dict[bytes, bytes]) -> Delivery:
    name = fields[b"tarry-delivery-id"].decode()
    return _delivery(place, fields, attempt=tarry.DeliveryId.parse(name).redelivery_count, handle=name)


def _moved(place: bytes, fields: dict[bytes, bytes]) -> Delivery:
    return _delivery(place, fields, attempt=int(fields[b"message"].partition(b":")[2]))


def _delivery(place: bytes, fields: dict[bytes, bytes], *, attempt: int, handle: str = "") -> Delivery:
    number = int(fields[b"message"].partition(b":")[0])
    return Delivery(number, attempt, place.decode(), load.now_ms(), handle)
