"""Implements carriers of delayed messages on NATS: with Tarry and a relay, and with NATS' own schedules.

It has the streams, the producer and the consumer. `carrier_settings` alone uses this module, which stands apart as one
of three brokers. The relay is `examples.nats_relay`, or `tarry-relay` with the same names.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import nats
from nats.js import api

import tarry
from benchmarks import load
from benchmarks.carrying import RETRY_MS, Delivery, Message, Take
from benchmarks.handing_back import HandingBack
from examples import nats_relay

CONSUMER, ONCE_S, ANSWER_S, REPEAT_S = "consumer", 3_600, 2.0, 2
# A stream with schedules: the subject of schedules, and that of due messages
STREAM, SCHEDULES, SCHEDULED = "scheduled", "scheduled.at", "scheduled.due"


class NatsRelayed:
    """A carrier with Tarry and a relay.

    Failed deliveries go back through the relay, or some of them to Tarry directly (`handing_back`).
    """

    def __init__(self, url: str, handing_back: HandingBack | None) -> None:
        self.failures = (nats.errors.Error, OSError, *HandingBack.failures)
        self._url = url
        self._handing_back = handing_back

    async def create_streams(self) -> None:
        """Create the streams for the relay, on a broker that serves."""
        async with _connected(self._url) as stream:
            await stream.add_stream(name=nats_relay.SOURCE, subjects=[nats_relay.SOURCE], allow_direct=True)
            for name in (nats_relay.DUE, nats_relay.FAILED):
                await stream.add_stream(name=name, subjects=[name], duplicate_window=ONCE_S)

    async def publish(self, messages: Sequence[Message]) -> None:
        async with _connected(self._url) as stream:
            await asyncio.gather(
                *(
                    _publish(stream, nats_relay.SOURCE, f"{each.number}:0", {"deliver-at-ms": str(each.due_ms)})
                    for each in messages
                )
            )

    async def consume(self, take: Take) -> None:
        async with _connected(self._url) as stream:
            async for message in _pushed(stream, nats_relay.DUE):
                for failed in take([_relayed(message)]):
                    if self._handing_back is not None and self._handing_back.takes(failed):
                        await self._handing_back.hand_back(failed)
                    else:
                        name = {"tarry-delivery-id": failed.handle}
                        await _publish(stream, nats_relay.FAILED, failed.handle, name)
                await message.ack()


class NatsScheduled:
    """A carrier of messages with `Nats-Schedule`, which the server moves to where consumers read."""

    failures = (nats.errors.Error, OSError)

    def __init__(self, url: str) -> None:
        self._url = url

    async def create_streams(self) -> None:
        """Create a stream with schedules, on a broker that serves."""
        async with _connected(self._url) as stream:
            subjects = [f"{SCHEDULES}.>", SCHEDULED]
            await stream.add_stream(name=STREAM, subjects=subjects, allow_msg_schedules=True, duplicate_window=ONCE_S)

    async def publish(self, messages: Sequence[Message]) -> None:
        async with _connected(self._url) as stream:
            await asyncio.gather(*(_schedule(stream, each.number, 0, each.due_ms) for each in messages))

    async def consume(self, take: Take) -> None:
        async with _connected(self._url) as stream:
            async for message in _pushed(stream, SCHEDULED):
                for failed in take([_scheduled(message)]):
                    await _schedule(stream, failed.number, failed.attempt + 1, failed.received_ms + RETRY_MS)
                await message.ack()


@contextlib.asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    """Open a connection that ends with the server."""
    async with await nats.connect(url, allow_reconnect=False, error_cb=_say_nothing) as broker:
        yield broker.jetstream(timeout=ANSWER_S)


async def _say_nothing(error: Exception) -> None:
    """Do nothing: the caller of a request gets the error, too."""


async def _publish(stream: Any, subject: str, once: str, headers: Mapping[str, str]) -> None:
    await stream.publish(subject, once.encode(), headers={**headers, "Nats-Msg-Id": once})


async def _schedule(stream: Any, number: int, attempt: int, due_ms: int) -> None:
    at = datetime.datetime.fromtimestamp(due_ms / 1000, datetime.UTC).isoformat(timespec="milliseconds")
    headers = {"Nats-Schedule": f"@at {at}", "Nats-Schedule-Target": SCHEDULED}
    await _publish(stream, f"{SCHEDULES}.{number}.{attempt}", f"{number}:{attempt}", headers)


async def _pushed(stream: Any, subject: str) -> AsyncIterator[Any]:
    """Yield uncommitted messages, again after REPEAT_S, and new ones.

    Raises ConnectionClosedError when NATS is gone.
    """
    config = api.ConsumerConfig(ack_wait=REPEAT_S, max_ack_pending=10_000)
    subscription = await stream.subscribe(subject, durable=CONSUMER, config=config)
    async for message in subscription.messages:
        yield message
    raise nats.errors.ConnectionClosedError


def _relayed(message: Any) -> Delivery:
    name = message.headers["tarry-delivery-id"]
    return _delivery(message, attempt=tarry.DeliveryId.parse(name).redelivery_count, handle=name)


def _scheduled(message: Any) -> Delivery:
    return _delivery(message, attempt=int(message.data.partition(b":")[2]))


def _delivery(message: Any, *, attempt: int, handle: str = "") -> Delivery:
    number = int(message.data.partition(b":")[0])
    return Delivery(number, attempt, str(message.metadata.sequence.stream), load.now_ms(), handle)
