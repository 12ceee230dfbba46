"""Tests fetching and publishing with the cluster that Kafka's client has in it for tests, which starts at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka as kafka
import pytest

from tarry_relay import kafka_judgement, port, relay_settings
from tarry_relay.kafka_broker import KafkaLog, Kept
from tarry_relay.kafka_client import Body, ClientProperties, KafkaOutput

TOPIC = "orders"
ROWS = 2_000
LIMIT_S = 300.0


class Topics:
    """Answers that this cluster does not give."""

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
    log = KafkaLog(TOPIC, topics, properties, Kept(broker.kept_bytes), LIMIT_S, 2**24)
    wanted = [(0, 3), (0, 40), (0, 999), (0, 1_000), (1, 0), (1, 41), (2, 0)]
    assert bodies(await log.fetch(wanted, "one")) == [b"6", b"80", b"1998", None, b"1", b"83", None]
    assert bodies(await log.fetch([(0, 3), (0, 39), (1, 1)], "one")) == [b"6", b"78", b"3"]
    await log.close()


async def test_what_is_published_has_key_headers_and_body_of_the_original(url: str) -> None:
    broker = relay_settings.Kafka(url=url, confirm_s=LIMIT_S)
    properties = ClientProperties(broker, "relay", "one")
    output = KafkaOutput(TOPIC, properties, broker)
    headers = [("a", b"1"), ("OWN", b"2"), ("a", b"\xff"), ("none", None), ("Tarry-Reason", b"3")]
    original = port.Message({}, Body(b"key", b"body", headers))
    assert await output.produce([port.Outgoing("due", original, {"own": "3"}, "id")]) == [port.Produced()]
    await output.close()
    reader = kafka.Consumer({**properties.fetcher("due"), "auto.offset.reset": "earliest"})
    reader.assign([kafka.TopicPartition("due", each, 0) for each in range(4)])
    found: Any = None
    while found is None or found.error() is not None:
        found = reader.poll(LIMIT_S)
    reader.close()
    assert (found.key(), found.value()) == (b"key", b"body")
    assert found.headers() == [("a", b"1"), ("a", b"\xff"), ("none", None), ("own", b"3")]


async def test_a_header_whose_name_is_no_text_is_a_fault_of_its_message_alone(url: str) -> None:
    """The client for Python crashes if its list of such headers is touched, and it is made again for each start."""
    broker = relay_settings.Kafka(url=url, timeout_s=LIMIT_S, confirm_s=LIMIT_S)
    properties = ClientProperties(broker, "relay", "one")
    topics: Any = Topics()
    one = [(b"delay", b"1s"), (b"a\xff", b"1"), (b"b", b"2")]
    produce_raw(url, "odd", [message for odd in (one, [*one, *one, *one]) for message in [odd, [(b"a", b"1")]] * 50])
    # In its first run Python notices the error of the client, and later it does not.
    log = KafkaLog("odd", topics, properties, Kept(0), LIMIT_S, 2**24)
    found = await log.fetch([(0, offset) for offset in range(200)], "one")
    await log.close()
    sizes = [each is not None and each.body.size for each in found]
    assert sizes == [1, 3] * 100
    for each in found[::2]:
        assert each is not None
        assert (each.headers, each.body) == ({}, Body(None, b"x", None))
        assert "no UTF-8" in kafka_judgement.message_fault(each.body.size, has_headers=each.body.headers is not None)
    output = KafkaOutput("odd", properties, broker)
    answers = await output.produce([port.Outgoing("dead", each, {"tarry-reason": "odd"}, "id") for each in found])
    await output.close()
    assert {each.is_taken for each in answers} == {True}


def produce_raw(url: str, topic: str, messages: Sequence[Sequence[tuple[bytes, bytes]]]) -> None:
    """Publish messages by the C library, whose names of headers are bytes."""
    (path,) = (Path(kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka-*.so*")
    library, error = ctypes.CDLL(str(path)), ctypes.create_string_buffer(512)
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, name).restype = ctypes.c_void_p
    settings = ctypes.c_void_p(library.rd_kafka_conf_new())
    assert library.rd_kafka_conf_set(settings, b"bootstrap.servers", url.encode(), error, 512) == 0
    producer = ctypes.c_void_p(library.rd_kafka_new(0, settings, error, 512))
    topic_, partition, value, flags, headers, end = 1, 3, 4, 7, 10, 0
    for message in messages:
        block = ctypes.c_void_p(library.rd_kafka_headers_new(8))
        for name_, text in message:
            sizes = ctypes.c_ssize_t(len(name_)), ctypes.c_ssize_t(len(text))
            assert library.rd_kafka_header_add(block, name_, sizes[0], text, sizes[1]) == 0
        given = (topic_, topic.encode(), partition, 0, value, b"x", ctypes.c_size_t(1), flags, 2, headers, block, end)
        assert library.rd_kafka_producev(producer, *given) == 0
    assert library.rd_kafka_flush(producer, int(LIMIT_S * 1_000)) == 0
    library.rd_kafka_destroy(producer)
