"""Implements a carrier of delayed messages on Kafka, with Tarry and `tarry-relay`; it has no delays of its own.

It has the topics, the producer and the consumer. `carrier_settings` alone uses this module, which stands apart as one
of three brokers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import confluent_kafka as kafka

import tarry
from benchmarks import load
from benchmarks.carrying import Delivery, Message, Take
from tests.brokers.kafka_server import KafkaServer

SOURCE, DUE, FAILED = "orders", "orders-due", "orders-failed"
PARTITIONS, GROUP, PORTION, WAIT_S = 3, "consumer", 1_000, 0.05
# A message that is confirmed within this time is stored only once (ms).
CONFIRM_MS = 120_000
_COMMON = {"reconnect.backoff.max.ms": 500, "log_level": 2}


class KafkaRelayed:
    """A carrier whose failed deliveries go back through the relay."""

    failures = (kafka.KafkaException, OSError)

    def __init__(self, server: KafkaServer) -> None:
        self._server = server

    def create_topics(self) -> None:
        """Create the topics for the relay, on a broker that serves."""
        for name in (SOURCE, DUE, FAILED):
            self._server.make_topic(name, PARTITIONS)

    @functools.cached_property
    def _producer(self) -> Any:
        settings = {"enable.idempotence": True, "message.timeout.ms": CONFIRM_MS, "linger.ms": 1}
        return kafka.Producer({"bootstrap.servers": self._server.url, **_COMMON, **settings})

    async def publish(self, messages: Sequence[Message]) -> None:
        """Publish the messages.

        Raises if a message was not confirmed in time, so that it is unknown whether it is stored.
        """
        headers = ((f"{each.number}:0", {"deliver-at-ms": str(each.due_ms)}) for each in messages)
        await asyncio.to_thread(self._produce, SOURCE, list(headers))

    async def consume(self, take: Take) -> None:
        settings = {"group.id": GROUP, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer: Any = kafka.Consumer({"bootstrap.servers": self._server.url, **_COMMON, **settings})
        consumer.subscribe([DUE])
        try:
            while True:
                polled = await asyncio.to_thread(consumer.consume, PORTION, WAIT_S)
                # An entry without a message means that the broker is unreachable; the client reconnects automatically.
                if read := [each for each in polled if each.error() is None]:
                    failed = take([_relayed(each) for each in read])
                    names = [("", {"tarry-delivery-id": each.handle}) for each in failed]
                    await asyncio.to_thread(self._produce, FAILED, names)
                    await asyncio.to_thread(consumer.commit, asynchronous=False)
        finally:
            # Another thread may be in the consumer; the next reader gets the messages that it holds.
            await asyncio.to_thread(consumer.close)

    def _produce(self, topic: str, messages: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        """Send messages, each as (body, headers); return when all are confirmed."""
        errors: list[Any] = []
        for body, headers in messages:
            named = [(name, text.encode()) for name, text in headers.items()]
            self._producer.produce(topic, body, headers=named, on_delivery=lambda error, _: errors.append(error))
        self._producer.flush()
        if refused := [error for error in errors if error is not None]:
            raise RuntimeError(f"{len(refused)} messages to {topic} were not confirmed: {refused[0]}")


def _relayed(message: Any) -> Delivery:
    headers = {name: value.decode() for name, value in message.headers()}
    name = headers["tarry-delivery-id"]
    number = int(message.value().partition(b":")[0])
    place = f"{message.partition()}-{message.offset()}"
    return Delivery(number, tarry.DeliveryId.parse(name).redelivery_count, place, load.now_ms(), name)
