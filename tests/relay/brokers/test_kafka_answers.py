"""Tests that a real Kafka gives the answers of the table, and that they mean what the table says.

These cannot be provoked here, and are held to the table alone:

- NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND: the client repeats them until the message times out, and Kafka
  4 asks no more replicas of a partition than it has.
- LEADER_NOT_AVAILABLE, NOT_LEADER_FOR_PARTITION and other signs of an election, NETWORK_EXCEPTION, REQUEST_TIMED_OUT,
  KAFKA_STORAGE_ERROR: the client repeats them, too, and gives _MSG_TIMED_OUT.
- THROTTLING_QUOTA_EXCEEDED: a publish beyond its quota is delayed, not refused.
- POLICY_VIOLATION: only services that run Kafka for others have a policy for records.
- INVALID_MSG, UNSUPPORTED_FOR_MESSAGE_FORMAT: brokers before 4 only.
- INCONSISTENT_TOPIC_ID, _INVALID_DIFFERENT_RECORD, OUT_OF_ORDER_SEQUENCE_NUMBER, _PURGE_INFLIGHT and their like: races
  inside of the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from confluent_kafka import KafkaError

from tarry_relay import kafka_answers, kafka_judgement, port
from tarry_relay.port import Cause, Meaning, Meant
from tests.brokers import kafka_server
from tests.relay.brokers._support.kafka_topics import LIMIT_S, Topics, outgoing, safe, server_of

BOTH = pytest.mark.parametrize("more", ["", ", transactional = true"], ids=["one by one", "transactions"])
REFUSED, UNKNOWN = Meant(Meaning.REFUSED), Meant(Meaning.UNKNOWN)
NOT_NOW, LIMIT, MISSING = (Meant(Meaning.NOT_NOW, cause) for cause in (Cause.OTHER, Cause.LIMIT, Cause.MISSING))


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
    kind = "t" if "transactions" in request.node.name else "o"
    return Topics(server, f"{kind}-{request.node.name.partition('[')[0][-40:]}", tmp_path)


def told(answers: list[port.Produced]) -> list[tuple[Meant, str]]:
    return [(each.meant, each.code) for each in answers]


TAKEN = (Meant(Meaning.TAKEN), "")


@pytest.mark.long
@BOTH
async def test_what_a_message_or_its_target_is_refused_for_keeps_no_other(topics: Topics, more: str) -> None:
    small = topics.make("small", {"max.message.bytes": "1000"})
    segment = topics.make("segment", {"segment.bytes": "1048576", "max.message.bytes": "5000000"})
    compact = topics.make("compact", {"cleanup.policy": "compact"})
    # With a bound of 0 Kafka cannot even end a transaction, since the record of its end is too old by then.
    late = topics.make("late", {} if more else {"message.timestamp.before.max.ms": "0"})
    denied = topics.make("denied")
    missing = f"{topics.due}-missing"
    expected = [
        (outgoing(topics.due, b"1"), TAKEN),
        (outgoing(small, b"x" * 5_000), (REFUSED, "MSG_SIZE_TOO_LARGE")),
        (outgoing(small, b"2"), TAKEN),
        (outgoing(segment, b"x" * 2_000_000), (REFUSED, "RECORD_LIST_TOO_LARGE")),
        (outgoing(compact, b"3"), TAKEN),
        (outgoing(compact, b"4", key=None), (REFUSED, "INVALID_RECORD")),
        (outgoing(compact, b"5"), TAKEN),
        (outgoing(missing, b"6"), (MISSING, "UNKNOWN_TOPIC_OR_PART")),
        (outgoing(denied, b"7"), (LIMIT, "TOPIC_AUTHORIZATION_FAILED")),
        # It waits here, so that it is older than the topic takes.
        (outgoing(late, b"8"), TAKEN if more else (NOT_NOW, "INVALID_TIMESTAMP")),
        (outgoing("__consumer_offsets", b"9"), (REFUSED, "TOPIC_EXCEPTION")),
        (outgoing("a\0b", b"10"), (REFUSED, "TOPIC_EXCEPTION")),
        (outgoing("a" * 5_004, b"11"), (REFUSED, "TOPIC_EXCEPTION")),
        (outgoing(topics.due, b"12"), TAKEN),
    ]
    settings = f'{safe(topics.server.directory)}, timeout_s = 3, properties = {{ "linger.ms" = 50 }}{more}'
    with topics.denied("TOPIC", denied, "WRITE"):
        async with topics.opened(broker=settings, url=topics.server.safe_url) as opened:
            answers = await opened.output.produce([message for message, _ in expected])
    assert told(list(answers)) == [answer for _, answer in expected]
    for (message, _), answer in zip(expected, answers, strict=True):
        assert answer.is_taken or answer.text.startswith(f"{message.target}: ")
    found = {topic: topics.published(topic=topic) for topic in (topics.due, small, segment, compact, late, denied)}
    in_time = [b"8"] if more else []
    assert found == {
        topics.due: [b"1", b"12"],
        small: [b"2"],
        segment: [],
        compact: [b"3", b"5"],
        late: in_time,
        denied: [],
    }


@pytest.mark.long
@BOTH
async def test_names_that_the_judgement_refuses_are_refused_by_kafka_or_its_client(
    topics: Topics, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a b", "a" * 250, "..", "a*", "a" * 513, "a\0b"]
    assert all(kafka_judgement.target_fault(each) for each in names)
    monkeypatch.setattr(kafka_judgement, "target_fault", lambda name: "")
    async with topics.opened(broker=more) as opened:
        answers = await opened.output.produce([outgoing(each, b"1") for each in (topics.due, *names, topics.due)])
    bad = (REFUSED, "TOPIC_EXCEPTION")
    expected = [TAKEN, bad, bad, bad, bad, (REFUSED, "_INVALID_ARG"), (UNKNOWN, "ValueError"), TAKEN]
    assert told(list(answers)) == expected
    assert topics.published() == [b"1", b"1"]


@pytest.mark.long
@BOTH
async def test_a_user_that_may_publish_nothing_is_told_so_for_each_message(topics: Topics, more: str) -> None:
    settings = f"{safe(topics.server.directory)}, timeout_s = 3{more}"
    with (
        topics.denied("TOPIC", "*", "WRITE"),
        topics.denied("BROKER", "kafka-cluster", "IDEMPOTENT_WRITE"),
        topics.denied("TRANSACTIONAL_ID", f"relay-{topics.source}-one", "WRITE"),
    ):
        async with topics.opened(broker=settings, url=topics.server.safe_url) as opened:
            answers = await opened.output.produce([outgoing(topics.due, b"1"), outgoing(topics.due, b"2")])
            assert {each.meant for each in answers} == {LIMIT}
            code = "TRANSACTIONAL_ID_AUTHORIZATION_FAILED" if more else "TOPIC_AUTHORIZATION_FAILED"
            assert {each.code for each in answers} <= {code, "CLUSTER_AUTHORIZATION_FAILED"}
    async with topics.opened(broker=settings, url=topics.server.safe_url) as opened:
        assert told(list(await opened.output.produce([outgoing(topics.due, b"3")]))) == [TAKEN]
    assert topics.published() == [b"3"]


@pytest.mark.long
async def test_a_message_that_a_silent_broker_does_not_confirm_may_have_landed(topics: Topics) -> None:
    async with topics.opened(broker=", confirm_s = 1, timeout_s = 1") as opened:
        assert told(list(await opened.output.produce([outgoing(topics.due, b"1")]))) == [TAKEN]
        topics.server.stop()
        try:
            (answer,) = await opened.output.produce([outgoing(topics.due, b"2")])
        finally:
            topics.server.resume()
        assert told([answer]) == [(UNKNOWN, "_MSG_TIMED_OUT")]
        async with asyncio.timeout(LIMIT_S):
            while not (await opened.output.produce([outgoing(topics.due, b"3")]))[0].is_taken:
                pass
    assert topics.published()[0] == b"1"
    assert b"3" in topics.published()


def test_the_table_says_what_is_known_and_the_rest_is_unknown() -> None:
    by_meaning: dict[Meant, set[str]] = {}
    for code, meant in kafka_answers.MEANT.items():
        by_meaning.setdefault(meant, set()).add(KafkaError(code).name())
    assert by_meaning[REFUSED] == {
        "MSG_SIZE_TOO_LARGE",
        "RECORD_LIST_TOO_LARGE",
        "INVALID_RECORD",
        "TOPIC_EXCEPTION",
        "_INVALID_ARG",
    }
    assert by_meaning[MISSING] == {"UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "_UNKNOWN_TOPIC"}
    assert by_meaning[LIMIT] == {
        "TOPIC_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        "THROTTLING_QUOTA_EXCEEDED",
    }
    assert {"NOT_ENOUGH_REPLICAS", "NOT_LEADER_FOR_PARTITION", "_QUEUE_FULL", "POLICY_VIOLATION"} <= by_meaning[NOT_NOW]
    assert {"_MSG_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "KAFKA_STORAGE_ERROR"} <= by_meaning[UNKNOWN]
    assert set(by_meaning) == {REFUSED, MISSING, LIMIT, NOT_NOW, UNKNOWN}
    assert kafka_answers.meant(12_345) == UNKNOWN
    assert kafka_answers.produced("due", KafkaError(KafkaError.DUPLICATE_RESOURCE)).meant == UNKNOWN


def test_what_a_batch_is_refused_for_says_that_nothing_of_it_is_there() -> None:
    for code in kafka_answers.OF_A_BATCH:
        assert kafka_answers.meant(code).meaning in (Meaning.REFUSED, Meaning.NOT_NOW)
