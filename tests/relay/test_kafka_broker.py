"""What the adapter of Kafka itself decides, with clients that do what a test says: which partitions are whose, what may
be committed, and what of a transaction is published.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import confluent_kafka as kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tarry_relay import kafka_broker, kafka_client, kafka_output, port, relay_settings
from tarry_relay.kafka_broker import KafkaLog, KafkaReader
from tarry_relay.kafka_client import ClientProperties, ClusterTopics
from tarry_relay.kafka_output import KafkaOutput
from tarry_relay.kept_messages import Kept
from tests.planted import registry

TOPIC = "orders"


def message(partition: int, offset: int, error: int | None = None) -> Any:
    made = KafkaError(error) if error is not None else None
    return SimpleNamespace(
        partition=lambda: partition,
        offset=lambda: offset,
        error=lambda: made,
        key=lambda: None,
        value=lambda: b"%d" % offset,
        headers=lambda: [("n", b"%d" % offset)],
        timestamp=lambda: (1, 1_000 + offset),
        leader_epoch=lambda: 5,
    )


class ScriptedConsumer:
    """A consumer to which happens what `script` has: a message, or a call that a rebalance is."""

    def __init__(self, properties: dict[str, Any]) -> None:
        self.properties = properties
        self.script: deque[Any] = deque()
        self.calls: dict[str, Any] = {}
        self.assigned: dict[int, int] = {}
        self.paused: set[int] = set()
        self.committed: list[tuple[int, int, int]] = []

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
        self.committed += [(each.partition, each.offset, each.leader_epoch) for each in offsets]

    def close(self) -> None:
        self.script.clear()


class Topics(ClusterTopics):
    """Says which topic it is."""

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__(nobody, 5)
        self.now = "one"
        self.asked = 0

    async def _described(self, topic: str) -> Any:
        self.asked += 1
        if not self.now:
            raise port.Unreachable("away")
        return SimpleNamespace(topic_id=self.now)


Cluster = tuple[KafkaReader, ScriptedConsumer, Topics]


def properties(**settings: Any) -> ClientProperties:
    return ClientProperties(relay_settings.Kafka(**settings), "relay", "one")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return made(monkeypatch)


def made(patch: pytest.MonkeyPatch, kept_bytes: int = 0) -> Cluster:
    patch.setattr(kafka, "Consumer", ScriptedConsumer)
    patch.setattr(kafka_broker, "_LOOK_AGAIN_S", 0)
    topics: Any = Topics()
    reader = KafkaReader(TOPIC, "one", topics, properties(), 5, Kept(kept_bytes))
    consumer: Any = reader._consumer
    return reader, consumer, topics


def offsets(portion: port.Portion) -> list[tuple[int, int]]:
    return [(each.ledger_id, each.entry_id) for each in portion.read]


async def walk(cluster: Cluster) -> None:
    """A relay gets partitions, loses one and has it again, reads one that was never read; its topic is made anew."""
    reader, consumer, topics = cluster
    consumer.script += [consumer.gets(0, 1), message(0, 7), message(1, 3), message(0, 8)]
    first = await reader.read(10, 0)
    assert (offsets(first), first.lost_lanes) == ([(0, 7), (1, 3), (0, 8)], [])
    of_0, of_1 = [each for each in first.read if each.ledger_id == 0], [first.read[1]]
    await reader.commit(of_0[:1])
    assert consumer.committed == [(0, 8, 5)]

    consumer.script += [message(0, 9), consumer.loses(0), consumer.gets(0), message(0, 8), message(1, 4)]
    second = await reader.read(10, 0)
    assert offsets(second) == [(0, 8), (1, 4)]
    assert second.lost_lanes == [of_0[0].lane]
    assert second.read[0].lane != of_0[0].lane
    await reader.commit(of_0)
    await reader.commit(of_1)
    assert consumer.committed == [(0, 8, 5), (1, 4, 5)]

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


async def while_a_commit_waits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], threading.Event, asyncio.Task[None], Callable[[], Awaitable[object]]]:
    """What has happened so far, what the commit waits for, the commit, and a read."""
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
    # It was looked whose they are when they were read.
    assert topics.asked == 1


def log_of(cluster: Cluster) -> KafkaLog:
    """Fetches what the reader has kept."""
    reader, _, topics = cluster
    assert reader._kept is not None
    return KafkaLog(TOPIC, topics, properties(), reader._kept, 5)


async def looked_at_no_more(cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
    """What is read within a tenth of a second is kept before it is looked whose it is; its topic is made anew."""
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


class Producer:
    """Publishes what is flushed together in one batch, which is refused if one of it is too large."""

    published: list[str]
    begun: int

    def __init__(self, properties: dict[str, Any]) -> None:
        self._sent: list[tuple[str, str, Any]] = []
        self._open: list[str] = []
        self._is_transactional = "transactional.id" in properties

    def init_transactions(self, timeout: float) -> None:
        self._open = []

    def begin_transaction(self) -> None:
        type(self).begun += 1
        self._open = []

    def produce(self, topic: str, value: bytes | None, headers: Any, on_delivery: Any, key: Any = None) -> None:
        name = "none" if value is None else value.decode()
        if name == "fenced":
            raise KafkaException(KafkaError(KafkaError._FENCED))
        self._sent.append((topic, name, on_delivery))

    def flush(self, timeout: float) -> None:
        sent, self._sent = self._sent, []
        for topic, name, told in sent:
            error = None
            if any(other.startswith("large") for where, other, _ in sent if where == topic):
                error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
            elif topic == "away":
                error = KafkaError(KafkaError._MSG_TIMED_OUT)
            elif self._is_transactional:
                self._open.append(name)
            else:
                self.published.append(name)
            told(error, None)

    def commit_transaction(self, timeout: float) -> None:
        self.published += self._open

    def abort_transaction(self, timeout: float) -> None:
        self._open = []


def outgoing(target: str, body: str) -> port.Outgoing:
    return port.Outgoing(target, port.Message({}, (None, body.encode(), [])), {}, body)


@pytest.fixture(params=[False, True], ids=["one by one", "transactions"])
def output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KafkaOutput:
    return output_of(monkeypatch, transactional=request.param)


def output_of(patch: pytest.MonkeyPatch, *, transactional: bool) -> KafkaOutput:
    patch.setattr(kafka, "Producer", Producer)
    patch.setattr(Producer, "published", [], raising=False)
    patch.setattr(Producer, "begun", 0, raising=False)
    settings = relay_settings.Kafka(transactional=transactional)
    return KafkaOutput(TOPIC, ClientProperties(settings, "relay", "one"), settings)


async def publish(output: KafkaOutput) -> None:
    """Messages of which one is too large and one goes nowhere now: the others are published, once."""
    bodies = [("due", "a"), ("due", "large"), ("other", "b"), ("away", "c"), ("due", "d")]
    answers = await output.produce([outgoing(*each) for each in bodies])
    told = ["refused" if each.refused else "failed" if each.failed else "there" for each in answers]
    assert told == ["there", "refused", "there", "failed", "there"]
    assert sorted(Producer.published) == ["a", "b", "d"]


async def test_what_cannot_be_published_keeps_nothing_else(output: KafkaOutput) -> None:
    await publish(output)


async def test_a_dead_letter_has_no_payload_when_it_was_too_large(output: KafkaOutput) -> None:
    await output.produce([port.Outgoing("dead", outgoing("x", "a").message, {"why": "large"}, "", has_body=False)])
    assert Producer.published == ["none"]


async def test_a_relay_ends_when_another_one_has_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    output = output_of(monkeypatch, transactional=True)
    with pytest.raises(relay_settings.SettingsError, match=r"relay\.id: another relay"):
        await output.produce([outgoing("due", "fenced")])


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
    patch.setattr(kafka_output, "_TOO_LARGE", ())


def what_was_aborted_counts_as_published(patch: pytest.MonkeyPatch) -> None:
    def all_but_failures(self: KafkaOutput, messages: list[port.Outgoing]) -> list[port.Produced]:
        errors = self._round(messages)
        return [
            port.Produced() if error is None else kafka_output._refusal(each.target, error)
            for each, error in zip(messages, errors, strict=True)
        ]

    patch.setattr(KafkaOutput, "_produce", all_but_failures)


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


def test_no_topic_is_another_failure_than_a_broker_that_is_away() -> None:
    assert isinstance(kafka_client.failure(KafkaError(KafkaError.UNKNOWN_TOPIC_ID)), port.NotThere)
    assert isinstance(kafka_client.failure(KafkaError(KafkaError._TRANSPORT)), port.Unreachable)
