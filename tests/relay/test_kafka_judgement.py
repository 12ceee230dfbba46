"""Tests what can be a name, a position and a message of Kafka, and what the settings of a source mean."""

from __future__ import annotations

import pytest

from tarry_relay import kafka_judgement, port
from tarry_relay.kafka_client import Body
from tarry_relay.port import Grade

GOOD = ("a", "out.orders", "A-b_9", "a" * 249, "...", "a__b", "_a")
NO_TOPICS = ("", ".", "..", "a" * 250, "a" * 5_004, "a b", "a\0b", "a/b", "a*", "a>", "ä", "a\udcffb", "a\n", "é" * 300)


@pytest.mark.parametrize("name", GOOD)
def test_a_name_of_a_topic_can_be_a_target(name: str) -> None:
    assert (kafka_judgement.topic_fault(name), kafka_judgement.target_fault(name)) == ("", "")


@pytest.mark.parametrize("name", NO_TOPICS)
def test_what_no_topic_can_be_named_is_no_target(name: str) -> None:
    fault = kafka_judgement.target_fault(name)
    assert fault
    assert fault == kafka_judgement.topic_fault(name)
    # It goes into a header, which is text.
    assert fault.encode()
    assert len(fault) < 200


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state", "__", "__mine"])
def test_a_topic_of_kafkas_own_can_be_read_and_is_no_target(name: str) -> None:
    assert kafka_judgement.topic_fault(name) == ""
    assert "Kafka keeps for itself" in kafka_judgement.target_fault(name)


def test_a_position_is_a_partition_and_an_offset() -> None:
    for position in ((0, 0), (2**31 - 1, 2**63 - 1), (3, 17)):
        assert kafka_judgement.position_fault(*position) == ""
    for position in ((2**31, 0), (2**32, 0), (-1, 0), (0, -1), (0, 2**63), (2**64 - 1, 2**64 - 1)):
        assert kafka_judgement.position_fault(*position)
    assert kafka_judgement.position_of("3-17") == (3, 17)
    assert kafka_judgement.position_of("2147483647-9223372036854775807") == (2**31 - 1, 2**63 - 1)
    for text in ("", "3", "3-", "-17", "3-017", "03-17", "2147483648-0", "0-9223372036854775808", "3-17\n", "٣-17"):
        with pytest.raises(port.BadPosition, match="is no partition and offset"):
            kafka_judgement.position_of(text)


def test_a_message_is_published_again_if_its_headers_can_be_read_and_it_is_not_too_large() -> None:
    size = Body(b"key", b"value", [("name", b"12"), ("none", None)]).size
    assert size == 18
    assert kafka_judgement.message_fault(size, has_headers=True) == ""
    assert "no UTF-8" in kafka_judgement.message_fault(size, has_headers=False)
    most = kafka_judgement.MESSAGE_BYTES_MAX - port.OWN_HEADERS_BYTES_MAX
    assert kafka_judgement.message_fault(most, has_headers=True) == ""
    assert "500,000,000" in kafka_judgement.message_fault(most + 1, has_headers=True)


SAFE = {"cleanup.policy": "delete", "retention.bytes": "-1", "unclean.leader.election.enable": "false"}


@pytest.mark.parametrize(
    ("changed", "grades"),
    [
        ({}, {}),
        ({"cleanup.policy": "compact"}, {"compaction": Grade.WRONG}),
        ({"cleanup.policy": "compact,delete"}, {"compaction": Grade.WRONG}),
        ({"cleanup.policy": ""}, {}),
        ({"retention.bytes": "0"}, {"size": Grade.WRONG}),
        ({"retention.bytes": "1073741824"}, {"size": Grade.WRONG}),
        ({"retention.bytes": ""}, {"size": Grade.WARNING}),
        ({"retention.bytes": "much"}, {"size": Grade.WARNING}),
        ({"unclean.leader.election.enable": "true"}, {"elections": Grade.WARNING}),
        ({"unclean.leader.election.enable": ""}, {"elections": Grade.WARNING}),
    ],
)
def test_what_the_settings_of_a_source_mean(changed: dict[str, str], grades: dict[str, Grade]) -> None:
    found = kafka_judgement.findings_of_source("orders", SAFE | changed)
    assert {each.name: each.grade for each in found} == {
        "compaction": Grade.OK,
        "size": Grade.OK,
        "elections": Grade.OK,
    } | grades
    for each in found:
        assert each.text.startswith("topic orders: ")
        assert "\n" not in each.text
        assert each.grade is Grade.OK or "; " in each.text


def test_delays_count_from_the_clock_that_the_topic_says() -> None:
    told = {"message.timestamp.type": "LogAppendTime"}
    assert kafka_judgement.finding_of_clock("orders", told).text.endswith("the time that the broker has given")
    clock = kafka_judgement.finding_of_clock("orders", {})
    assert (clock.name, clock.grade) == ("clock", Grade.OK)


def test_a_topic_keeps_messages_for_as_long_as_it_says() -> None:
    kept = {"604800000": 604_800_000, "0": 0, "-1": None, "": None, "x": None}
    assert {text: kafka_judgement.kept_ms({"retention.ms": text}) for text in kept} == kept


def test_a_retry_log_that_another_relay_reads_is_wrong() -> None:
    def judged(**committed: set[str]) -> str:
        found = kafka_judgement.finding_of_retry_readers("failed", committed, "ours", "orders")
        assert found is None or (found.name, found.grade) == ("retry", Grade.WRONG)
        return found.text if found else ""

    orders, payments = kafka_judgement.retry_reader("orders"), kafka_judgement.retry_reader("payments")
    assert judged() == judged(ours={""}, theirs={"", "something else"}) == judged(ours={orders, ""}) == ""
    assert "a relay with topic payments reads it, too, by its group ours," in judged(ours={orders, payments})
    assert "a relay with topic orders reads it, too, by its group theirs," in judged(ours={orders}, theirs={orders})
