"""Tests what a relay meets in a real Kafka.

Partitions that change hands, transactions, a log that is cut, added to or made anew, TLS and SASL, a broker that is
silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as kafka
import pytest
import trustme

from tarry_relay import kafka_broker, kafka_client, port
from tarry_relay.port import Grade
from tests.brokers import kafka_server
from tests.relay.brokers._support.kafka_topics import LIMIT_S, Topics, outgoing, read_all, safe, server_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kafka_server.KafkaServer]:
    """One for all tests here: each has topics of its own."""
    if (jars := kafka_server.find()) is None:
        pytest.skip(kafka_server.MISSING)
    with server_of(jars, tmp_path_factory.mktemp("kafka"), trustme.CA()) as made:
        made.start()
        made.wait_until_loaded()
        yield made


@pytest.fixture
def topics(server: kafka_server.KafkaServer, request: pytest.FixtureRequest, tmp_path: Path) -> Topics:
    return Topics(server, request.node.name.partition("[")[0][-40:], tmp_path)


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
        # A commit of a partition that was two's by then did nothing.
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
        topics.server.delete_topic(topics.source)
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


async def test_an_id_is_taken_by_the_session_that_was_opened_last(topics: Topics) -> None:
    transactional = ", transactional = true"
    async with topics.opened(broker=transactional) as one:
        assert await one.output.produce([outgoing(topics.due, b"1")]) == [port.Produced()]
        async with topics.opened(broker=transactional) as two:
            assert await two.output.produce([outgoing(topics.due, b"2")]) == [port.Produced()]
            with pytest.raises(port.SessionOver, match=r"another relay publishes with relay\.id 'one'"):
                await one.output.produce([outgoing(topics.due, b"3")])
            async with topics.opened(broker=transactional) as again:
                assert await again.output.produce([outgoing(topics.due, b"4")]) == [port.Produced()]
            with pytest.raises(port.SessionOver):
                await two.output.produce([outgoing(topics.due, b"5")])
    assert topics.published() == [b"1", b"2", b"4"]


async def test_a_relay_that_was_suspended_in_a_transaction_needs_a_new_session(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ", transactional = true, confirm_s = 1"
    send = kafka_client.KafkaOutput._send

    def suspended(self: kafka_client.KafkaOutput, producer: Any, messages: Any) -> Any:
        came = send(self, producer, messages)
        topics.wait_until_nothing_is_open()
        return came

    async with topics.opened(broker=settings) as opened:
        await opened.output.produce([outgoing(topics.due, b"1")])
        with monkeypatch.context() as patch:
            patch.setattr(kafka_client.KafkaOutput, "_send", suspended)
            with pytest.raises(port.SessionOver, match=r"suspended for longer than broker\.confirm_s"):
                await opened.output.produce([outgoing(topics.due, b"2")])
    async with topics.opened(broker=settings) as opened:
        assert await opened.output.produce([outgoing(topics.due, b"2")]) == [port.Produced()]
    assert topics.published() == [b"1", b"2"]
    assert topics.published("read_uncommitted") == [b"1", b"2", b"2"]


async def test_a_cluster_is_reached_with_tls_and_a_password_that_a_new_session_reads_again(
    topics: Topics, tmp_path: Path
) -> None:
    server = topics.server
    password = tmp_path / "password"
    password.write_text("wrong")
    shown = safe(server.directory, password)
    with pytest.raises(port.Unreachable, match=r"_AUTHENTICATION: .*Invalid username or password"):
        async with topics.opened(broker=f"{shown}, timeout_s = 2", url=server.safe_url):
            pass
    password.write_text(f"{kafka_server.PASSWORD}\n")
    topics.publish(0, 1)
    try:
        async with topics.opened(broker=shown, url=server.safe_url) as opened:
            assert len((await read_all(opened.source, 1))[0]) == 1
            server.kill()
            server.set_password("another")
            server.start()
            with pytest.raises(port.SessionOver, match=r"_AUTHENTICATION: .*Invalid username or password"):
                await until_it_answers(opened)
            with pytest.raises(port.SessionOver):
                await opened.output.produce([outgoing(topics.due, b"1")])
        password.write_text("another")
        async with topics.opened(broker=shown, url=server.safe_url) as opened:
            await opened.must_answer()
    finally:
        server.kill()
        server.set_password(kafka_server.PASSWORD)
        server.start()
        server.wait_until_loaded()


async def until_it_answers(opened: port.Broker) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await opened.source.read(1, 0.2)
                return await opened.must_answer()
            except port.Unreachable:
                pass


async def test_a_silent_broker_is_told_in_time_and_holds_up_no_end(topics: Topics) -> None:
    topics.publish(0, 2)
    async with topics.opened(broker=", timeout_s = 2, session_s = 300, confirm_s = 300") as opened:
        (first, second), _ = await read_all(opened.source, 2)
        await opened.must_answer()
        topics.server.stop()
        try:
            await must_not_answer(opened)
            # Nothing else waits for a commit that a silent broker does not answer.
            commit = asyncio.create_task(opened.source.commit([first]))
            produce = asyncio.create_task(opened.output.produce([outgoing(topics.due, b"1")]))
            await must_not_answer(opened)
        finally:
            topics.server.resume()
        await until_it_answers(opened)
        await produce
        await commit
        topics.server.stop()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(opened.source.commit([second]))]
        tasks.append(asyncio.create_task(opened.output.produce([outgoing(topics.due, b"2")])))
        await must_not_answer(opened)
        begun_s = time.monotonic()
    try:
        # The client library itself would wait for `confirm_s`, and for the commit without end.
        assert time.monotonic() - begun_s < 60
        for each in tasks:
            each.cancel()
    finally:
        topics.server.resume()


async def must_not_answer(opened: port.Broker) -> None:
    begun_s = time.monotonic()
    with pytest.raises(port.Unreachable):
        await opened.must_answer()
    assert time.monotonic() - begun_s < 60


async def test_topics_that_do_not_exist_keep_no_session_from_being_opened(topics: Topics) -> None:
    retry = f"{topics.source}-failed"
    more = f'[retry]\nname = "{retry}"'
    topics.server.delete_topic(topics.source)
    async with topics.opened(more=more) as opened:
        found = [each async for each in opened.findings()]
        assert [(each.name, each.grade) for each in found] == [
            ("source", Grade.MISSING),
            ("retry", Grade.MISSING),
            ("target", Grade.OK),
        ]
        for call in (opened.must_answer, opened.source_findings, opened.log.generation):
            with pytest.raises(port.NotThere):
                await answered(call)
        for reader in (opened.source, opened.retries):
            assert reader is not None
            with pytest.raises(port.NotThere):
                await read_all(reader, 1)
        topics.server.make_topic(topics.source)
        topics.server.make_topic(retry)
        topics.learn()
        topics.publish(0, 1)
        with pytest.raises(port.NotThere):
            await read_all(opened.source, 1)
    async with topics.opened(more=more) as opened:
        assert len((await read_all(opened.source, 1))[0]) == 1
        await opened.must_answer()


async def answered(call: Callable[[], Awaitable[object]]) -> object:
    """Ask until Kafka answers: it may not know yet who coordinates its first group."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(port.Unreachable):
                return await call()


async def test_a_topic_that_is_deleted_while_it_is_read_does_not_answer(topics: Topics) -> None:
    topics.publish(0, 1)
    async with topics.opened(broker=', properties = { "topic.metadata.refresh.interval.ms" = 500 }') as opened:
        await read_all(opened.source, 1)
        topics.server.delete_topic(topics.source)
        with pytest.raises(port.NotThere):
            await ask_on(opened)


async def ask_on(opened: port.Broker) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            await opened.must_answer()


async def test_a_source_is_judged_by_its_settings_and_again_each_time(topics: Topics) -> None:
    async with topics.opened() as opened:
        found = [each async for each in opened.findings()]
        names = ["source", "compaction", "size", "elections", "clock", "target"]
        assert [each.name for each in found] == names
        assert {each.grade for each in found} == {Grade.OK}
        assert list(await opened.source_findings()) == found[1:4]
    wrong = {"cleanup.policy": "compact,delete", "retention.bytes": "1000", "unclean.leader.election.enable": "true"}
    topics.source = topics.make("wrong", wrong)
    async with topics.opened() as opened:
        found = [each async for each in opened.findings()]
        assert [each.name for each in found] == names
        assert [each.grade for each in found[1:4]] == [Grade.WRONG, Grade.WRONG, Grade.WARNING]
        assert list(await opened.source_findings()) == found[1:4]
    topics.source, topics.due = "a b", "__due"
    async with topics.opened() as opened:
        found = [each async for each in opened.findings()]
        assert [(each.name, each.grade) for each in found] == [("source", Grade.WRONG), ("target", Grade.WRONG)]


async def test_what_kafka_does_not_tell_is_a_warning(topics: Topics) -> None:
    async with topics.opened(broker=safe(topics.server.directory), url=topics.server.safe_url) as opened:
        assert await opened.log.kept_ms() == 7 * 86_400_000
        assert opened.log.tells_limits
        with topics.denied("TOPIC", topics.source, "DESCRIBE_CONFIGS"), topics.denied("TOPIC", topics.due, "DESCRIBE"):
            async with asyncio.timeout(LIMIT_S):
                while (await opened.log.kept_ms()) is not None:
                    pass
            assert not opened.log.tells_limits
            found = [each async for each in opened.findings()]
            assert [(each.name, each.grade) for each in found] == [
                ("source", Grade.OK),
                ("settings", Grade.WARNING),
                ("target", Grade.WARNING),
            ]
            assert list(await opened.source_findings()) == found[1:2]


async def test_a_group_that_may_not_read_is_told_with_the_reason(topics: Topics) -> None:
    async with topics.opened(
        broker=f"{safe(topics.server.directory)}, timeout_s = 2", url=topics.server.safe_url
    ) as opened:
        group = f"relay-{topics.source}@{await opened.log.generation()}"
        with topics.denied("GROUP", group, "READ"):
            with pytest.raises(port.Unreachable, match="GROUP_AUTHORIZATION_FAILED"):
                await read_all(opened.source, 1)
            with pytest.raises(port.Unreachable, match="GROUP_AUTHORIZATION_FAILED"):
                await opened.must_answer()
        topics.publish(0, 1)
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await read_all(opened.source, 1)
                    break
                except port.Unreachable:
                    pass
        await opened.must_answer()


async def test_a_retry_log_of_two_relays_is_found_before_anything_has_failed(topics: Topics) -> None:
    async def wrong(opened: kafka_broker.KafkaBroker) -> list[str]:
        return [each.text async for each in opened.findings() if each.name == "retry" and each.grade is Grade.WRONG]

    for row, other in enumerate(('topic = "payments"', 'topic = "orders", subscription = "second"')):
        more = f'[retry]\nname = "{topics.make(f"failed-{row}")}"'
        async with topics.opened(more=more) as one, topics.opened("two", more=more, relay=other) as two:
            assert one.retries is not None
            assert await wrong(one) == await wrong(two) == []
            async with asyncio.timeout(LIMIT_S):
                while not (found := await wrong(two)):
                    await one.retries.read(1, 0.1)
                    assert await wrong(one) == []
            assert "a relay with topic orders reads it, too" in found[0]


async def test_a_relay_finds_another_that_commits_to_its_retry_log(topics: Topics) -> None:
    retry = topics.make("failed")
    more = f'[retry]\nname = "{retry}"'
    topics.publish(0, 1, retry)
    async with topics.opened("two", more=more, relay='topic = "payments"') as two:
        assert two.retries is not None
        read, _ = await read_all(two.retries, 1)
        await two.retries.commit(read)
    async with topics.opened(more=more) as one:
        (found,) = [each async for each in one.findings() if each.grade is Grade.WRONG]
        assert (found.name, "a relay with topic payments" in found.text) == ("retry", True)
    # What it says to do if that relay is gone.
    group = found.text.rpartition(" ")[2]
    kept = [kafka.TopicPartition(retry, 0, 1)]
    asked = [kafka.ConsumerGroupTopicPartitions(group, kept)]
    for each in topics.server.admin.alter_consumer_group_offsets(asked).values():
        each.result()
    async with topics.opened(more=more) as one:
        assert {each.grade async for each in one.findings()} == {Grade.OK}
        assert one.retries is not None
        assert await one.retries.passed([(0, 0)]) == [True]
