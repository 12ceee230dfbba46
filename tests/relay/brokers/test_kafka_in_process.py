"""Fetching and publishing with the cluster that Kafka's client has in it for tests, which starts at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import confluent_kafka as kafka
import pytest

from tarry_relay import port, relay_settings
from tarry_relay.kafka_broker import KafkaLog, Kept
from tarry_relay.kafka_client import Body, ClientProperties, KafkaOutput

TOPIC = "orders"
ROWS = 2_000
LIMIT_S = 300.0


class Topics:
    """What the cluster cannot be asked."""

    async def partitions(self, topic: str) -> int:
        return 2

    async def confirm(self, topic: str, generation: str, read_until_s: float) -> None:
        assert generation == "one"


@pytest.fixture
def url() -> Iterator[str]:
    cluster = kafka.Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = cluster.list_topics(timeout=LIMIT_S).brokers.values()
    producer = kafka.Producer({"bootstrap.servers": f"{broker.host}:{broker.port}", "log_level": 0})
    for row in range(ROWS):
        producer.produce(TOPIC, b"%d" % row, partition=row % 2, headers=[("n", b"%d" % row)])
    assert producer.flush(LIMIT_S) == 0
    yield f"{broker.host}:{broker.port}"
    # It ends with its client.
    cluster.flush(0)


def bodies(found: Any) -> list[bytes | None]:
    return [None if each is None else each.body[1] for each in found]


async def test_messages_are_found_by_partition_and_offset_and_what_is_passed_is_kept(url: str) -> None:
    broker = relay_settings.Kafka(url=url, timeout_s=LIMIT_S, kept_bytes=10_000_000, confirm_s=LIMIT_S)
    properties = ClientProperties(broker, "relay", "one")
    topics: Any = Topics()
    log = KafkaLog(TOPIC, topics, properties, Kept(broker.kept_bytes), LIMIT_S)
    wanted = [(0, 3), (0, 40), (0, 999), (0, 1_000), (1, 0), (1, 41), (2, 0)]
    assert bodies(await log.fetch(wanted, "one")) == [b"6", b"80", b"1998", None, b"1", b"83", None]
    assert bodies(await log.fetch([(0, 3), (0, 39), (1, 1)], "one")) == [b"6", b"78", b"3"]
    await log.close()


async def test_what_is_published_has_key_headers_and_body_of_the_original(url: str) -> None:
    broker = relay_settings.Kafka(url=url, confirm_s=LIMIT_S)
    properties = ClientProperties(broker, "relay", "one")
    output = KafkaOutput(TOPIC, properties, broker)
    original = port.Message({}, Body(b"key", b"body", [("a", b"1"), ("own", b"2"), ("a", b"\xff")]))
    assert await output.produce([port.Outgoing("due", original, {"own": "3"}, "id")]) == [port.Produced()]
    await output.close()
    reader = kafka.Consumer({**properties.fetcher("due"), "auto.offset.reset": "earliest"})
    reader.assign([kafka.TopicPartition("due", each, 0) for each in range(4)])
    found: Any = None
    while found is None or found.error() is not None:
        found = reader.poll(LIMIT_S)
    reader.close()
    assert (found.key(), found.value()) == (b"key", b"body")
    assert found.headers() == [("a", b"1"), ("a", b"\xff"), ("own", b"3")]
