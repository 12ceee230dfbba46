"""Kafka as a carrier of delayed messages, with Tarry and `tarry-relay` beside it; it has no delays of its own.

Owns: topics, and what producer and consumer ask of Kafka. Does not own: the relay, the account (`carrying`).
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
# While it takes no longer to confirm a message, it is there once.
CONFIRM_MS = 120_000
_COMMON = {"reconnect.backoff.max.ms": 500, "log_level": 2}


class KafkaRelayed:
    """What fails goes back through the relay."""

    failures = (kafka.KafkaException, OSError)

    def __init__(self, server: KafkaServer) -> None:
        self._server = server

    def create_topics(self) -> None:
        """What the relay needs. The broker is there."""
        for name in (SOURCE, DUE, FAILED):
            self._server.make_topic(name, PARTITIONS)

    @functools.cached_property
    def _producer(self) -> Any:
        settings = {"enable.idempotence": True, "message.timeout.ms": CONFIRM_MS, "linger.ms": 1}
        return kafka.Producer({"bootstrap.servers": self._server.url, **_COMMON, **settings})

    async def publish(self, messages: Sequence[Message]) -> None:
        """Raises when a message was not confirmed for so long that nobody knows whether it is there."""
        headers = ((f"{each.number}:0", {"deliver-at-ms": str(each.due_ms)}) for each in messages)
        await asyncio.to_thread(self._produce, SOURCE, list(headers))

    async def consume(self, take: Take) -> None:
        settings = {"group.id": GROUP, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer: Any = kafka.Consumer({"bootstrap.servers": self._server.url, **_COMMON, **settings})
        consumer.subscribe([DUE])
        try:
            while True:
                polled = await asyncio.to_thread(consumer.consume, PORTION, WAIT_S)
                # What is no message says that the broker is away: the client knocks by itself.
                if read := [each for each in polled if each.error() is None]:
                    failed = take([_relayed(each) for each in read])
                    names = [("", {"tarry-delivery-id": each.handle}) for each in failed]
                    await asyncio.to_thread(self._produce, FAILED, names)
                    await asyncio.to_thread(consumer.commit, asynchronous=False)
        finally:
            # Another thread may be in it: what it holds comes again to who reads next.
            await asyncio.to_thread(consumer.close)

    def _produce(self, topic: str, messages: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        """Returns when all are confirmed. (body, headers)."""
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
