"""What a producer writes to NATS, and what a server does, stops neither reading nor publishing."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest

from tarry_relay import nats_answers, nats_broker, nats_client, nats_judgement, port, relay_settings
from tarry_relay.port import Grade
from tests.brokers import nats_server

SOURCE, RETRIES, DUE = "orders", "failed", "due"
BLOCKS = [
    b"",
    b"NATS/1.0\r\nStatus: shipped\r\n\r\n",
    *(b"NATS/1.0\r\nStatus: %d\r\nDescription: x\r\n\r\n" % each for each in (100, 200, 404, 408, 409, 503)),
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 404 No Messages\r\nn: 1\r\n\r\n",
    b"NATS/1.0\r\nTag: a\r\ntag: b\r\nTag:a\r\n\r\n",
    b"NATS/1.0\r\nx-bytes: \xff\xfe\0\x01\r\nX-\xff: 1\r\n\r\n",
    b"NATS/1.0\r\nno colon\r\nempty:\r\n\r\n",
    b"NATS/1.0\r\nlarge: " + b"x" * 60_000 + b"\r\n\r\n",
]
"""Headers that a producer may write."""
BROKEN_BLOCKS = [b"x", b"NATS/1.0", b"a: b", b"\r\n", b"NATS/1.0 \r\n"]
"""Blocks that only a client of its own writes; of these a server keeps what it can."""


@dataclasses.dataclass
class Nats:
    """A server with its settings in a file, and a client that makes streams."""

    server: nats_server.NatsServer
    file: Path
    admin: Any

    async def api(self, call: str, asked: object = None) -> dict[str, Any]:
        data = b"" if asked is None else json.dumps(asked).encode()
        told: dict[str, Any] = json.loads((await self.admin.request(f"$JS.API.{call}", data, timeout=300)).data)
        assert "error" not in told, told
        return told

    async def make(self, stream: str, **config: Any) -> None:
        asked = {"name": stream, "subjects": [stream], "allow_direct": True, **config}
        await self.api(f"STREAM.CREATE.{stream}", asked)

    async def change(self, stream: str, **config: Any) -> None:
        now = (await self.api(f"STREAM.INFO.{stream}"))["config"]
        await self.api(f"STREAM.UPDATE.{stream}", {**now, **config})

    async def publish(self, count: int, stream: str = SOURCE, size: int = 0) -> None:
        for number in range(count):
            await self.admin.request(stream, b"x" * size, headers={"n": str(number)}, timeout=300)

    def configure(self, text: str) -> None:
        """Write the settings, and let the server take them in."""
        self.file.write_text(text)
        os.kill(self.server.pid, signal.SIGHUP)


@contextlib.asynccontextmanager
async def serving(directory: Path, configuration: str = "", user: str = "") -> AsyncIterator[Nats]:
    """A server with a source, a retry log and a target."""
    program = nats_server.find()
    if program is None:
        pytest.skip(nats_server.MISSING)
    file = directory / "nats.conf"
    file.write_text(configuration)
    async with contextlib.AsyncExitStack() as stack:
        server = nats_server.NatsServer(program, directory, ("--config", str(file)))
        stack.enter_context(server)
        server.start()
        server.wait_until_loaded()
        url = server.url.replace("//", f"//{user}@" if user else "//")
        admin = await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        stack.push_async_callback(admin.close)
        made = Nats(server, file, admin)
        for stream in (SOURCE, RETRIES, DUE):
            await made.make(stream, subjects=[stream, f"{stream}.>"])
        yield made


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Nats]:
    async with serving(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(
    broker: Nats,
    *,
    topic: str = "orders",
    subscription: str = "relay",
    source: str = SOURCE,
    memory_bytes: int = 256 * 2**20,
    **more: Any,
) -> AsyncIterator[Any]:
    """The adapter, which waits long for a busy machine."""
    of = relay_settings.Nats(**{"url": broker.server.url, "timeout_s": 60.0, "ack_wait_s": 300.0, **more})
    settings = relay_settings.Settings(
        relay=relay_settings.Relay(topic=topic, subscription=subscription, memory_bytes=memory_bytes),
        source=relay_settings.Source(name=source, target=DUE),
        retry=relay_settings.Retry(name=RETRIES),
        targets=(relay_settings.Target(name=DUE),),
        broker=of,
    )
    async with nats_broker.opened(settings, of) as made:
        yield made


async def read_all(reader: port.Reader, rows: int) -> list[port.Read]:
    found: list[port.Read] = []
    async with asyncio.timeout(300):
        while len(found) < rows:
            found += (await reader.read(rows - len(found), 5)).read
    return found


class RawProducer:
    """A client of its own, which writes any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def publish(self, subject: bytes, block: bytes, data: bytes = b"") -> None:
        head = b"HPUB %s _INBOX.raw %d %d\r\n" % (subject, len(block), len(block) + len(data))
        if not block:
            head = b"PUB %s _INBOX.raw %d\r\n" % (subject, len(data))
        self._writer.write(head + block + data + b"\r\n")
        while not (line := await self._reader.readline()).startswith(b'{"stream"'):
            assert not line.startswith(b"-ERR"), line
        assert b"error" not in line, line


@contextlib.asynccontextmanager
async def raw_producer(broker: Nats) -> AsyncIterator[RawProducer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nSUB _INBOX.raw 1\r\n')
    try:
        yield RawProducer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def stored(broker: Nats, stream: str) -> list[tuple[bytes, bytes]]:
    """Headers and payload of each message."""
    state = (await broker.api(f"STREAM.INFO.{stream}"))["state"]
    numbers = range(state["first_seq"], state["last_seq"] + 1)
    found = [(await broker.api(f"STREAM.MSG.GET.{stream}", {"seq": n}))["message"] for n in numbers]
    return [(base64.b64decode(each.get("hdrs") or ""), base64.b64decode(each.get("data") or "")) for each in found]


def lines_of(block: bytes) -> list[bytes]:
    """The headers of a block but for those of NATS."""
    return [each for each in block.split(b"\r\n")[1:] if each and not each.lower().startswith(b"nats-")]


# What producers write.


@pytest.mark.parametrize("stream", [SOURCE, RETRIES])
@pytest.mark.parametrize("data", [b"", b"body"])
async def test_a_producers_status_is_not_the_servers_word(broker: Nats, stream: str, data: bytes) -> None:
    async with raw_producer(broker) as producer, opened(broker) as adapter:
        for block in BLOCKS:
            await producer.publish(stream.encode(), block, data)
        reader = adapter.source if stream == SOURCE else adapter.retries
        read = await read_all(reader, len(BLOCKS))
        assert [each.entry_id for each in read] == list(range(1, len(BLOCKS) + 1))
        assert not (await reader.read(10, 0.1)).read
        if stream != SOURCE:
            return
        positions = [each.position for each in read]
        messages = [each.message for each in read]
        assert messages == await adapter.log.fetch(positions, await adapter.log.generation())
        produced = await adapter.output.produce(
            [port.Outgoing(DUE, each, {"tarry-delivery-id": "d"}, f"id {n}") for n, each in enumerate(messages)]
        )
        assert set(produced) == {port.Produced()}
        found = await stored(broker, DUE)
    # Requests in flight overtake each other.
    assert sorted(lines_of(block)[1:] for block, _ in found) == sorted(map(lines_of, BLOCKS))
    assert all(lines_of(block)[0] == b"tarry-delivery-id: d" for block, _ in found)
    assert {body for _, body in found} == {data}


async def test_headers_are_read_in_any_case_and_repeated_ones_are_named(broker: Nats) -> None:
    async with raw_producer(broker) as producer, opened(broker) as adapter:
        await producer.publish(SOURCE.encode(), b"NATS/1.0\r\nDelay: 1s\r\nTag: a\r\ntAG: b\r\nStatus: 404\r\n\r\n")
        (read,) = await read_all(adapter.source, 1)
        assert read.message is not None
        assert read.message.headers == {"delay": "1s", "tag": "a", "status": "404"}
        assert set(read.message.repeated) == {"tag"}
        assert adapter.header_key("DeLAY") == "delay"


async def test_subjects_and_blocks_that_break_clients_are_read(broker: Nats) -> None:
    """nats-py makes a connection anew for ever, or reads nothing more, on each of these."""
    subjects = [b"orders.a\x0bb", b"orders.a\x0c1", b"orders.\xff\xfe", b"orders.\0", b"orders.\xe2\x80\xa8"]
    async with raw_producer(broker) as producer, opened(broker) as adapter:
        for subject in subjects:
            await producer.publish(subject, b"NATS/1.0\r\nn: 1\r\n\r\n", b"body")
            await producer.publish(subject, b"", b"body")
        for block in BROKEN_BLOCKS:
            await producer.publish(SOURCE.encode(), block, b"body")
        count = 2 * len(subjects) + len(BROKEN_BLOCKS)
        read = await read_all(adapter.source, count)
        fetched = await adapter.log.fetch([each.position for each in read], await adapter.log.generation())
        assert None not in fetched
        assert {each.message.body.data for each in read if each.message is not None} == {b"body"}
        outgoing = [port.Outgoing(DUE, each, {}, f"id {n}") for n, each in enumerate(fetched)]
        assert set(await adapter.output.produce(outgoing)) == {port.Produced()}
        await adapter.source.commit(read)
        assert await adapter.source.passed([(1, count)]) == [True]


async def test_a_target_of_the_longest_name_closes_no_connection(broker: Nats) -> None:
    target = "due." + "x" * (nats_judgement.SUBJECT_BYTES_MAX - 4)
    async with opened(broker) as adapter:
        assert adapter.target_fault(target) == ""
        assert adapter.target_fault(f"{target}x") != ""
        message = nats_client.message_of(b"NATS/1.0\r\na: " + b"b" * 60_000 + b"\r\n\r\n", b"x" * 900_000)
        produced = await adapter.output.produce(
            [port.Outgoing(target, message, {}, "1"), port.Outgoing(DUE, None, {}, "2")]
        )
        assert set(produced) == {port.Produced()}


async def test_the_largest_block_that_is_judged_good_fits_beside_the_relays_own(broker: Nats) -> None:
    def message(size: int) -> port.Message:
        return nats_client.message_of(b"NATS/1.0\r\na: " + b"b" * size + b"\r\n\r\n", b"")

    async with opened(broker) as adapter:
        size = next(each for each in range(65_535, 0, -1) if not adapter.message_fault(message(each)))
        assert size > 60_000
        own = {"tarry-reason": "x" * (port.OWN_HEADERS_BYTES_MAX - len("tarry-reason: \r\n"))}
        assert (await adapter.output.produce([port.Outgoing(DUE, message(size), own, "i" * 400)]))[0].is_taken


# Reading, holding, committing.


async def test_what_is_held_is_given_to_nobody_else_and_then_it_is(broker: Nats) -> None:
    await broker.publish(3)
    async with opened(broker, ack_wait_s=2.0) as one, opened(broker, ack_wait_s=2.0) as two:
        assert one.source.hold_every_s == pytest.approx(2 / 3)
        assert not one.source.commits_in_order
        first = await read_all(one.source, 3)
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            await one.source.hold(first)
            assert not (await two.source.read(10, one.source.hold_every_s)).read
        # It is cut off from its daemon, and holds nothing more.
        again = await read_all(two.source, 3)
        assert [each.position for each in again] == [each.position for each in first]
        assert all(each.alone_until_s == 0 for each in again)
        assert {each.receipt for each in again}.isdisjoint({each.receipt for each in first})
        for read in (again, first, again):
            await two.source.commit(read)
        assert await two.source.passed([each.position for each in first]) == [True] * 3


async def test_messages_are_committed_in_any_order(broker: Nats) -> None:
    await broker.publish(4)
    async with opened(broker) as adapter:
        read = await read_all(adapter.source, 4)
        await adapter.source.commit([read[3], read[1]])
        assert await adapter.source.passed([each.position for each in read]) == [False] * 4
        await adapter.source.commit([read[0]])
        assert await adapter.source.passed([each.position for each in read]) == [True, True, False, False]
    async with opened(broker) as adapter:
        assert not (await adapter.source.read(4, 0.1)).read


async def test_no_message_waits_here_while_nobody_reads(broker: Nats) -> None:
    async with opened(broker) as one, opened(broker) as two:
        assert not (await one.source.read(100, 0.2)).read
        await broker.publish(20)
        read = await read_all(two.source, 20)
        assert [each.entry_id for each in read] == list(range(1, 21))


async def test_a_message_is_read_at_once_when_it_comes(broker: Nats) -> None:
    async with opened(broker) as adapter:
        reading = asyncio.ensure_future(adapter.source.read(100, 120))
        while not (await broker.api(f"CONSUMER.LIST.{SOURCE}"))["consumers"]:
            pass
        await broker.publish(1)
        async with asyncio.timeout(60):
            assert len((await reading).read) == 1


async def test_a_consumer_that_was_deleted_is_made_again(broker: Nats) -> None:
    await broker.publish(3)
    async with opened(broker) as adapter:
        read = await read_all(adapter.source, 3)
        (consumer,) = (await broker.api(f"CONSUMER.LIST.{SOURCE}"))["consumers"]
        await broker.api(f"CONSUMER.DELETE.{SOURCE}.{consumer['name']}")
        with pytest.raises(port.Unreachable):
            await adapter.source.commit(read)
        again: list[port.Read] = []
        async with asyncio.timeout(300):
            while len(again) < 3:
                with contextlib.suppress(port.Unreachable):
                    again += (await adapter.source.read(3, 1)).read
        await adapter.source.commit(again)
        assert await adapter.source.passed([(1, 3)]) == [True]


# Fetching.


@pytest.mark.parametrize("allow_direct", [True, False])
async def test_a_message_is_fetched_with_and_without_direct_gets(broker: Nats, allow_direct: bool) -> None:
    await broker.publish(3)
    await broker.change(SOURCE, allow_direct=allow_direct)
    async with opened(broker) as adapter:
        found = await adapter.log.fetch([(1, 1), (1, 3), (1, 4), (1, 2**64 - 1)], await adapter.log.generation())
        assert [each and each.headers["n"] for each in found] == ["0", "2", None, None]
        (direct,) = [each for each in await adapter.source_findings() if each.name == "direct get"]
        assert (direct.grade is Grade.OK) == allow_direct


async def test_nothing_is_fetched_when_the_connection_is_lost_and_the_stream_made_anew(broker: Nats) -> None:
    await broker.publish(200)
    async with opened(broker) as adapter:
        generation = await adapter.log.generation()
        positions = [(1, each) for each in range(1, 201)]
        broker.server.suspend()
        fetching = asyncio.ensure_future(adapter.log.fetch(positions, generation))
        while not adapter._client._asked:  # noqa: ASYNC110 - the server is suspended, so that nothing tells it
            await asyncio.sleep(0)
        broker.server.kill()
        with pytest.raises(port.Unreachable):
            await fetching
        broker.server.start()
        broker.server.wait_until_loaded()
        await until_done(lambda: broker.api(f"STREAM.DELETE.{SOURCE}"))
        await broker.make(SOURCE)
        await broker.publish(200)
        with pytest.raises(port.NotThere, match="was created again"):
            await until_done(lambda: adapter.log.fetch(positions, generation))


async def until_done(call: Any) -> Any:
    """Do it as soon as the server is there again."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(port.Unreachable, nats.errors.Error, OSError):
                return await call()


async def test_large_messages_come_and_go_in_time(broker: Nats) -> None:
    """A server drops a connection that has more than 64 MiB to take."""
    await broker.publish(150, size=900_000)
    async with opened(broker, timeout_s=5.0) as adapter:
        read = await read_all(adapter.source, 150)
        found = [each for some in await fetch_all(adapter, [each.position for each in read]) for each in some]
        assert found == [each.message for each in read]
        outgoing = [port.Outgoing(DUE, each, {}, f"id {n}") for n, each in enumerate(found)]
        assert set(await adapter.output.produce(outgoing)) == {port.Produced()}
        assert adapter._client._connection.stats["reconnects"] == 0


async def test_large_messages_behind_small_ones_come_when_they_are_asked_for_again(broker: Nats) -> None:
    await broker.publish(300, size=10)
    await broker.publish(150, size=900_000)
    async with opened(broker) as adapter:
        small = await fetch_all(adapter, [(1, each) for each in range(1, 301)])
        large = await fetch_all(adapter, [(1, each) for each in range(301, 451)])
        assert [len(each.body.data) for some in (*small, *large) for each in some] == [10] * 300 + [900_000] * 150
        assert adapter._client._connection.stats["reconnects"] == 0


async def fetch_all(adapter: Any, positions: list[tuple[int, int]]) -> list[list[Any]]:
    """Fetch what a call did not bring by further ones; return what each has brought."""
    generation, calls = await adapter.log.generation(), list[list[Any]]()
    while positions:
        found = await adapter.log.fetch(positions, generation)
        calls.append([each for each in found if each is not port.NOT_YET])
        positions = [position for position, each in zip(positions, found, strict=True) if each is port.NOT_YET]
    return calls


async def test_a_call_brings_no_more_than_a_portion_however_many_messages_it_asks_for(broker: Nats) -> None:
    await broker.publish(300, size=10)
    await broker.publish(100, size=100_000)
    async with opened(broker, memory_bytes=32 * 2**20) as adapter:
        # A portion of two MiB; a pull may bring two messages of the largest size that the server takes.
        read, portions = list[port.Read](), list[int]()
        while len(read) < 400:
            portion = (await adapter.source.read(500, 1)).read
            portions.append(sum(each.message.size_bytes for each in portion if each.message is not None))
            read += portion
        assert max(portions) < 4 * 2**20
        (small,) = await fetch_all(adapter, [each.position for each in read[:300]])
        large = await fetch_all(adapter, [each.position for each in read[300:]])
        assert small + [each for some in large for each in some] == [each.message for each in read]
        # What is in flight when the portion is full comes, too.
        assert max(sum(each.size_bytes for each in some) for some in large) < 5 * 2**20


async def test_a_message_larger_than_a_pull_may_bring_comes_alone(
    broker: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_client.NatsClient, "max_payload", 1_000)
    monkeypatch.setattr(nats_broker, "_PULL_BYTES", 1_000)
    await broker.publish(1, size=10)
    await broker.publish(2, size=5_000)
    async with opened(broker) as adapter:
        read = await read_all(adapter.source, 3)
        assert [len(each.message.body.data) for each in read if each.message] == [10, 5_000, 5_000]


# The connection


async def fails_with(error: type[Exception], call: Any) -> float:
    """How long it takes until a call fails so (seconds); others fail otherwise meanwhile."""
    began_s = time.monotonic()
    async with asyncio.timeout(300):
        while True:
            try:
                await call()
            except error:
                return time.monotonic() - began_s
            except port.Unreachable:
                pass


async def test_a_server_that_takes_no_more_connections_ends_the_session_and_opens_another_one(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, "max_connections: 100") as broker,
        opened(broker) as one,
        opened(broker) as two,
    ):
        # Of three connections the server closes two, whichever these are.
        reading = {asyncio.ensure_future(each.source.read(10, 250)): each for each in (one, two)}
        broker.configure("max_connections: 1")
        async with asyncio.timeout(300):
            done, rest = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        (ended, *_) = done
        adapter = reading[ended]
        for each in done:
            with pytest.raises(port.SessionOver):
                await each
        await port.end(rest)
        outgoing = port.Outgoing(DUE, None, {}, "id 1")
        calls = [
            lambda: adapter.source.read(1, 60),
            lambda: adapter.source.commit([port.Read(1, 1, None, SOURCE, "$JS.ACK.x")]),
            lambda: adapter.source.hold([port.Read(1, 1, None, SOURCE, "$JS.ACK.x")]),
            lambda: adapter.output.produce([outgoing]),
            lambda: adapter.log.fetch([(1, 1)], ""),
            adapter.source_findings,
            adapter.must_answer,
        ]
        for call in calls:
            began_s = time.monotonic()
            with pytest.raises(port.SessionOver, match=r"closed for good: .*maximum connections"):
                await call()
            assert time.monotonic() - began_s < 5
        broker.configure("max_connections: 100")

        async def open_again() -> None:
            async with opened(broker, timeout_s=5.0) as another:
                await another.must_answer()

        await until_done(open_again)


def users(password: str) -> str:
    return f"authorization {{ users = [{{ user: admin, password: a }}, {{ user: relay, password: {password} }}] }}"


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_password_that_is_changed_ends_the_session(tmp_path: Path, restarted: bool) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("old")
    own: dict[str, Any] = {"user": "relay", "password_file": str(password_file)}
    async with serving(tmp_path, users("old"), "admin:a") as broker, opened(broker, **own) as adapter:
        await adapter.must_answer()
        if restarted:
            broker.server.kill()
            broker.file.write_text(users("new"))
            broker.server.start()
            broker.server.wait_until_loaded()
        else:
            broker.configure(users("new"))
        assert await fails_with(port.SessionOver, adapter.must_answer) < 120
        with pytest.raises(port.Unreachable, match="Authorization Violation"):
            async with opened(broker, timeout_s=5.0, **own):
                pass
        password_file.write_text("new")
        async with opened(broker, **own) as another:
            await another.must_answer()


async def test_a_server_that_is_suspended_is_found_out_in_time_and_the_session_can_be_closed(broker: Nats) -> None:
    async with opened(broker, timeout_s=1.0) as adapter:
        await adapter.must_answer()
        broker.server.suspend()
        try:
            began_s = time.monotonic()
            with pytest.raises(port.Unreachable):
                await adapter.must_answer()
            assert time.monotonic() - began_s < 5
            large = nats_client.message_of(b"", b"x" * 1_000_000)
            for number in range(3):
                some = [port.Outgoing(DUE, large, {}, f"{number} {each}") for each in range(20)]
                with contextlib.suppress(port.Unreachable):
                    assert not any(each.is_taken for each in await adapter.output.produce(some))
            began_s = time.monotonic()
            await adapter._client.close()
            assert time.monotonic() - began_s < 30
        finally:
            os.kill(broker.server.pid, signal.SIGCONT)


async def test_a_user_who_may_not_get_answers_is_named(tmp_path: Path) -> None:
    denied = 'permissions: { subscribe: { deny: ["_INBOX.>"] } }'
    configuration = (
        f"authorization {{ users = [{{ user: admin, password: a }}, {{ user: relay, password: b, {denied} }}] }}"
    )
    async with serving(tmp_path, configuration, "admin:a") as broker:
        url = broker.server.url.replace("//", "//relay:b@")
        began_s = time.monotonic()
        with pytest.raises(port.Unreachable, match='Permissions Violation for Subscription to "_INBOX'):
            async with opened(broker, url=url):
                pass
        assert time.monotonic() - began_s < 30


async def test_nats_py_works_on_the_connection_that_hands_on_raw_blocks(broker: Nats) -> None:
    """Its own requests, answers of JetStream and no responders."""
    connection = nats_client._Connection(lambda _: None)
    await connection.connect(broker.server.url)
    try:
        js = connection.jetstream(timeout=60)
        assert (await js.publish(DUE, b"body", headers={"a": "b", "Status": "404"})).seq == 1
        assert (await js.stream_info(DUE)).state.messages == 1
        pulled = await js.pull_subscribe(DUE, "durable")
        (message,) = await pulled.fetch(1, timeout=60)
        assert (message.data, nats_client.raw_block(message)) == (b"body", b"NATS/1.0\r\na: b\r\nStatus: 404\r\n\r\n")
        await message.ack_sync(timeout=60)
        with pytest.raises(nats.errors.TimeoutError):
            await pulled.fetch(1, timeout=0.1)
        with pytest.raises(nats.errors.NoRespondersError):
            await connection.request("nowhere", timeout=60)
        with pytest.raises(nats.js.errors.NoStreamResponseError):
            await js.publish("nowhere", b"")
        with pytest.raises(nats.js.errors.NotFoundError):
            await js.stream_info("nowhere")
    finally:
        await connection.close()


# Findings


async def names_of(adapter: Any, grade: Grade) -> set[str]:
    return {each.name for each in await adapter.source_findings() if each.grade is grade}


async def test_what_an_owner_changes_is_found_while_a_relay_runs(broker: Nats) -> None:
    async with opened(broker) as adapter:
        assert await names_of(adapter, Grade.WRONG) == set()
        settings: dict[str, dict[str, Any]] = {
            "size": {"max_msgs": 1_000},
            "subject": {"max_msgs_per_subject": 10},
            "rollup": {"allow_rollup_hdrs": True},
        }
        for name, config in settings.items():
            await broker.change(SOURCE, **config)
            assert await names_of(adapter, Grade.WRONG) == {name}
            await broker.change(SOURCE, max_msgs=-1, max_msgs_per_subject=-1, allow_rollup_hdrs=False)
            assert await names_of(adapter, Grade.WRONG) == set()


async def test_a_limit_by_subject_drops_old_messages_unless_new_ones_are_refused_by_subject(broker: Nats) -> None:
    """The server's word for what `nats_judgement` says."""
    await broker.make("limited", max_msgs=100, max_msgs_per_subject=1, discard="new")
    for number in range(2):
        await broker.admin.request("limited", b"", headers={"n": str(number)}, timeout=300)
    assert [lines_of(block) for block, _ in await stored(broker, "limited")] == [[b"n: 1"]]


async def test_a_work_queue_with_ttl_is_no_source(broker: Nats) -> None:
    await broker.make(
        "queue", retention="workqueue", allow_msg_ttl=True, subject_delete_marker_ttl=10**9, storage="memory"
    )
    async with opened(broker, source="queue") as adapter:
        assert await names_of(adapter, Grade.WRONG) >= {"retention", "ttl"}
        assert "storage" in await names_of(adapter, Grade.WARNING)


async def test_a_source_is_missing_until_it_is_made(broker: Nats) -> None:
    async with opened(broker, source="later") as adapter:
        first = await anext(adapter.findings())
        assert (first.name, first.grade) == ("source", Grade.MISSING)
        for call in (adapter.must_answer, adapter.source_findings, adapter.log.generation, adapter.log.kept_ms):
            with pytest.raises(port.NotThere, match="stream later: stream not found"):
                await call()
        assert not adapter.comes_back("later")
        await broker.make("later")
        await adapter.must_answer()
        assert adapter.comes_back("later")
        found = [each async for each in adapter.findings()]
        assert found[0].name == "source"
        assert {each.grade for each in found} == {Grade.OK}


async def test_names_that_no_stream_can_have_are_wrong(broker: Nats) -> None:
    wrong: list[dict[str, Any]] = [{"source": "a.b"}, {"subscription": "a.b"}]
    for names in wrong:
        async with opened(broker, **names) as adapter:
            found = await anext(adapter.findings())
            assert (found.name, found.grade) == ("source", Grade.WRONG)
            assert "'a.b'" in found.text


async def test_targets_are_judged(broker: Nats) -> None:
    async with opened(broker) as adapter:
        found = {each.name: each for each in [each async for each in adapter.findings()]}
        assert found["target"].grade is Grade.OK
        await broker.api(f"STREAM.DELETE.{DUE}")
        found = {each.name: each for each in [each async for each in adapter.findings()]}
        assert found["target"].grade is Grade.MISSING
        await broker.make(DUE, no_ack=True)
        found = {each.name: each for each in [each async for each in adapter.findings()]}
        assert found["target"].grade is Grade.WRONG


@pytest.mark.parametrize("other", [{"topic": "payments"}, {"subscription": "second"}])
async def test_two_relays_of_one_retry_log_are_found(broker: Nats, other: dict[str, Any]) -> None:
    async with opened(broker) as one, opened(broker, **other) as two:
        await one.retries.read(1, 0.01)
        assert [each async for each in one.findings() if each.grade is not Grade.OK] == []
        for _ in range(2):
            (found,) = [each async for each in two.findings() if each.grade is not Grade.OK]
            assert (found.name, found.grade) == ("retry readers", Grade.WRONG)
        await two.retries.read(1, 0.01)
        (found,) = [each async for each in one.findings() if each.grade is not Grade.OK]
        assert (found.name, found.grade) == ("retry readers", Grade.WRONG)


def numbers(read: Sequence[port.Read]) -> Iterator[str]:
    return (each.message.headers["n"] for each in read if each.message is not None)


async def test_a_time_and_a_position_are_those_of_the_stream(broker: Nats) -> None:
    before_ms = port.now_ms()
    await broker.publish(3)
    async with opened(broker) as adapter:
        read = await read_all(adapter.source, 3)
        assert list(numbers(read)) == ["0", "1", "2"]
        assert all(before_ms - 1_000 <= each.sent_at_ms <= port.now_ms() + 1_000 for each in read)
        for each in read:
            told = await broker.api(f"STREAM.MSG.GET.{SOURCE}", {"seq": each.entry_id})
            moment = datetime.datetime.fromisoformat(told["message"]["time"])
            assert each.sent_at_ms == int(moment.timestamp() * 1_000)
        created = (await broker.api(f"STREAM.INFO.{SOURCE}"))["created"]
        js = await broker.admin.jetstream().stream_info(SOURCE)
        assert await adapter.log.generation() == f"{js.created:%Y%m%dT%H%M%S.%f}Z", created


def test_a_failure_of_the_adapter_passes_for_the_relay() -> None:
    assert issubclass(nats_answers.Failed, port.Unreachable)
