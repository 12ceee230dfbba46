"""Relays next to NATS: messages of the stream `orders` reach the stream `orders-due` when they are due.

Producers publish with the header `deliver-at-ms` (Unix ms). A failed consumer publishes the `tarry-delivery-id` of the
failed message to `orders-failed`: it is redelivered, with another id, by the subscription's policy. Each loop commits
last; after any failure or kill, all loops begin again. `orders` keeps messages by limits alone and allows direct gets,
`orders-due` has a duplicate window of an hour.

    take_in    pushed from orders         add to Tarry, durable              ack to NATS
    put_out    receive from Tarry         get it, publish it once for an id  acknowledge to Tarry
    take_back  pushed from orders-failed  hand back to Tarry, durable        ack to NATS
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import nats

import tarry
from tarry.positions import NatsStream1

SOURCE, DUE, FAILED, RELAY = "orders", "orders-due", "orders-failed", "relay"


async def pushed(js: Any, name: str) -> Any:
    """Yield uncommitted messages, again after 2 s, and new ones. Raises ConnectionClosedError when NATS is gone."""
    subscription = await js.subscribe(name, durable=RELAY, config=nats.js.api.ConsumerConfig(ack_wait=2))
    async for message in subscription.messages:
        yield message
    raise nats.errors.ConnectionClosedError


async def take_in(js: Any, producer: tarry.aio.Producer, tasks: asyncio.TaskGroup) -> None:
    async for message in pushed(js, SOURCE):
        (ledger,), (entry,) = NatsStream1.to_positions(message.metadata.sequence.stream)
        due_ms = int(at) if (at := (message.headers or {}).get("deliver-at-ms", "")).isdigit() else 0
        tasks.create_task(commit(message, await producer.add(ledger, entry, deliver_at_ms=due_ms)))


async def commit(message: Any, done: Awaitable[Any]) -> None:
    try:
        await done
    except (tarry.OutOfRange, tarry.InvalidArgument) as refused:
        print(f"message {message.metadata.sequence.stream} is passed over: {refused}", flush=True)
    await message.ack()


async def put_out(js: Any, subscription: tarry.aio.Subscription) -> None:
    while (batch := await subscription.receive(max_rows=1_000, linger_ms=5)) is not None:
        sequences = NatsStream1.from_positions(batch.ledger_id, batch.entry_id).tolist()
        passing = [pass_on(js, sequence, batch.delivery_id(row)) for row, sequence in enumerate(sequences)]
        gone = [row for row, answer in enumerate(await asyncio.gather(*passing)) if answer is None]
        _ = subscription.reject(batch.take(gone), f"the message is no longer in the stream {SOURCE}")
        _ = subscription.ack(batch)  # Ignored for rows that are already rejected


async def pass_on(js: Any, sequence: int, name: str) -> Any:
    try:
        message = await js.get_msg(SOURCE, sequence, direct=True)
    except nats.js.errors.NotFoundError:
        return None
    own = {header: text for header, text in (message.headers or {}).items() if not header.startswith("Nats-")}
    return await js.publish(DUE, message.data or b"", headers=own | {"tarry-delivery-id": name, "Nats-Msg-Id": name})


async def take_back(js: Any, subscription: tarry.aio.Subscription, tasks: asyncio.TaskGroup) -> None:
    async for message in pushed(js, FAILED):
        tasks.create_task(commit(message, hand_back(subscription, message.headers or {})))


async def hand_back(subscription: tarry.aio.Subscription, headers: dict[str, str]) -> None:
    failed = tarry.DeliveryId.parse(headers.get("tarry-delivery-id", ""))
    await subscription.nack(failed.positions, forwarded=True)


async def relay(broker_url: str, address: str) -> None:
    async with (
        asyncio.TaskGroup() as tasks,
        await nats.connect(broker_url, allow_reconnect=False) as broker,
        tarry.aio.Client(address) as client,
        client.subscribe(SOURCE, RELAY, create=True) as subscription,
        client.producer(SOURCE) as producer,
    ):
        tasks.create_task(put_out(js := broker.jetstream(), subscription))
        tasks.create_task(take_back(js, subscription, tasks))
        await take_in(js, producer, tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--address", default=tarry.DEFAULT_TARGET)
    options = parser.parse_args()
    while True:
        try:
            asyncio.run(relay(options.nats, options.address))
        except* (OSError, nats.errors.Error, tarry.TarryError) as failures:
            print("begins anew:", *failures.exceptions, flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
