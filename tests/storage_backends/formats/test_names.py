from __future__ import annotations

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import format_errors, names

numbers = st.integers(0, names.NUMBER_MAX)
TOPIC_ID = names.topic_id("orders")


def test_the_layout_is_the_documented_one() -> None:
    folder = f"shards/03/topics/{TOPIC_ID}/"
    number = "00000000000000000012"
    assert names.FORMAT_KEY == "FORMAT"
    assert names.daemon_key("d1") == "daemons/d1"
    assert names.shard_manifest_key(3, 12) == f"shards/03/manifest/{number}"
    assert names.log_slot_key("01J", 12) == f"logs/01J/{number}"
    assert names.checkpoint_key(3, 12, "01J") == f"shards/03/checkpoint/{number}-01J"
    assert names.topic_manifest_key(3, TOPIC_ID, 12) == f"{folder}manifest/{number}"
    assert names.bucket_key(3, TOPIC_ID, 12, "01J") == f"{folder}buckets/{number}-01J"
    assert names.progress_key(3, TOPIC_ID, 12, "01J") == f"{folder}progress/{number}-01J"
    assert names.properties_key(3, TOPIC_ID, 12, "01J") == f"{folder}properties/{number}-01J"
    assert names.topics_prefix(117) == "shards/117/topics/"
    assert names.dead_objects_prefix() == "dead_objects/"
    assert names.dead_object_key(f"{folder}buckets/{number}-01J") == f"dead_objects/{folder}buckets/{number}-01J"

    assert names.PROBE_PASS_KEY == "probe/passed"
    assert names.probe_prefix("01J") == "probe/01J"


@given(numbers, numbers)
def test_keys_sort_as_their_numbers(one: int, other: int) -> None:
    keys = names.log_slot_key("01J", one), names.log_slot_key("01J", other)
    assert (keys[0] < keys[1]) == (one < other)


@given(numbers)
def test_the_number_comes_back_from_every_key(number: int) -> None:
    assert names.number_of(names.log_slot_key("01J", number)) == number
    assert names.number_of(names.bucket_key(3, TOPIC_ID, number, "01JD0000000000000000000000")) == number


@pytest.mark.parametrize("key", ["", "a/b", "a/1", "a/" + "1" * 21, "a/" + "1" * 20 + "-", "a/" + "1" * 20 + "/"])
def test_a_key_without_a_number_is_refused(key: str) -> None:
    with pytest.raises(format_errors.FormatError, match="not a number of 20 digits"):
        names.number_of(key)


@given(st.text(st.characters(codec="utf-8")))
def test_a_topic_id_is_32_characters_that_every_store_takes(topic: str) -> None:
    topic_id = names.topic_id(topic)
    assert len(topic_id) == 32
    assert set(topic_id) <= set("abcdefghijklmnopqrstuvwxyz234567")
    assert names.topic_id_of(names.bucket_key(0, topic_id, 1, "01J")) == topic_id


@pytest.mark.parametrize("key", ["FORMAT", "shards/00/manifest/1", "shards/00/topics/short/manifest/1"])
def test_a_key_of_no_topic_is_refused(key: str) -> None:
    with pytest.raises(format_errors.FormatError, match="topic-id"):
        names.topic_id_of(key)


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 100))
def test_the_shard_of_a_topic_is_its_crc32c_modulo_the_shards(topic: str, shards: int) -> None:
    assert names.shard_of(topic, shards) == google_crc32c.value(topic.encode()) % shards


def test_shard_and_id_of_a_topic_never_change() -> None:
    """CRC32C of the check string 123456789 is 0xE3069283 (RFC 3720)."""
    assert names.shard_of("123456789", 1 << 32) == 0xE3069283
    assert names.topic_id("orders") == "dqlivwya2ieoil4tgfcst4p2tqccp23d"
