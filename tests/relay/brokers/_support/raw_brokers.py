"""Publishes and reads messages byte by byte, below the client libraries that would refuse or mend them.

Contents: `RawBroker` and one of it for each broker. What a message is: `tests.relay._support.raw_messages`.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import datetime
import functools
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import confluent_kafka as kafka
import redis.asyncio
from confluent_kafka import admin

from tarry.positions import Kafka1, NatsStream1, RedisSequences1
from tests.relay._support.raw_messages import Arrived, Position, Raw, fields_of_block
from tests.relay.brokers._support.two_brokers import DEAD, DUE, FAILED, PATIENCE_S, RESULTS, SOURCE, AnyBroker

LARGE = 1_048_576
"""The limit of the source, and of targets of large messages (bytes)."""
SMALL = 100_000
"""The limit of dead letters, of the retry log and of the target `out.small` (bytes)."""
LIMITS = {SOURCE: LARGE, DUE: LARGE, "out.a": LARGE, "out.b": LARGE, "out.small": SMALL, DEAD: SMALL, RESULTS: SMALL}
UNREADABLE = b"unreadable"
"""Stands for all headers of a record of Kafka if the library cannot read the name of one."""
_AT_ONCE = 200
_BYTES_AT_ONCE = 400_000
_ANSWERED_BYTES = 16 * 2**20
Each = TypeVar("Each")


class RawBroker(abc.ABC):
    """What the suite asks of a broker. A call that fails is made again on a new connection."""

    @abc.abstractmethod
    async def prepare(self) -> None:
        """Make the targets, and give each stream its limit."""

    @abc.abstractmethod
    async def publish(self, stream: str, messages: Sequence[Raw]) -> list[Position]:
        """Publish messages in order; return their positions as Tarry stores them. All are durable then."""

    @abc.abstractmethod
    async def read(self, stream: str) -> list[Arrived]:
        """Return what has come to a stream since the last call that succeeded."""

    @abc.abstractmethod
    async def streams(self) -> set[str]:
        """Return every name that a message may have arrived at."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the connections."""


@contextlib.asynccontextmanager
async def opened(broker: AnyBroker) -> AsyncIterator[RawBroker]:
    """Prepare a broker that serves, and give raw access to it."""
    kinds: Mapping[str, Callable[[Any], RawBroker]] = {"nats": RawNats, "redis": RawRedis, "kafka": RawKafka}
    raw = kinds[broker.kind](broker.server)
    try:
        await raw.prepare()
        yield raw
    finally:
        await raw.close()


def _portions(of: Iterable[Each], size: Callable[[Each], int], at_once: int = _AT_ONCE) -> Iterator[list[Each]]:
    """Yield runs of at most so many and, unless one alone is larger, so many bytes."""
    portion: list[Each] = []
    total = 0
    for each in of:
        if portion and (len(portion) == min(at_once, _AT_ONCE) or total + size(each) > _BYTES_AT_ONCE):
            yield portion
            portion, total = [], 0
        portion.append(each)
        total += size(each)
    if portion:
        yield portion


# NATS.


class RawNats(RawBroker):
    """A connection that speaks the protocol of NATS over a plain socket, one portion of requests at a time."""

    def __init__(self, server: Any) -> None:
        self._port = server.port
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._next = 0
        self._read: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    async def prepare(self) -> None:
        for name, limit in LIMITS.items():
            stream = _stream_of(name)
            config = {
                "name": stream,
                "subjects": [name],
                "allow_direct": True,
                "duplicate_window": 3_600 * 10**9,
                "max_msg_size": limit if limit < LARGE else -1,
                "storage": "file",
            }
            verb = "UPDATE" if name in (SOURCE, DUE, DEAD, RESULTS) else "CREATE"
            await self._api(f"STREAM.{verb}.{stream}", config)

    async def publish(self, stream: str, messages: Sequence[Raw]) -> list[Position]:
        told = await self._ask([(stream, block_of(each), each.body or b"") for each in messages])
        answers = [json.loads(each) for each in told]
        refused = [(each, message) for each, message in zip(answers, messages, strict=True) if "error" in each]
        if refused:
            raise AssertionError(f"NATS refuses {refused[0]}")
        ledgers, entries = NatsStream1.to_positions([each["seq"] for each in answers])
        return list(zip(ledgers.tolist(), entries.tolist(), strict=True))

    async def read(self, stream: str) -> list[Arrived]:
        name = _stream_of(stream)
        state = (await self._api(f"STREAM.INFO.{name}"))["state"]
        last = state["last_seq"]
        first = self._read.get(stream, 0) + 1
        asked = [
            (f"$JS.API.STREAM.MSG.GET.{name}", None, json.dumps({"seq": seq}).encode())
            for seq in range(first, last + 1)
        ]
        # What the server has not sent yet must not be so much that it closes the connection.
        new_bytes, self._bytes[stream] = state["bytes"] - self._bytes.get(stream, 0), state["bytes"]
        answered = max(1, _ANSWERED_BYTES * len(asked) // max(1, new_bytes))
        found = [_from_nats(stream, json.loads(each)["message"]) for each in await self._ask(asked, answered)]
        self._read[stream] = last
        return found

    async def streams(self) -> set[str]:
        return set(LIMITS) - {SOURCE}

    async def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    async def _api(self, what: str, value: object = None) -> Any:
        (told,) = await self._ask([(f"$JS.API.{what}", None, b"" if value is None else json.dumps(value).encode())])
        answer = json.loads(told)
        if "error" in answer:
            raise AssertionError(f"NATS refuses {what}: {answer['error']}")
        return answer

    async def _ask(self, requests: Sequence[tuple[str, bytes | None, bytes]], at_once: int = _AT_ONCE) -> list[bytes]:
        """Return the payloads of the answers. Raises ConnectionError, TimeoutError."""
        answers: list[bytes] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                for portion in _portions(requests, lambda each: len(each[1] or b"") + len(each[2]), at_once):
                    answers += await self._ask_portion(portion)
        except (OSError, EOFError, TimeoutError) as error:
            await self.close()
            raise ConnectionError(f"NATS: {error!r}") from error
        return answers

    async def _ask_portion(self, requests: Sequence[tuple[str, bytes | None, bytes]]) -> list[bytes]:
        if self._open is None:
            self._open = await asyncio.open_connection("127.0.0.1", self._port, limit=2 * LARGE)
            shown = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
            self._open[1].write(b"CONNECT %s\r\nSUB _INBOX.raw.* 1\r\n" % json.dumps(shown).encode())
        reader, writer = self._open
        first, self._next = self._next, self._next + len(requests)
        for number, (subject, block, payload) in enumerate(requests, first):
            name = f"{subject} _INBOX.raw.{number}".encode()
            if block is None:
                writer.write(b"PUB %s %d\r\n%s\r\n" % (name, len(payload), payload))
            else:
                sizes = len(block), len(block) + len(payload)
                writer.write(b"HPUB %s %d %d\r\n%s%s\r\n" % (name, *sizes, block, payload))
        found: dict[int, bytes] = {}
        while len(found) < len(requests):
            line = (await reader.readuntil(b"\r\n")).split()
            if line[0] == b"PING":
                writer.write(b"PONG\r\n")
            elif line[0] == b"-ERR":
                raise ConnectionError(b" ".join(line).decode())
            elif line[0] in (b"MSG", b"HMSG"):
                payload = (await reader.readexactly(int(line[-1]) + 2))[:-2]
                found[int(line[1].rpartition(b".")[2])] = payload[int(line[-2]) if line[0] == b"HMSG" else 0 :]
        return [found[each] for each in range(first, first + len(requests))]


def _stream_of(subject: str) -> str:
    return subject.replace(".", "_")


def block_of(message: Raw) -> bytes | None:
    """Return a message's headers as they stand in NATS; None if it has no block."""
    if message.block is not None:
        return message.block
    if not message.fields:
        return None
    lines = [b"%s: %s" % (name, value or b"") for name, value in message.fields]
    return b"\r\n".join((b"NATS/1.0", *lines, b"", b""))


def _from_nats(stream: str, message: Any) -> Arrived:
    at = datetime.datetime.fromisoformat(message["time"])
    block = base64.b64decode(message.get("hdrs", ""))
    body = base64.b64decode(message.get("data", ""))
    return Arrived(stream, int(at.timestamp() * 1_000), tuple(fields_of_block(block)), body, block)


# Redis.


class RawRedis(RawBroker):
    """Entries with their fields as pairs."""

    def __init__(self, server: Any) -> None:
        self._client: Any = redis.asyncio.Redis.from_url(server.url, socket_timeout=PATIENCE_S)
        # The library makes a dictionary of the fields.
        as_it_is: Any = lambda found, **_: found  # noqa: E731
        self._client.set_response_callback("XRANGE", as_it_is)
        self._last: dict[str, bytes] = {}

    async def prepare(self) -> None:
        """The relay makes the targets."""

    async def publish(self, stream: str, messages: Sequence[Raw]) -> list[Position]:
        ids: list[bytes] = []
        for portion in _portions(messages, lambda each: each.size):
            async with self._client.pipeline(transaction=True) as calls:
                for each in portion:
                    calls.execute_command("XADD", stream, "*", *(part for field in each.fields for part in field))
                ids += await calls.execute()
        ledgers, entries = RedisSequences1.to_positions(ids)
        return list(zip(ledgers.tolist(), entries.tolist(), strict=True))

    async def read(self, stream: str) -> list[Arrived]:
        found: list[Arrived] = []
        while new := await self._client.xrange(stream, min=b"(" + self._last.get(stream, b"0-0"), count=_AT_ONCE):
            for entry_id, flat in new:
                fields = tuple(zip(flat[::2], flat[1::2], strict=True))
                found.append(Arrived(stream, int(entry_id.partition(b"-")[0]), fields, b""))
            self._last[stream] = new[-1][0]
        return found

    async def streams(self) -> set[str]:
        """By a look at every key: Redis makes a stream of any name."""
        found = {DEAD, RESULTS}
        async for key in self._client.scan_iter(_type="stream", count=1_000):
            with contextlib.suppress(UnicodeDecodeError):
                found.add(key.decode())
        return found - {SOURCE, FAILED}

    async def close(self) -> None:
        await self._client.aclose()


# Kafka.


class RawKafka(RawBroker):
    """A cluster of one node: requests to produce over a plain socket, and the library's consumer to read."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._next: dict[tuple[str, int], int] = {}

    @functools.cached_property
    def _consumer(self) -> Any:
        return kafka.Consumer(
            {
                "bootstrap.servers": self._server.url,
                "reconnect.backoff.max.ms": 500,
                "log_level": 2,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 5,
                "group.id": "raw",
                "auto.offset.reset": "earliest",
            }
        )

    async def prepare(self) -> None:
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        made: Any = admin
        for name, limit in LIMITS.items():
            if name.startswith("out."):
                settings = {"max.message.bytes": str(limit), "message.timestamp.type": "LogAppendTime"}
                self._server.make_topic(name, 1, settings)
            else:
                change = made.ConfigEntry(
                    "max.message.bytes", str(limit), incremental_operation=made.AlterConfigOpType.SET
                )
                topic = made.ConfigResource(made.ResourceType.TOPIC, name, incremental_configs=[change])
                self._server.admin.incremental_alter_configs([topic])[topic].result()

    async def publish(self, stream: str, messages: Sequence[Raw]) -> list[Position]:
        return await asyncio.to_thread(self._publish, stream, messages)

    def _publish(self, stream: str, messages: Sequence[Raw]) -> list[Position]:
        """Publish each to the partition that its number gives, if the topic has several."""
        found: dict[int, Position] = {}
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=PATIENCE_S) as connection:
            for partition in range(partitions := _partitions_of(stream)):
                rows = [row for row, each in enumerate(messages) if each.number % partitions == partition]
                for portion in _portions(rows, lambda row: messages[row].size):
                    batch = record_batch([messages[row] for row in portion])
                    first = _produce(connection, stream, partition, batch)
                    found |= {row: (partition, first + place) for place, row in enumerate(portion)}
        ledgers, entries = Kafka1.to_positions(
            *map(list, zip(*(found[row] for row in range(len(messages))), strict=True))
        )
        return list(zip(ledgers.tolist(), entries.tolist(), strict=True))

    async def read(self, stream: str) -> list[Arrived]:
        found: list[Arrived] = []
        for partition in range(_partitions_of(stream)):
            found += await asyncio.to_thread(self._read, stream, partition)
        return found

    def _read(self, stream: str, partition: int) -> list[Arrived]:
        """Read a partition to its end."""
        found: list[Arrived] = []
        next_offset = self._next.get((stream, partition), 0)
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            self._consumer.assign([kafka.TopicPartition(stream, partition, next_offset)])
            while (message := self._consumer.poll(10.0)) is not None:
                if message.error() is None:
                    found.append(_from_kafka(message))
                    next_offset = message.offset() + 1
                elif message.error().code() == kafka.KafkaError._PARTITION_EOF:
                    self._next[stream, partition] = next_offset
                    return found
                else:
                    raise kafka.KafkaException(message.error())
        raise TimeoutError(f"the end of {stream} was not reached")

    async def streams(self) -> set[str]:
        return set(LIMITS) - {SOURCE}

    async def close(self) -> None:
        await asyncio.to_thread(self._consumer.close)


def _partitions_of(stream: str) -> int:
    return 3 if stream in (SOURCE, FAILED) else 1


def _from_kafka(message: Any) -> Arrived:
    try:
        # Called like this, Python notices the library's exception, and nobody touches what it returns beside.
        fields = tuple((name.encode(), value) for name, value in functools.partial(message.headers)() or ())
    except (SystemError, UnicodeDecodeError):
        fields = ((UNREADABLE, None),)
    return Arrived(message.topic(), message.timestamp()[1], fields, message.value(), key=message.key())


def _produce(connection: socket.socket, topic: str, partition: int, batch: bytes) -> int:
    """Return the offset of the first record."""
    name = topic.encode()
    # Produce, version 7: no transaction, all replicas, within 30 s; one topic, one partition.
    request = struct.pack(">hhih", 0, 7, 1, -1) + struct.pack(">hhii", -1, -1, 30_000, 1)
    request += struct.pack(">h", len(name)) + name + struct.pack(">iii", 1, partition, len(batch)) + batch
    connection.sendall(struct.pack(">i", len(request)) + request)
    answer = _received(connection, struct.unpack(">i", _received(connection, 4))[0])
    # After the correlation id, the number of topics, the name, the number of partitions and the partition.
    code, first = struct.unpack_from(">hq", answer, 4 + 4 + 2 + len(name) + 4 + 4)
    if code != 0:
        raise kafka.KafkaException(kafka.KafkaError(code))
    return int(first)


def _received(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("Kafka has closed the connection")
        parts += part
    return bytes(parts)


def record_batch(messages: Sequence[Raw]) -> bytes:
    """Return messages as a batch of Kafka's format 2, without compression."""
    now_ms = time.time_ns() // 1_000_000
    times = [now_ms if each.timestamp_ms is None else each.timestamp_ms for each in messages]
    records = b"".join(
        _record(each, row, at_ms - times[0]) for row, (each, at_ms) in enumerate(zip(messages, times, strict=True))
    )
    checked = struct.pack(">hiqqqhii", 0, len(messages) - 1, times[0], max(times), -1, -1, -1, len(messages)) + records
    body = struct.pack(">ibI", -1, 2, _crc32c(checked)) + checked
    return struct.pack(">qi", 0, len(body)) + body


def _record(message: Raw, row: int, later_ms: int) -> bytes:
    parts = [b"\0", _varint(later_ms), _varint(row)]
    for each in (message.key, message.body):
        parts += [_varint(-1)] if each is None else [_varint(len(each)), each]
    parts.append(_varint(len(message.fields)))
    for name, value in message.fields:
        parts += [_varint(len(name)), name]
        parts += [_varint(-1)] if value is None else [_varint(len(value)), value]
    record = b"".join(parts)
    return _varint(len(record)) + record


def _varint(number: int) -> bytes:
    """Encode a signed number: zigzag, seven bits a byte, lowest first."""
    left = number << 1 if number >= 0 else (-number << 1) - 1
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    found.append(left)
    return bytes(found)


def _crc_row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ 0x82F63B78 if byte & 1 else byte >> 1
    return byte


_CRC_TABLE = tuple(map(_crc_row, range(256)))


def _crc32c(of: bytes) -> int:
    crc = 0xFFFFFFFF
    table = _CRC_TABLE
    for byte in of:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
