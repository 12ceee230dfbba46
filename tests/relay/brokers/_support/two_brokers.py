"""Each broker, as producers and consumers of tests use it: a source, a target, dead letters and a retry log.

Owns: the servers, what is set up there, publishing, reading what was published, and the relay's settings.
Does not own: what is checked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import confluent_kafka as kafka
import nats
import nats.errors
import pytest
import redis.asyncio

from tests.brokers import kafka_server, nats_server, redis_server

SOURCE, DUE, DEAD, FAILED = "orders", "due", "dead", "failed"
RESULTS = "results"
STREAMS = (SOURCE, DUE, DEAD, FAILED, RESULTS)
GONE = (OSError, kafka.KafkaException, nats.errors.Error, redis.RedisError, TimeoutError)
"""What clients of a broker raise that is being killed."""
PATIENCE_S = 300.0
"""How long an answer may take on a busy machine."""
_SILENT_S = 10.0
"""After which Kafka's client is asked anew."""
_AT_ONCE = 200
_WINDOW_S = 3_600
"""For so long a NATS drops what it has."""
_OF_KIND = {"kafka": "session_s = 2, kept_bytes = 0", "nats": "ack_wait_s = 2", "redis": "claim_s = 2"}
"""What was left is soon another's; nothing is kept that could be fetched."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A message as it stands in a stream. `at_ms`: when the broker took it."""

    number: int
    at_ms: int
    headers: Mapping[str, str]
    body: str


class AnyBroker(Protocol):
    """What tests ask of a broker."""

    kind: str
    server: Any

    async def set_up(self) -> None:
        """Makes the streams."""

    async def publish(self, stream: str, messages: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
        """(headers, body); durable when it returns, with what the broker calls the position of each."""

    async def read(self, stream: str, after: int = 0) -> list[Published]:
        """What stands in a stream, but for so many."""

    async def cut(self, stream: str, *, keep: int) -> None:
        """Drops all but the last so many."""

    async def delete(self, stream: str) -> None:
        """Deletes it."""

    async def take_away(self, stream: str) -> None:
        """Lets nothing be published to it until it is brought back."""

    async def bring_back(self, stream: str) -> None:
        """Lets it be published to again; it is empty."""

    async def close(self) -> None:
        """Closes the connection."""


def configuration(broker: AnyBroker, address: str, more: str = "") -> str:
    """The settings of a relay between these two. `more`: tables of its own."""
    return f"""
daemon.address = "{address}"
broker = {{ kind = "{broker.kind}", url = "{broker.server.url}", timeout_s = 5, {_OF_KIND[broker.kind]} }}
targets = [{{ name = "{DUE}" }}]
retry = {{ name = "{FAILED}", delays_ms = [100] }}

[source]
name = "{SOURCE}"
target = "{DUE}"
dead_letters = "{DEAD}"
{more}
"""


def _portions(of: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """So few at once that each is answered in time."""
    return (of[first : first + _AT_ONCE] for first in range(0, len(of), _AT_ONCE))


class RedisStreams:
    """A Redis whose entries have the body in a field."""

    kind = "redis"

    def __init__(self, server: redis_server.RedisServer) -> None:
        self.server = server
        self._client: Any = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
        self._found: dict[str, list[Published]] = {}
        self._last: dict[str, str] = {}

    async def set_up(self) -> None:
        for stream in STREAMS:
            # An empty stream is there as long as it has a group.
            await self._client.xgroup_create(stream, "tests", mkstream=True)

    async def publish(self, stream: str, messages: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
        async with self._client.pipeline(transaction=True) as calls:
            for headers, body in messages:
                calls.xadd(stream, {**headers, "body": body})
            return [str(each) for each in await calls.execute()]

    async def read(self, stream: str, after: int = 0) -> list[Published]:
        """From where the last call has come to."""
        found = self._found.setdefault(stream, [])
        while new := await self._client.xrange(stream, min=f"({self._last.get(stream, '0-0')}", count=_AT_ONCE):
            for entry_id, fields in new:
                at_ms = int(entry_id.partition("-")[0])
                found.append(Published(len(found) + 1, at_ms, fields, fields.get("body", "")))
            self._last[stream] = new[-1][0]
        return found[after:]

    async def cut(self, stream: str, *, keep: int) -> None:
        await self._client.xtrim(stream, maxlen=keep, approximate=False)

    async def delete(self, stream: str) -> None:
        await self._client.delete(stream)
        self._found.pop(stream, None)

    async def take_away(self, stream: str) -> None:
        await self.delete(stream)
        await self._client.set(stream, "not a stream")

    async def bring_back(self, stream: str) -> None:
        await self.delete(stream)

    async def close(self) -> None:
        await self._client.aclose()


class NatsStreams:
    """A NATS with a stream for each subject, of the subject's name."""

    kind = "nats"

    def __init__(self, server: nats_server.NatsServer) -> None:
        self.server = server
        self._connection: Any = None
        self._lost = asyncio.Event()

    async def _js(self) -> Any:
        if self._connection is None:
            self._connection = await nats.connect(
                self.server.url,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,
                disconnected_cb=self._server_has_ended,
            )
        return self._connection.jetstream(timeout=PATIENCE_S)

    async def _server_has_ended(self) -> None:
        self._lost.set()
        self._lost = asyncio.Event()

    async def _all(self, requests: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The answers. Raises ConnectionError when the server ends, who answers what it was asked no more."""
        asked: asyncio.Future[Any] = asyncio.gather(*requests)
        lost: asyncio.Future[Any] = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({asked, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ConnectionError("the server has ended")
            return list(await asked)
        finally:
            lost.cancel()
            asked.cancel()

    async def set_up(self) -> None:
        for stream in STREAMS:
            await self.bring_back(stream)

    async def publish(self, stream: str, messages: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
        js = await self._js()
        answers: list[Any] = []
        for some in _portions(messages):
            answers += await self._all(
                js.publish(stream, body.encode(), headers=dict(headers) or None) for headers, body in some
            )
        return [str(each.seq) for each in answers]

    async def read(self, stream: str, after: int = 0) -> list[Published]:
        js = await self._js()
        (info,) = await self._all([js.stream_info(stream)])
        found: list[Any] = []
        for some in _portions(range(after + 1, info.state.last_seq + 1)):
            found += await self._all(js.get_msg(stream, number) for number in some)
        return [
            Published(each.seq, int(each.time.timestamp() * 1_000), each.headers or {}, (each.data or b"").decode())
            for each in found
        ]

    async def keep_for(self, stream: str, seconds: int) -> None:
        """Drops what is older."""
        js = await self._js()
        now = (await js.stream_info(stream)).config
        now.max_age, now.duplicate_window = seconds, min(seconds, _WINDOW_S)
        await js.update_stream(now)

    async def cut(self, stream: str, *, keep: int) -> None:
        await (await self._js()).purge_stream(stream, keep=keep)

    async def delete(self, stream: str) -> None:
        await (await self._js()).delete_stream(stream)

    async def take_away(self, stream: str) -> None:
        await self.delete(stream)

    async def bring_back(self, stream: str) -> None:
        await (await self._js()).add_stream(
            name=stream, subjects=[stream], allow_direct=True, duplicate_window=_WINDOW_S, max_msg_size=100_000
        )

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class KafkaTopics:
    """A Kafka with topics of some partitions, of which each call of `publish` takes the next one."""

    kind = "kafka"

    def __init__(self, server: kafka_server.KafkaServer, partitions: int = 3) -> None:
        self.server = server
        self._partitions = partitions
        self._turn = itertools.cycle(range(partitions))
        self._found: dict[str, list[Published]] = {}

    @functools.cached_property
    def _shared(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.server.url, "reconnect.backoff.max.ms": 500, "log_level": 2}

    @functools.cached_property
    def _producer(self) -> Any:
        return kafka.Producer({**self._shared, "enable.idempotence": True, "message.timeout.ms": 30_000})

    @functools.cached_property
    def _consumer(self) -> Any:
        # The end is told when nothing has come for so long.
        ends = {"enable.partition.eof": True, "fetch.wait.max.ms": 5}
        return kafka.Consumer({**self._shared, **ends, "group.id": "tests", "auto.offset.reset": "earliest"})

    async def set_up(self) -> None:
        for stream in STREAMS:
            await self.bring_back(stream)

    async def publish(self, stream: str, messages: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
        return await asyncio.to_thread(self._publish, stream, next(self._turn), messages)

    def _publish(self, stream: str, partition: int, messages: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
        told: list[tuple[Any, Any]] = []
        where = {"partition": partition} if stream in (SOURCE, FAILED) else {}
        for headers, body in messages:
            named = [(name, text.encode()) for name, text in headers.items()]
            self._producer.produce(
                stream, body, headers=named, on_delivery=lambda *told_of: told.append(told_of), **where
            )
        self._producer.flush()
        for error, _ in told:
            if error is not None:
                raise kafka.KafkaException(error)
        return [f"{message.partition()}-{message.offset()}" for _, message in told]

    async def read(self, stream: str, after: int = 0) -> list[Published]:
        return await asyncio.to_thread(self._read, stream, after)

    def _read(self, stream: str, after: int) -> list[Published]:
        """Of a topic with one partition: to its end, from where the last call has come to."""
        found = self._found.setdefault(stream, [])
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            # Kafka's client may say nothing more about a partition whose broker has ended meanwhile.
            next_offset = found[-1].number + 1 if found else 0
            self._consumer.assign([kafka.TopicPartition(stream, 0, next_offset)])
            while (message := self._consumer.poll(_SILENT_S)) is not None:
                if message.error() is None:
                    found.append(_published(message))
                elif message.error().code() == kafka.KafkaError._PARTITION_EOF:
                    return found[after:]
                else:
                    raise kafka.KafkaException(message.error())
        raise TimeoutError(f"the end of {stream} was not reached")

    async def cut(self, stream: str, *, keep: int) -> None:
        ends = {each: self._end(stream, each) for each in range(self._partitions)}
        below = [kafka.TopicPartition(stream, each, max(0, end - keep)) for each, end in ends.items()]
        for each in self.server.admin.delete_records(below).values():
            await asyncio.wrap_future(each)

    def _end(self, stream: str, partition: int) -> int:
        return int(self._consumer.get_watermark_offsets(kafka.TopicPartition(stream, partition), timeout=PATIENCE_S)[1])

    async def delete(self, stream: str) -> None:
        await asyncio.to_thread(self.server.delete_topic, stream)
        self._found.pop(stream, None)

    async def take_away(self, stream: str) -> None:
        await self.delete(stream)

    async def bring_back(self, stream: str) -> None:
        # When something was published is told by the broker's clock; of the source by that of its producer.
        clock = "CreateTime" if stream == SOURCE else "LogAppendTime"
        settings = {"max.message.bytes": "100000", "message.timestamp.type": clock}
        partitions = self._partitions if stream in (SOURCE, FAILED) else 1
        await asyncio.to_thread(self.server.make_topic, stream, partitions, settings)

    async def close(self) -> None:
        await asyncio.to_thread(self._consumer.close)


def _published(message: Any) -> Published:
    headers = {name: value.decode() for name, value in message.headers() or ()}
    return Published(message.offset(), message.timestamp()[1], headers, (message.value() or b"").decode())


def made(kind: str, directory: Path) -> AnyBroker:
    """A broker that is not started; skips the test where its program is not there."""
    if kind == "nats":
        program = nats_server.find()
        if program is None:
            pytest.skip(nats_server.MISSING)
        return NatsStreams(nats_server.NatsServer(program, directory))
    if kind == "kafka":
        jars = kafka_server.find()
        if jars is None:
            pytest.skip(kafka_server.MISSING)
        return KafkaTopics(kafka_server.KafkaServer(jars, directory))
    program = redis_server.find()
    if program is None:
        pytest.skip(redis_server.MISSING)
    return RedisStreams(redis_server.RedisServer(program, directory))
