"""Relays next to Redis: entries of the stream `orders` reach the stream `{orders}:due` when they are due.

Producers add entries with `deliver-at-ms` (Unix ms); others are due at once. A failed consumer adds the
`tarry-delivery-id` of the failed entry to `{orders}:failed`: it is redelivered, with another id, by the policy. Each
loop commits last; repeated work changes nothing. The relay waits for Redis, with `appendfsync always`, and for Tarry.

    take_in    read orders            add to Tarry, durable         XACK
    put_out    receive from Tarry     XADD, once for a delivery id  acknowledge to Tarry
    take_back  read {orders}:failed   hand back to Tarry, durable   XACK
"""

import argparse
import asyncio
import contextlib
from typing import Any

import numpy as np
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

import tarry
from tarry.positions import RedisSequences1

SOURCE, DUE, FAILED, REFUSED = "orders", "{orders}:due", "{orders}:failed", "{orders}:refused"
RELAY, PORTION, MARKED_S, WAIT_S = "relay", 1_000, 3_600, 3_600
PASS_ON = """
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if entry and redis.call('EXISTS', KEYS[3]) == 0 then
    redis.call('XADD', KEYS[2], '*', 'tarry-delivery-id', ARGV[2], unpack(entry[2]))
    redis.call('SET', KEYS[3], '', 'EX', ARGV[3])
end
return entry and 1 or 0
"""


async def portions(broker: Any, stream: str) -> Any:
    """Yield lists of (id, fields): uncommitted entries, then new ones. The next request commits the last list."""
    with contextlib.suppress(redis.ResponseError):  # The group exists.
        await broker.xgroup_create(stream, RELAY, id="0", mkstream=True)
    task: Any = asyncio.current_task()
    while not task.cancelling():  # In Python 3.11 a wait in the client of Redis may lose its cancellation.
        for after in ("0", ">"):
            found = await broker.xreadgroup(RELAY, RELAY, {stream: after}, count=PORTION, block=1_000)
            if entries := found[0][1] if found else []:
                yield entries
                await broker.xack(stream, RELAY, *[entry_id for entry_id, _ in entries])
    raise asyncio.CancelledError


async def take_in(broker: Any, client: tarry.aio.Client) -> None:
    async for entries in portions(broker, SOURCE):
        positions = RedisSequences1.to_positions(entry_id for entry_id, _ in entries)
        due_ms = [int(at) if (at := fields.get(b"deliver-at-ms", b"")).isdigit() else 0 for _, fields in entries]
        added = await client.add(SOURCE, *positions, deliver_at_ms=due_ms, on_invalid=tarry.OnInvalid.RETURN)
        for row, reason in added.refused.items():
            await broker.xadd(REFUSED, {"id": entries[row][0], "reason": repr(reason)})


async def put_out(broker: Any, subscription: tarry.aio.Subscription) -> None:
    while (batch := await subscription.receive(max_rows=PORTION, linger_ms=5)) is not None:
        async with broker.pipeline(transaction=False) as calls:
            for row, entry_id in enumerate(RedisSequences1.from_positions(batch.ledger_id, batch.entry_id)):
                name = batch.delivery_id(row)
                calls.eval(PASS_ON, 3, SOURCE, DUE, f"{DUE}:{name}", entry_id, name, MARKED_S)
            is_there = np.array(await calls.execute(), bool)
        _ = subscription.ack(batch.take(is_there))
        _ = subscription.reject(batch.take(~is_there), f"the entry is no longer in the stream {SOURCE}")


async def take_back(broker: Any, subscription: tarry.aio.Subscription) -> None:
    async for entries in portions(broker, FAILED):
        await asyncio.gather(*(hand_back(subscription, fields) for _, fields in entries))


async def hand_back(subscription: tarry.aio.Subscription, fields: dict[bytes, bytes]) -> None:
    with contextlib.suppress(KeyError, ValueError):  # No id of Tarry: nothing can be redelivered.
        failed = tarry.DeliveryId.parse(fields[b"tarry-delivery-id"].decode())
        await subscription.nack(failed.positions, forwarded=True)


async def relay(broker_url: str, address: str) -> None:
    async with (
        asyncio.TaskGroup() as loops,
        redis.asyncio.Redis.from_url(broker_url, retry=Retry(ConstantBackoff(0.2), retries=-1)) as broker,
        tarry.aio.Client(address, timeout_s=WAIT_S) as client,
        client.subscribe(SOURCE, RELAY, create=True) as subscription,
    ):
        loops.create_task(take_in(broker, client))
        loops.create_task(put_out(broker, subscription))
        await take_back(broker, subscription)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", default="redis://127.0.0.1:6379")
    parser.add_argument("--address", default=tarry.DEFAULT_TARGET)
    options = parser.parse_args()
    asyncio.run(relay(options.redis, options.address))


if __name__ == "__main__":
    main()
