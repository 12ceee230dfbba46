"""What a relay meets in a real Kafka: partitions that change hands, transactions, a log that is cut, added to or made
anew, TLS and SASL.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as kafka
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from tarry_relay import port, relay_settings, sessions
from tests.brokers import kafka_server

pytestmark = pytest.mark.long
LIMIT_S = 300.0
SOURCE, DUE = "orders", "due"


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ca: trustme.CA) -> Iterator[kafka_server.KafkaServer]:
    """One for all tests here: each has topics of its own."""
    if (jars := kafka_server.find()) is None:
        pytest.skip(kafka_server.MISSING)
    directory = tmp_path_factory.mktemp("kafka")
    identity = directory / "identity.pem"
    issued = ca.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    identity.write_bytes(key.private_bytes(*plain) + chain)
    with kafka_server.KafkaServer(jars, directory, identity) as made:
        made.start()
        made.wait_until_loaded()
        yield made


class Topics:
    """The topics of one test, named after it."""

    def __init__(self, server: kafka_server.KafkaServer, name: str, directory: Path) -> None:
        self.server = server
        self.source, self.due = f"{name}-{SOURCE}", f"{name}-{DUE}"
        self._directory = directory
        self._shared: dict[str, Any] = {"bootstrap.servers": server.url, "log_level": 2}
        self._producer = kafka.Producer(self._shared)
        server.make_topic(self.source, 3)
        server.make_topic(self.due)

    def settings(self, identity: str, broker: str, url: str) -> relay_settings.Settings:
        file = self._directory / f"{identity}.toml"
        file.write_text(f"""
relay = {{ topic = "orders", id = "{identity}" }}
source = {{ name = "{self.source}", dead_letters = "{self.due}" }}
targets = [{{ name = "{self.due}" }}]
broker = {{ kind = "kafka", url = "{url}", session_s = 2, kept_bytes = 0, timeout_s = 10 {broker} }}
""")
        return relay_settings.load(file)

    @contextlib.asynccontextmanager
    async def opened(self, identity: str = "one", broker: str = "", url: str = "") -> AsyncIterator[Any]:
        """The relay's side of it. `broker`: more of the file's table."""
        async with sessions.opened(self.settings(identity, broker, url or self.server.url)) as opened:
            yield opened.broker

    def publish(self, partition: int, rows: int) -> None:
        # A producer learns of partitions now and then.
        for row in range(rows):
            self._producer.produce(self.source, b"%d" % row, partition=partition)
        assert self._producer.flush(LIMIT_S) == 0

    def learn(self) -> None:
        self._producer = kafka.Producer(self._shared)

    def published(self, isolation: str = "read_committed") -> list[bytes]:
        """What stands in the target, to its end."""
        consumer = kafka.Consumer(
            {**self._shared, "group.id": "tests", "enable.partition.eof": True, "isolation.level": isolation}
        )
        consumer.assign([kafka.TopicPartition(self.due, 0, 0)])
        found = []
        while (message := consumer.poll(LIMIT_S)) is not None and message.error() is None:
            found.append(message.value() or b"")
        consumer.close()
        assert message is not None
        return found


@pytest.fixture
def topics(server: kafka_server.KafkaServer, request: pytest.FixtureRequest, tmp_path: Path) -> Topics:
    return Topics(server, request.node.name.partition("[")[0][-40:], tmp_path)


async def read_all(reader: port.Reader, rows: int) -> tuple[list[port.Read], list[Any]]:
    """What is read, and the lanes that were lost, until there are so many rows."""
    found: list[port.Read] = []
    lost: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < rows:
            portion = await reader.read(100, 0.2)
            lost += portion.lost_lanes
            found = [each for each in found if each.lane not in portion.lost_lanes] + list(portion.read)
    return found, lost


async def test_two_relays_share_partitions_and_commit_none_of_the_others(topics: Topics) -> None:
    for partition in range(3):
        topics.publish(partition, 10)
    async with topics.opened("one") as one:
        first, _ = await read_all(one.source, 30)
        async with topics.opened("two") as two:
            lost: list[Any] = []
            other: list[port.Read] = []
            async with asyncio.timeout(LIMIT_S):
                while not lost or not other:
                    portions = await asyncio.gather(one.source.read(100, 0.2), two.source.read(100, 0.2))
                    lost += portions[0].lost_lanes
                    other += portions[1].read
            theirs = {partition for partition, _ in lost}
            assert {each.ledger_id for each in other} <= theirs
            for partition in range(3):
                of_it = [each for each in first if each.ledger_id == partition]
                await one.source.commit(of_it)
        # What one had read and committed after it was two's was not committed.
        again, _ = await read_all(one.source, 10 * len(theirs))
        assert {(each.ledger_id, each.entry_id) for each in again} == {
            (partition, offset) for partition in theirs for offset in range(10)
        }


async def test_a_reader_that_is_not_asked_for_long_gives_way_to_another(topics: Topics) -> None:
    topics.publish(0, 1)
    async with topics.opened("one") as one:
        await read_all(one.source, 1)
        async with topics.opened("two") as two:
            for partition in range(3):
                topics.publish(partition, 10)
            found: list[port.Read] = []
            async with asyncio.timeout(LIMIT_S):
                while not found:
                    found += (await two.source.read(100, 0.2)).read


async def test_an_added_partition_and_a_cut_one_are_read_from_their_first_offset(topics: Topics) -> None:
    topics.publish(0, 10)
    more = ', properties = { "topic.metadata.refresh.interval.ms" = 1000 }'
    async with topics.opened(broker=more) as opened:
        read, _ = await read_all(opened.source, 10)
        await opened.source.commit(read[:3])
    cut = [kafka.TopicPartition(topics.source, 0, 6)]
    for each in topics.server.admin.delete_records(cut).values():
        each.result()
    async with topics.opened(broker=more) as opened:
        read, _ = await read_all(opened.source, 4)
        assert [each.entry_id for each in read] == [6, 7, 8, 9]
        assert await opened.log.first_entries([0, 1, 7]) == {0: 6, 1: 0}
        topics.server.add_partitions(topics.source, 4)
        topics.learn()
        topics.publish(3, 2)
        read, _ = await read_all(opened.source, 2)
        assert [(each.ledger_id, each.entry_id) for each in read] == [(3, 0), (3, 1)]


async def test_what_is_read_of_a_topic_that_was_made_anew_is_not_handed_on(topics: Topics) -> None:
    topics.publish(0, 5)
    async with topics.opened() as opened:
        await read_all(opened.source, 5)
        topics.server.admin.delete_topics([topics.source])[topics.source].result()
        topics.server.make_topic(topics.source, 3)
        topics.learn()
        topics.publish(0, 50)
        with pytest.raises(port.NotThere):
            await read_all(opened.source, 1)


async def test_far_messages_are_jumped_to_and_near_ones_are_read_on_to(topics: Topics) -> None:
    topics.publish(0, 5_000)
    topics.publish(1, 100)
    async with topics.opened() as opened:
        wanted = [(0, 3), (0, 40), (0, 4_999), (0, 9_000), (1, 0), (1, 99), (7, 0)]
        found = await opened.log.fetch(wanted, await opened.log.generation())
        assert [each and each.body[1] for each in found] == [b"3", b"40", b"4999", None, b"0", b"99", None]


async def test_what_passes_from_a_transaction_to_the_next_is_what_has_not_failed(topics: Topics) -> None:
    def outgoing(target: str, body: bytes) -> port.Outgoing:
        return port.Outgoing(target, port.Message({}, (b"key", body, [("a", b"b")])), {"own": "c"}, "id")

    settings = {"max.message.bytes": "1000"}
    topics.server.make_topic(f"{topics.due}-small", 1, settings)
    async with topics.opened(broker=", transactional = true") as opened:
        asked = [outgoing(topics.due, b"1"), outgoing(f"{topics.due}-small", b"x" * 5_000), outgoing(topics.due, b"2")]
        answers = await opened.output.produce(asked)
        assert [bool(each.refused) for each in answers] == [False, True, False]
        assert await opened.output.produce([outgoing(topics.due, b"3")]) == [port.Produced()]
        assert topics.published() == [b"1", b"2", b"3"]
        async with topics.opened(broker=", transactional = true") as another:
            await another.output.produce([outgoing(topics.due, b"4")])
            with pytest.raises(relay_settings.SettingsError, match=r"relay\.id"):
                await opened.output.produce([outgoing(topics.due, b"5")])
    assert topics.published() == [b"1", b"2", b"3", b"4"]


async def test_a_cluster_is_reached_with_tls_and_a_password(topics: Topics, ca: trustme.CA, tmp_path: Path) -> None:
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    password = tmp_path / "password"
    password.write_text(f"{kafka_server.PASSWORD}\n")
    topics.publish(0, 1)
    shown = (
        f', sasl = "PLAIN", user = "{kafka_server.USER}", password_file = "{password}", ca_file = "{tmp_path}/ca.pem"'
    )
    async with topics.opened(broker=shown, url=topics.server.safe_url) as opened:
        read, _ = await read_all(opened.source, 1)
        assert len(read) == 1
    password.write_text("wrong")
    with pytest.raises(port.Unreachable):
        async with topics.opened(broker=shown, url=topics.server.safe_url):
            pass
