"""Plain messages are written and read as the generated code does."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import message
from hypothesis import given
from hypothesis import strategies as st

from tarry import packed_fields
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2

U64 = st.integers(0, (1 << 64) - 1)
KNOWN = packed_fields.tag_bytes(dispatch_pb2.Messages)
FIELDS = frozenset(tag[0] for tag in KNOWN.values())


@pytest.mark.parametrize(
    ("message_type", "name", "tag"),
    [
        (dispatch_pb2.Open, "topic", 0x0A),
        (dispatch_pb2.Open, "type", 0x18),
        (dispatch_pb2.Open, "consumers", 0x42),
        (dispatch_pb2.LaneRequest, "close", 0x18),
        (dispatch_pb2.Messages, "epoch", 0x08),
        (dispatch_pb2.Messages, "ledger_id", 0x12),
        (delayed_delivery_pb2.AddMessagesRequest, "delay_level", 0x4A),
        (inspect_pb2.ListBacklogResponse, "state", 0x2A),
    ],
)
def test_tags_are_those_of_the_descriptor(message_type: type[message.Message], name: str, tag: int) -> None:
    assert packed_fields.tag_bytes(message_type)[name] == bytes((tag,))
    assert packed_fields.tags(message_type, name) == (tag,)


def test_a_field_that_does_not_exist_has_no_tag() -> None:
    with pytest.raises(KeyError):
        packed_fields.tags(dispatch_pb2.Messages, "entry")


@given(number=st.integers(1, (1 << 64) - 1))
def test_a_number_is_written_and_read_as_the_generated_code_does(number: int) -> None:
    written = dispatch_pb2.Messages(epoch=number).SerializeToString()
    assert KNOWN["epoch"] + packed_fields.varint(number) == written
    assert packed_fields.varint_at(written, 1) == (number, len(written))


@pytest.mark.parametrize("written", [b"\xff" * 9 + b"\x02", b"\x80" * 10 + b"\x01"])
def test_a_number_of_more_than_64_bits_is_not_plain(written: bytes) -> None:
    with pytest.raises(packed_fields.NotPlainError):
        packed_fields.varint_at(written, 0)


@given(ledger_id=st.lists(U64, max_size=40), key_hash=st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_columns_and_what_holds_them_are_the_message_that_the_generated_code_makes(
    ledger_id: list[int], key_hash: list[int]
) -> None:
    pieces: list[packed_fields.Piece] = []
    packed_fields.pack(pieces, KNOWN["ledger_id"], np.array(ledger_id, ">u8"), "<u8")
    packed_fields.pack(pieces, KNOWN["key_hash"], np.array(key_hash * 2, np.uint32)[::2], "<u4")
    (of_messages,) = packed_fields.tags(dispatch_pb2.SubscribeResponse, "messages")
    expected = dispatch_pb2.Messages(ledger_id=ledger_id, key_hash=(key_hash * 2)[::2])
    encoded = packed_fields.nested(bytes((of_messages,)), b"".join(pieces))
    assert dispatch_pb2.SubscribeResponse.FromString(encoded) == dispatch_pb2.SubscribeResponse(messages=expected)


@given(epoch=U64, entry_id=st.lists(U64, max_size=40), splice=st.binary(max_size=4), place=st.integers(0, 400))
def test_fields_are_where_the_generated_code_reads_them(
    epoch: int, entry_id: list[int], splice: bytes, place: int
) -> None:
    plain = dispatch_pb2.Messages(epoch=epoch, entry_id=entry_id).SerializeToString()
    data = plain[:place] + splice + plain[place:]
    try:
        fields = packed_fields.scan(data, 0, len(data), FIELDS)
    except (packed_fields.NotPlainError, IndexError):
        assert splice, "a plain message is left to the generated code"
        return
    try:
        read = dispatch_pb2.Messages.FromString(data)
    except message.DecodeError:
        # A column of half a number, which the reader of the column refuses.
        return
    start, size = fields.get(KNOWN["entry_id"][0], (0, 0))
    assert np.frombuffer(data, "<u8", size >> 3, start).tolist() == list(read.entry_id)
    assert fields.get(KNOWN["epoch"][0], (0, 0))[1] == read.epoch


def test_each_message_of_several_is_found_and_anything_else_is_not_plain() -> None:
    one = dispatch_pb2.LaneResponse(lane=300)
    several = dispatch_pb2.SubscribeManyResponse(responses=[one] * 2).SerializeToString()
    (responses,) = packed_fields.tags(dispatch_pb2.SubscribeManyResponse, "responses")
    (lane,) = packed_fields.tags(dispatch_pb2.LaneResponse, "lane")
    found = packed_fields.scan_each(several, responses, frozenset((lane,)))
    assert [fields[lane][1] for fields in found] == [300, 300]
    for data in (several + b"\x10\x01", several[:-1], several + several[:3]):
        with pytest.raises((packed_fields.NotPlainError, IndexError)):
            packed_fields.scan_each(data, responses, frozenset((lane,)))
