"""Tests what Kafka's adapter decides by itself, with clients that do what a test says.

Which partitions are whose, what may be committed, what of a call is published, and what a failure ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import confluent_kafka as kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from tarry_relay import kafka_answers, kafka_broker, kafka_client, port, relay_settings
from tarry_relay.kafka_broker import KafkaLog, KafkaReader, Kept
from tarry_relay.kafka_client import Body, ClientErrors, ClientProperties, ClusterTopics, KafkaOutput, Record, Thread
from tarry_relay.port import Meaning
from tests._support.processes import run_program
from tests.planted import registry

TOPIC = "orders"


def message(partition: int, offset: int, error: int | None = None, headers: Any = None) -> Any:
    made = KafkaError(error) if error is not None else None
    told = [("n", b"%d" % offset)] if headers is None else headers
    return SimpleNamespace(
        partition=lambda: partition,
        offset=lambda: offset,
        error=lambda: made,
        key=lambda: None,
        value=lambda: b"%d" % offset,
        headers=lambda: told,
        timestamp=lambda: (1, 1_000 + offset),
        leader_epoch=lambda: 5,
    )


class ScriptedConsumer:
    """A consumer to which happens what `script` has: a message, or a call, such as a rebalance."""

    def __init__(self, properties: dict[str, Any]) -> None:
        self.properties = properties
        self.script: deque[Any] = deque()
        self.calls: dict[str, Any] = {}
        self.assigned: dict[int, int] = {}
        self.paused: set[int] = set()
        self.commits: list[tuple[int, int, int]] = []
        self.asked: list[str] = []
        self.topic_error: KafkaError | None = None
        self.ends: tuple[int, int] | None = (0, 9)

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.asked.append("committed")
        return [TopicPartition(each.topic, each.partition, 8) for each in partitions]

    def subscribe(self, topics: list[str], **calls: Any) -> None:
        self.calls = calls

    def gets(self, *partitions: int) -> Callable[[], None]:
        return lambda: self.calls["on_assign"](self, [TopicPartition(TOPIC, each) for each in partitions])

    def loses(self, *partitions: int) -> Callable[[], None]:
        return lambda: self.calls["on_revoke"](self, [TopicPartition(TOPIC, each) for each in partitions])

    def poll(self, timeout: float) -> Any:
        while self.script:
            step = self.script.popleft()
            if not callable(step):
                return step
            step()
        return None

    def incremental_assign(self, partitions: Iterable[TopicPartition]) -> None:
        self.assigned |= {each.partition: each.offset for each in partitions}

    def incremental_unassign(self, partitions: Iterable[TopicPartition]) -> None:
        for each in partitions:
            del self.assigned[each.partition]

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self.paused |= {each.partition for each in partitions}

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self.paused -= {each.partition for each in partitions}

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        self.commits += [(each.partition, each.offset, each.leader_epoch) for each in offsets]

    def list_topics(self, topic: str, *, timeout: float) -> Any:
        self.asked.append("metadata")
        return SimpleNamespace(topics={topic: SimpleNamespace(error=self.topic_error)})

    def get_watermark_offsets(self, partition: TopicPartition, *, timeout: float) -> Any:
        self.asked.append(f"end of {partition.partition}")
        return self.ends

    def consume(self, rows: int, timeout: float) -> list[Any]:
        return []

    def unassign(self) -> None:
        self.assigned.clear()

    def close(self) -> None:
        self.script.clear()


class Topics(ClusterTopics):
    """A cluster that says which topic it is."""

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__(nobody, 5)
        self.now = "one"
        self.asked = 0

    async def _described(self, topic: str) -> Any:
        self.asked += 1
        if not self.now:
            raise port.Unreachable("away")
        return SimpleNamespace(topic_id=self.now, partitions=[0, 1])


Cluster = tuple[KafkaReader, ScriptedConsumer, Topics]


def properties(**settings: Any) -> ClientProperties:
    return ClientProperties(relay_settings.Kafka(**settings), "relay", "one")


def test_what_a_consumer_has_queued_and_what_it_fetches_are_together_what_it_may_read_ahead() -> None:
    ahead = ClientProperties(relay_settings.Kafka(), "relay", "one", 8 * 2**20)
    for each in (ahead.reader(TOPIC, "one"), ahead.fetcher(TOPIC)):
        assert 1_024 * each["queued.max.messages.kbytes"] + each["fetch.max.bytes"] == 8 * 2**20


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return made(monkeypatch)


def made(patch: pytest.MonkeyPatch, kept_bytes: int = 0, bytes_max: int = 2**24) -> Cluster:
    patch.setattr(kafka, "Consumer", ScriptedConsumer)
    patch.setattr(kafka_broker, "_LOOK_AGAIN_S", 0)
    topics: Any = Topics()
    reader = KafkaReader(TOPIC, "one", topics, properties(), 5, bytes_max, Kept(kept_bytes))
    consumer: Any = reader._consumer
    return reader, consumer, topics


def offsets(portion: port.Portion) -> list[tuple[int, int]]:
    return [(each.ledger_id, each.entry_id) for each in portion.read]


async def walk(cluster: Cluster) -> None:
    """Get partitions, lose one and get it again, read one that was never read; then the topic is made anew."""
    reader, consumer, topics = cluster
    consumer.script += [consumer.gets(0, 1), message(0, 7), message(1, 3), message(0, 8)]
    first = await reader.read(10, 0)
    assert (offsets(first), first.lost_lanes) == ([(0, 7), (1, 3), (0, 8)], [])
    of_0, of_1 = [each for each in first.read if each.ledger_id == 0], [first.read[1]]
    await reader.commit(of_0[:1])
    assert consumer.commits == [(0, 8, 5)]

    consumer.script += [message(0, 9), consumer.loses(0), consumer.gets(0), message(0, 8), message(1, 4)]
    second = await reader.read(10, 0)
    assert offsets(second) == [(0, 8), (1, 4)]
    assert second.lost_lanes == [of_0[0].lane]
    assert second.read[0].lane != of_0[0].lane
    await reader.commit(of_0)
    await reader.commit(of_1)
    assert consumer.commits == [(0, 8, 5), (1, 4, 5)]

    consumer.script += [consumer.gets(2), message(2, -1001, KafkaError._AUTO_OFFSET_RESET)]
    assert offsets(await reader.read(10, 0)) == []
    assert consumer.assigned[2] == kafka.OFFSET_BEGINNING

    consumer.script += [message(1, 5), message(1, 6, KafkaError.TOPIC_AUTHORIZATION_FAILED)]
    topics.now = ""
    with pytest.raises(port.Unreachable):
        await reader.read(10, 0)
    topics.now = "one"
    assert offsets(await reader.read(10, 0)) == [(1, 5)]
    with pytest.raises(port.Unreachable):
        await reader.read(10, 0)
    consumer.script += [message(1, 0)]
    topics.now = "another"
    with pytest.raises(port.NotThere):
        await reader.read(10, 0)


async def test_a_partition_is_committed_by_the_relay_that_has_it(cluster: Cluster) -> None:
    await walk(cluster)


async def test_a_partition_is_given_up_when_no_commit_of_it_is_under_way(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_broker, "_COMMIT_WAIT_S", 60)
    consumer = cluster[1]
    order, goes_on, committing, read = await while_a_commit_waits(cluster, monkeypatch)
    consumer.script += [goes_on.set, consumer.loses(0), lambda: order.append("given up")]
    await read()
    await committing
    assert order == ["committed", "given up"]


async def test_a_partition_is_given_up_though_a_commit_of_it_waits_for_that(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_broker, "_COMMIT_WAIT_S", 0.01)
    consumer = cluster[1]
    order, goes_on, committing, read = await while_a_commit_waits(cluster, monkeypatch)
    consumer.script += [consumer.loses(0), lambda: order.append("given up"), goes_on.set]
    await read()
    await committing
    assert order == ["given up", "committed"]


async def test_no_poll_comes_before_a_call_of_another_thread_that_waits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client admits one call at a time, and a call that has to wait tries again each millisecond."""
    monkeypatch.setattr(kafka_broker, "_GIVE_WAY_S", 60)
    reader, consumer, _ = cluster
    consumer.script += [consumer.gets(0)]
    await reader.read(1, 0)
    admitted, waits, polls = threading.Lock(), threading.Event(), threading.Event()
    order: list[str] = []

    def poll(timeout: float) -> Any:
        with admitted:
            order.append("poll")
            polls.set()
            assert waits.wait(60)
        return message(0, 7) if len(order) > 2 else None

    def committed(partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        while not admitted.acquire(blocking=False):
            waits.set()
            time.sleep(0.001)
        order.append("committed")
        admitted.release()
        return []

    monkeypatch.setattr(consumer, "poll", poll)
    monkeypatch.setattr(consumer, "committed", committed)
    reading = asyncio.create_task(reader.read(1, 60))
    await asyncio.to_thread(polls.wait, 60)
    await reader.passed([(0, 1)])
    await reading
    assert order[:3] == ["poll", "committed", "poll"]


async def while_a_commit_waits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], threading.Event, asyncio.Task[None], Callable[[], Awaitable[object]]]:
    """Return what has happened so far, what the commit waits for, the commit, and a read."""
    reader, consumer, _ = cluster
    consumer.script += [consumer.gets(0), message(0, 7)]
    read = (await reader.read(10, 0)).read
    commits, goes_on = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(*, offsets: list[TopicPartition], asynchronous: bool) -> None:
        commits.set()
        assert goes_on.wait(60)
        order.append("committed")

    monkeypatch.setattr(consumer, "commit", slow)
    committing = asyncio.create_task(reader.commit(read))
    await asyncio.to_thread(commits.wait, 60)
    return order, goes_on, committing, lambda: reader.read(10, 0)


async def test_a_topic_that_is_gone_is_not_there(cluster: Cluster) -> None:
    reader, consumer, _ = cluster
    consumer.script += [consumer.gets(0), message(0, 0, KafkaError.UNKNOWN_TOPIC_OR_PART)]
    with pytest.raises(port.NotThere):
        await reader.read(10, 0)


async def test_a_reader_that_is_not_asked_keeps_its_place_and_reads_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_broker, "_REST_S", 0.001)
    reader, consumer, _ = cluster
    consumer.script += [consumer.gets(0)]
    await reader.read(10, 0)
    rebalanced = asyncio.Event()
    loop = asyncio.get_running_loop()
    consumer.script += [consumer.loses(0), consumer.gets(1), lambda: loop.call_soon_threadsafe(rebalanced.set)]
    keeping = asyncio.create_task(reader.keep_place())
    async with asyncio.timeout(60):
        await rebalanced.wait()
    keeping.cancel()
    await reader._polling.call(lambda: None)
    assert consumer.paused == {0, 1}
    consumer.script += [message(1, 0), consumer.gets(0)]
    portion = await reader.read(10, 0)
    assert (offsets(portion), len(portion.lost_lanes)) == ([(1, 0)], 1)
    assert consumer.paused == set()


async def test_what_is_read_is_kept_for_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, consumer, topics = made(monkeypatch, kept_bytes=10_000)
    consumer.script += [consumer.gets(0), message(0, 7), message(0, 8)]
    await reader.read(10, 0)
    log = log_of((reader, consumer, topics))
    found = await log.fetch([(0, 7), (0, 8)], "one")
    assert [each and each.headers["n"] for each in found] == ["7", "8"]
    assert log._read_for_it == 0
    # The id was asked for when they were read.
    assert topics.asked == 1


def log_of(cluster: Cluster, bytes_max: int = 2**24) -> KafkaLog:
    """Return a log that fetches what the reader has kept."""
    reader, _, topics = cluster
    assert reader._kept is not None
    return KafkaLog(TOPIC, topics, properties(), reader._kept, 5, bytes_max)


async def looked_at_no_more(cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
    """Keep what is read within a tenth of a second of a look; then the topic is made anew."""
    reader, consumer, topics = cluster
    consumer.script += [consumer.gets(0), message(0, 7)]
    patch.setattr(kafka_broker, "_LOOK_AGAIN_S", 3_600)
    await reader.read(10, 0)
    log = log_of(cluster)
    for offset, now in ((8, "one"), (9, "another")):
        topics.now = now
        consumer.script += [message(0, offset)]
        await reader.read(10, 0)
    with pytest.raises(port.NotThere):
        await log.fetch([(0, 8), (0, 9)], "one")


async def test_what_was_kept_is_not_given_when_its_topic_was_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    await looked_at_no_more(made(monkeypatch, kept_bytes=10_000), monkeypatch)


async def test_what_was_kept_is_kept_on_when_nobody_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = reader, consumer, topics = made(monkeypatch, kept_bytes=10_000)
    topics.now = ""
    consumer.script += [consumer.gets(0), message(0, 7)]
    monkeypatch.setattr(KafkaReader, "_look_whether_same", no_look)
    await reader.read(10, 0)
    log = log_of(cluster)
    with pytest.raises(port.Unreachable):
        await log.fetch([(0, 7)], "one")
    topics.now = "one"
    assert await log.fetch([(0, 7)], "one") != [None]


async def no_look(reader: KafkaReader) -> None:
    return


async def test_a_read_ends_with_the_message_that_fills_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Record.of(message(0, 7)).memory_bytes
    reader, consumer, _ = made(monkeypatch, bytes_max=2 * size)
    consumer.script += [consumer.gets(0), *(message(0, offset) for offset in range(7, 10))]
    assert offsets(await reader.read(10, 0)) == [(0, 7), (0, 8)]
    assert offsets(await reader.read(10, 0)) == [(0, 9)]


async def test_a_fetch_ends_with_the_message_that_fills_its_bytes_and_says_what_it_has_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = made(monkeypatch)
    log = log_of(cluster, bytes_max=2 * Record.of(message(0, 7)).memory_bytes)
    consumer: Any = log._consumer
    # Offset 3 is gone; what lies behind 8 is not looked for any more.
    consumer.script += [message(0, 7), message(0, 8), message(0, 9), message(1, 1)]
    asked = [(0, 3), (0, 7), (0, 8), (0, 9), (1, 1), (2, 1), (-1, 1)]
    found = await log.fetch(asked, "one")
    assert [each and (each.headers.get("n") if each is not port.NOT_YET else "not yet") for each in found] == [
        *(None, "7", "8", "not yet", "not yet", None, None)
    ]
    assert consumer.assigned == {}
    consumer.script.clear()
    consumer.script += [message(0, 9), message(1, 1)]
    found = await log.fetch([(0, 9), (1, 1)], "one")
    assert [each and each.headers["n"] for each in found] == ["9", "1"]


class Producer:
    """A producer whose messages have the answer that their text or their topic names.

    What is flushed together is a batch of its topic, which is refused as a whole if one message of it is too large.
    """

    published: list[str]
    made: int

    def __init__(self, properties: dict[str, Any]) -> None:
        type(self).made += 1
        self._sent: list[tuple[str, str, Any]] = []
        self._open: list[str] = []
        self._aborts_for: KafkaError | None = None
        self._is_transactional = "transactional.id" in properties

    def init_transactions(self, timeout: float) -> None:
        self._open = []

    def begin_transaction(self) -> None:
        self._open = []

    def produce(self, topic: str, value: bytes | None, headers: Any, on_delivery: Any, key: Any = None) -> None:
        name = "none" if value is None else value.decode()
        if name == "fenced":
            raise KafkaException(KafkaError(KafkaError._FENCED))
        if name == "raises":
            raise ValueError("embedded null character")
        if name == "full" and self._sent:
            raise BufferError
        self._sent.append((topic, name, on_delivery))

    def flush(self, timeout: float) -> int:
        sent, self._sent = self._sent, []
        if any(topic == "denied" for topic, _, _ in sent) and self._is_transactional:
            self._aborts_for = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, txn_requires_abort=True)
        for topic, name, told in sent:
            error = None
            if self._aborts_for is not None:
                error = KafkaError(KafkaError._PURGE_QUEUE)
            elif any(other.startswith("large") for where, other, _ in sent if where == topic):
                error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
            elif topic == "away":
                error = KafkaError(KafkaError._MSG_TIMED_OUT)
            elif topic.startswith("missing"):
                error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
            elif topic == "denied":
                error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
            elif name == "breaks":
                raise KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, fatal=True)  # type: ignore[misc]
            elif name == "surprises":
                raise RuntimeError("a surprise")
            elif self._is_transactional:
                self._open.append(name)
            else:
                self.published.append(name)
            if name != "silent":
                told(error, None)
        return 0

    def poll(self, timeout: float) -> int:
        return 0

    def commit_transaction(self, timeout: float) -> None:
        if self._aborts_for is not None:
            raise KafkaException(self._aborts_for)
        self.published += self._open

    def abort_transaction(self, timeout: float) -> None:
        self._open = []
        if self._aborts_for is not None:
            raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, fatal=True))


def outgoing(target: str, body: str) -> port.Outgoing:
    return port.Outgoing(target, port.Message({}, Body(None, body.encode(), ())), {}, body)


@pytest.fixture(params=[False, True], ids=["one by one", "transactions"])
def output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KafkaOutput:
    return output_of(monkeypatch, transactional=request.param)


def output_of(patch: pytest.MonkeyPatch, *, transactional: bool) -> KafkaOutput:
    patch.setattr(kafka, "Producer", Producer)
    patch.setattr(Producer, "published", [], raising=False)
    patch.setattr(Producer, "made", 0, raising=False)
    settings = relay_settings.Kafka(transactional=transactional)
    return KafkaOutput(TOPIC, ClientProperties(settings, "relay", "one"), settings)


async def told_of(output: KafkaOutput, *bodies: tuple[str, str]) -> list[tuple[str, str]]:
    """Publish these, and return the meaning and the code of each answer."""
    answers = await output.produce([outgoing(*each) for each in bodies])
    for (target, _), each in zip(bodies, answers, strict=True):
        assert each.is_taken or each.text.startswith(f"{target}: ")
    return [(each.meant.meaning.name, each.code) for each in answers]


TAKEN = ("TAKEN", "")


async def publish(output: KafkaOutput) -> None:
    """Publish messages of which one is too large and one goes nowhere now: the others are published, once."""
    told = await told_of(output, ("due", "a"), ("due", "large"), ("other", "b"), ("away", "c"), ("due", "d"))
    assert told == [TAKEN, ("REFUSED", "MSG_SIZE_TOO_LARGE"), TAKEN, ("UNKNOWN", "_MSG_TIMED_OUT"), TAKEN]
    assert sorted(Producer.published) == ["a", "b", "d"]


async def test_what_cannot_be_published_keeps_nothing_else(output: KafkaOutput) -> None:
    await publish(output)


async def test_a_message_whose_publishing_raises_keeps_no_other(output: KafkaOutput) -> None:
    bodies = [("due", str(row)) for row in range(499)]
    bodies.insert(250, ("due", "raises"))
    told = await told_of(output, *bodies)
    assert told.pop(250) == ("UNKNOWN", "ValueError")
    assert set(told) == {TAKEN}
    assert sorted(Producer.published, key=int) == [str(row) for row in range(499)]


async def test_a_surprise_of_a_batch_is_raised_and_the_others_come_one_by_one_at_most_twice(
    output: KafkaOutput,
) -> None:
    bodies = [("due", str(row)) for row in range(10)]
    bodies.insert(5, ("due", "surprises"))
    with pytest.raises(RuntimeError, match="a surprise"):
        await told_of(output, *bodies)
    for each in bodies:
        with contextlib.suppress(RuntimeError):
            assert await told_of(output, each) == [TAKEN]
    times = Counter(Producer.published)
    assert set(times) == {str(row) for row in range(10)}
    assert max(times.values()) == (1 if output._is_transactional else 2)


@pytest.mark.parametrize("name", ["a\0b", "a" * 5_004, "__consumer_offsets", "a b", "", "a\udcffb"])
async def test_a_target_that_can_be_none_is_refused_and_never_given_to_the_client(
    output: KafkaOutput, name: str
) -> None:
    told = await told_of(output, ("due", "a"), (name, "b"), ("due", "c"))
    assert told == [TAKEN, ("REFUSED", "TOPIC_EXCEPTION"), TAKEN]
    assert Producer.published == ["a", "c"]


async def test_a_target_that_refuses_a_transaction_keeps_no_other(output: KafkaOutput) -> None:
    told = await told_of(output, ("due", "a"), ("denied", "b"), ("other", "c"), ("denied", "d"), ("due", "e"))
    denied = ("NOT_NOW", "TOPIC_AUTHORIZATION_FAILED")
    assert told == [TAKEN, denied, TAKEN, denied, TAKEN]
    assert sorted(Producer.published) == ["a", "c", "e"]
    (answer,) = await output.produce([outgoing("denied", "x")])
    assert answer.meant == port.Meant(Meaning.NOT_NOW, port.Cause.LIMIT)


async def test_what_is_not_answered_is_unknown_and_not_published_later(output: KafkaOutput) -> None:
    assert await told_of(output, ("due", "silent")) == [("UNKNOWN", "_TIMED_OUT")]
    assert await told_of(output, ("due", "a")) == [TAKEN]
    assert Producer.made == 2


async def test_a_full_queue_is_emptied_and_the_message_tried_again(output: KafkaOutput) -> None:
    assert await told_of(output, ("due", "a"), ("due", "full")) == [TAKEN, TAKEN]
    assert Producer.published == ["a", "full"]


async def test_a_producer_that_has_failed_for_good_is_replaced(output: KafkaOutput) -> None:
    """The client raises such an error as a class that is no BaseException."""
    denied = ("NOT_NOW", "CLUSTER_AUTHORIZATION_FAILED")
    assert await told_of(output, ("due", "breaks"), ("due", "b")) == [denied, denied]
    assert await told_of(output, ("due", "c")) == [TAKEN]
    assert (Producer.published, Producer.made) == (["c"], 2)


async def test_a_producer_that_was_given_many_topics_that_do_not_exist_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_client, "_MISSING_MAX", 3)
    output = output_of(monkeypatch, transactional=False)
    for made in (1, 1, 2):
        bodies = [("missing-1", "a"), ("due", "b"), ("missing-2", "c")]
        missing = ("NOT_NOW", "UNKNOWN_TOPIC_OR_PART")
        assert await told_of(output, *bodies) == [missing, TAKEN, missing]
        assert Producer.made == made
    assert Producer.published == ["b", "b", "b"]


async def test_a_bare_message_has_neither_key_nor_value(output: KafkaOutput) -> None:
    assert (await output.produce([port.Outgoing("dead", None, {"why": "large"}, "")]))[0].is_taken
    assert Producer.published == ["none"]


async def test_a_session_is_over_when_another_relay_has_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    output = output_of(monkeypatch, transactional=True)
    with pytest.raises(port.SessionOver, match=r"another relay publishes with relay\.id 'one'"):
        await output.produce([outgoing("due", "fenced")])


def test_headers_of_the_original_are_published_but_those_that_are_the_relays() -> None:
    headers = [("a", b"1"), ("Tarry-Reason", b"2"), ("a", b"\xff"), ("OWN", b"3"), ("null", None), ("", b"4")]
    told = kafka_client._published(
        port.Outgoing("due", port.Message({}, Body(b"k", b"v", headers)), {"own": "5", "tarry-x": "\0\udcff"}, "")
    )
    assert (told["key"], told["value"]) == (b"k", b"v")
    kept = [("a", b"1"), ("a", b"\xff"), ("null", None), ("", b"4")]
    assert told["headers"] == [*kept, ("own", b"5"), ("tarry-x", b"\0?")]


async def test_a_name_of_a_header_that_would_crash_the_client_is_not_given_to_it(output: KafkaOutput) -> None:
    bad = port.Outgoing("due", None, {"\udcff": "x"}, "")
    told = await output.produce([outgoing("due", "a"), bad])
    assert [each.code for each in told] == ["", "UnicodeEncodeError"]


def test_what_the_file_says_of_a_cluster_is_told_to_every_client() -> None:
    shown = properties(
        url="a:1,b:2",
        user="anna",
        ca_file="ca.pem",
        cert_file="c.pem",
        key_file="k.pem",
        sasl="PLAIN",
        properties={"client.rack": "r1", "linger.ms": 5},
    )
    for each in (shown.shared(), shown.reader(TOPIC, "one"), shown.fetcher(TOPIC), shown.producer(TOPIC)):
        assert each["bootstrap.servers"] == "a:1,b:2"
        assert each["security.protocol"] == "sasl_ssl"
        assert (each["sasl.mechanism"], each["sasl.username"]) == ("PLAIN", "anna")
        assert (each["ssl.ca.location"], each["ssl.key.location"]) == ("ca.pem", "k.pem")
        assert (each["client.rack"], each["linger.ms"]) == ("r1", 5)
    assert properties().shared()["security.protocol"] == "plaintext"
    assert properties(tls=True).shared()["security.protocol"] == "ssl"
    assert shown.reader("orders", "one")["group.id"] == "relay-orders@one"


@pytest.mark.parametrize("name", ["enable.auto.commit", "acks", "group.id", "bootstrap.servers", "isolation.level"])
def test_what_a_relay_stands_on_cannot_be_set_otherwise(name: str) -> None:
    with pytest.raises(relay_settings.SettingsError, match=f"broker.properties: '{name}' is set by the relay"):
        properties(properties={name: "x"})


def a_lost_partition_is_committed(patch: pytest.MonkeyPatch) -> None:
    commit = KafkaReader._commit

    def whosever(self: KafkaReader, lane: Any, behind: TopicPartition) -> None:
        commit(self, self._lanes.get(behind.partition), behind)

    patch.setattr(KafkaReader, "_commit", whosever)


def a_loss_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KafkaReader, "_revoked", lambda self, consumer, partitions: None)


def a_commit_is_of_the_message_itself(patch: pytest.MonkeyPatch) -> None:
    commit = KafkaReader._commit

    def before(self: KafkaReader, lane: Any, behind: TopicPartition) -> None:
        behind.offset -= 1
        commit(self, lane, behind)

    patch.setattr(KafkaReader, "_commit", before)


def a_partition_that_was_never_read_is_not_begun(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KafkaReader, "_begin", lambda self, event: None)


def a_topic_that_was_made_anew_is_read_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KafkaReader, "_look_whether_same", no_look)


def what_was_kept_of_another_topic_is_given(patch: pytest.MonkeyPatch) -> None:
    async def whosever(self: ClusterTopics, topic: str, generation: str, read_until_s: float) -> None:
        return

    patch.setattr(ClusterTopics, "confirm", whosever)


def a_look_stands_for_what_is_read_after_it(patch: pytest.MonkeyPatch) -> None:
    confirm = ClusterTopics.confirm

    async def at_any_time(self: ClusterTopics, topic: str, generation: str, read_until_s: float) -> None:
        await confirm(self, topic, generation, 0.0)

    patch.setattr(ClusterTopics, "confirm", at_any_time)


def what_is_with_one_that_is_too_large_is_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kafka_answers, "OF_A_BATCH", frozenset())


def what_was_aborted_counts_as_published(patch: pytest.MonkeyPatch) -> None:
    in_transaction = KafkaOutput._in_transaction

    def all_but_failures(self: KafkaOutput, producer: Any, messages: list[port.Outgoing]) -> Any:
        return kafka_client._Round(in_transaction(self, producer, messages).errors)

    patch.setattr(KafkaOutput, "_in_transaction", all_but_failures)


PLANTED = (
    a_lost_partition_is_committed,
    a_loss_is_not_told,
    a_commit_is_of_the_message_itself,
    a_partition_that_was_never_read_is_not_begun,
    a_topic_that_was_made_anew_is_read_on,
    what_was_kept_of_another_topic_is_given,
    a_look_stands_for_what_is_read_after_it,
    what_is_with_one_that_is_too_large_is_refused,
    what_was_aborted_counts_as_published,
)
registry.register("a relay beside Kafka", PLANTED)


@pytest.mark.parametrize("plant", PLANTED)
async def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = []
    stories = (
        walk(made(monkeypatch)),
        looked_at_no_more(made(monkeypatch, kept_bytes=10_000), monkeypatch),
        publish(output_of(monkeypatch, transactional=True)),
    )
    for story in stories:
        try:
            await story
        except (AssertionError, KeyError, pytest.fail.Exception) as error:
            found.append(error)
    assert found


def test_failures_have_three_scopes() -> None:
    scopes = {
        KafkaError.UNKNOWN_TOPIC_ID: port.NotThere,
        KafkaError.TOPIC_EXCEPTION: port.NotThere,
        KafkaError._TRANSPORT: port.Unreachable,
        KafkaError._TIMED_OUT: port.Unreachable,
        KafkaError.TOPIC_AUTHORIZATION_FAILED: port.Unreachable,
        KafkaError.UNKNOWN_MEMBER_ID: port.Unreachable,
        KafkaError._AUTHENTICATION: port.SessionOver,
        KafkaError._SSL: port.SessionOver,
        KafkaError.SASL_AUTHENTICATION_FAILED: port.SessionOver,
        KafkaError._FATAL: port.SessionOver,
    }
    for code, scope in scopes.items():
        assert type(kafka_answers.failure(KafkaError(code))) is scope, code
    assert type(kafka_answers.failure(KafkaError(KafkaError._TRANSPORT, fatal=True))) is port.SessionOver


async def test_refused_credentials_end_the_session_with_the_calls_that_follow(cluster: Cluster) -> None:
    reader, consumer, _ = cluster
    consumer.script += [consumer.gets(0), message(0, 7)]
    await reader.read(10, 0)
    refused = KafkaError(KafkaError._AUTHENTICATION, "Authentication failed")
    consumer.script += [lambda: consumer.properties["error_cb"](refused)]
    with contextlib.suppress(port.SessionOver):
        await reader.read(10, 0)
    for call in (reader.read(10, 0), reader.must_answer(), reader.passed([(0, 1)])):
        with pytest.raises(port.SessionOver, match="_AUTHENTICATION: Authentication failed"):
            await call


async def test_a_broker_is_asked_by_the_client_that_reads(cluster: Cluster) -> None:
    reader, consumer, _ = cluster
    await reader.must_answer()
    assert consumer.asked == ["committed", "metadata"]
    consumer.topic_error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    with pytest.raises(port.NotThere):
        await reader.must_answer()
    consumer.script += [consumer.gets(0, 1)]
    await reader.read(10, 0)
    consumer.asked.clear()
    for _ in range(3):
        await reader.must_answer()
    assert consumer.asked == ["committed", "end of 0", "committed", "end of 1", "committed", "end of 0"]
    consumer.ends = None
    with pytest.raises(port.Unreachable):
        await reader.must_answer()


async def test_a_broker_that_does_not_answer_is_told_in_time_with_what_it_said_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, consumer, _ = cluster
    goes_on = threading.Event()
    monkeypatch.setattr(reader, "_timeout_s", 0.05)
    monkeypatch.setattr(consumer, "committed", lambda partitions, timeout: goes_on.wait(60))
    consumer.script += [message(0, 0, KafkaError.GROUP_AUTHORIZATION_FAILED)]
    with pytest.raises(port.Unreachable):
        await reader.read(10, 0)
    async with asyncio.timeout(30):
        with pytest.raises(port.Unreachable, match=r"no answer within 0\.05 s; before: GROUP_AUTHORIZATION_FAILED"):
            await reader.must_answer()
        # Reading does not wait behind it.
        assert offsets(await reader.read(10, 0)) == []
    goes_on.set()


async def test_what_was_read_before_a_call_failed_is_handed_on(cluster: Cluster) -> None:
    reader, consumer, _ = cluster

    def fails() -> None:
        raise KafkaException(KafkaError(KafkaError._STATE))

    consumer.script += [consumer.gets(0), message(0, 7), fails, message(0, 8)]
    with pytest.raises(port.Unreachable):
        await reader.read(10, 0)
    assert offsets(await reader.read(10, 0)) == [(0, 7)]
    assert offsets(await reader.read(10, 0)) == [(0, 8)]


async def test_what_a_call_has_read_that_was_cancelled_is_handed_on(cluster: Cluster) -> None:
    reader, consumer, _ = cluster
    reads, goes_on = threading.Event(), threading.Event()
    consumer.script += [consumer.gets(0), reads.set, lambda: goes_on.wait(60), message(0, 7), message(0, 8)]
    cancelled = asyncio.create_task(reader.read(10, 0))
    assert await asyncio.to_thread(reads.wait, 60)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    goes_on.set()
    consumer.script += [message(0, 9)]
    found = offsets(await reader.read(10, 0))
    assert found[:2] == [(0, 7), (0, 8)]


async def test_a_position_that_can_be_none_is_gone_and_never_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = reader, consumer, _ = made(monkeypatch, kept_bytes=10_000)
    consumer.script += [consumer.gets(0), message(0, 7)]
    await reader.read(10, 0)
    log = log_of(cluster)
    fetched = await log.fetch([(0, 7), (0, 2**63), (2**32, 0), (2**64 - 1, 2**64 - 1)], "one")
    assert [each and each.headers["n"] for each in fetched] == ["7", None, None, None]
    assert await reader.passed([(0, 7), (0, 8), (2**32, 0), (-1, 0), (0, -1)]) == [True, False, False, False, False]


def test_headers_are_read_in_small_letters_and_those_that_stand_twice_are_named() -> None:
    headers = [("Delay", b"1s"), ("x", b"\xff"), ("DELAY", b"2s"), ("none", None), ("tag", b"a"), ("tag", b"b")]
    record = Record.of(message(0, 7, headers=headers))
    told = record.message()
    assert told.headers == {"delay": "2s", "x": "\ufffd", "tag": "b"}
    assert list(told.repeated) == ["delay", "tag"]
    assert list(told.body.headers) == headers
    assert record.sent_at_ms == 1_007


def test_the_time_of_a_message_is_what_its_producer_said() -> None:
    event = message(0, 7)
    event.timestamp = lambda: (0, -1)
    assert Record.of(event).sent_at_ms == -1


BLOCKED = """
import asyncio, threading
from tarry_relay import kafka_client

async def main():
    threads = [kafka_client.Thread(str(each), kafka_client.ClientErrors()) for each in range(3)]
    calls = [asyncio.create_task(each.call(threading.Event().wait)) for each in threads]
    await asyncio.sleep(0)
    await kafka_client.ended_within({"one": lambda: [each.join() for each in threads]}, 0.1)
    print("left behind")

asyncio.run(main())
"""


async def test_a_call_that_never_returns_keeps_neither_the_session_nor_the_interpreter() -> None:
    ended = await asyncio.to_thread(run_program, [sys.executable, "-c", BLOCKED])
    assert (ended.returncode, ended.stdout) == (0, "left behind\n"), ended.stderr


async def test_a_thread_that_has_ended_makes_no_calls() -> None:
    thread = Thread("test", ClientErrors())
    thread.end()
    with pytest.raises(port.SessionOver):
        await thread.call(lambda: None)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=60), st.integers(0, 100))
def test_what_is_kept_is_given_once_and_takes_no_more_than_it_may(
    calls: list[tuple[int, int, bool]], bytes_max: int
) -> None:
    kept: Kept[int] = Kept(bytes_max)
    model: dict[int, tuple[int, int]] = {}
    for number, (offset, size, is_taken) in enumerate(calls):
        if is_taken:
            assert kept.take((0, offset)) == model.pop(offset, (None, 0))[0]
            continue
        kept.keep((0, offset), number, size)
        model.pop(offset, None)
        if size <= bytes_max:
            model[offset] = number, size
        while sum(size for _, size in model.values()) > bytes_max:
            model.pop(next(iter(model)))
    assert {offset: kept.take((0, offset)) for offset in range(10)} == {
        offset: model.get(offset, (None, 0))[0] for offset in range(10)
    }
