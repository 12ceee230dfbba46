"""Encodes and decodes columns without a Python object for each row.

It covers the requests with many rows: adds, acknowledgements, negative ones, leases, `contains`. A packed column of
fixed-width numbers is its little-endian memory, so `tobytes` replaces a loop over rows (measured: 2 us instead of 95 us
for 1,000 rows of 3 columns). The generated code in `tarry.v1` is the contract against which this is tested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from google.rpc import status_pb2
from numpy.typing import NDArray

from tarry import columns, errors
from tarry.v1 import dispatch_pb2

_LENGTH_DELIMITED = 2
_VARINT = 0

# Tags of `SubscribeResponse.messages` and of the fields of `Messages`
_MESSAGES_TAG = 2 << 3 | _LENGTH_DELIMITED
_EPOCH_TAG = 1 << 3 | _VARINT
_POSITION_TAGS = tuple(number << 3 | _LENGTH_DELIMITED for number in (2, 3, 4))
# Key hash, redelivery count, batch index, consumer
_OTHER_TAGS = tuple(number << 3 | _LENGTH_DELIMITED for number in (5, 6, 7, 8))
_MESSAGES_COLUMNS = dict.fromkeys(_POSITION_TAGS, np.dtype("<u8")) | dict.fromkeys(_OTHER_TAGS, np.dtype("<u4"))
# Tags of `SubscribeManyResponse.responses` and of the fields of `LaneResponse`
_RESPONSES_TAG = 1 << 3 | _LENGTH_DELIMITED
_LANE_TAG = 1 << 3 | _VARINT
_RESPONSE_TAG = 2 << 3 | _LENGTH_DELIMITED
_NO_ROWS = np.empty(0, dtype=np.uint64)

U64Column = NDArray[np.uint64]
U32Column = NDArray[np.uint32]
I32Column = NDArray[np.int32]
_Piece: TypeAlias = bytes | memoryview
"""A part of a message; parts are joined once, so that columns are copied once."""


def utf8(name: str, text: str) -> bytes:
    """Encode text. Raises InvalidArgument if it has no UTF-8 form."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise errors.InvalidArgument(f"{name} is {text!r}; it must be UTF-8 text") from None


def encode_add(
    topic: bytes, rows: columns.AddColumns, already_due: int, subscription: bytes = b"", on_invalid: int = 0
) -> bytes:
    """Return the bytes of an `AddMessagesRequest`.

    Both names are UTF-8; `already_due` and `on_invalid` are numbers of the enums.
    """
    pieces = [*_field(1, topic), *_column(2, rows.ledger_id), *_column(3, rows.entry_id)]
    if rows.deliver_at_ms is not None:
        pieces += _column(4, rows.deliver_at_ms)
    if rows.delay_ms is not None:
        pieces += _column(5, rows.delay_ms)
    if rows.key_hash is not None:
        pieces += _column(6, rows.key_hash)
    if already_due:
        pieces.append(_number(7, already_due))
    if subscription:
        pieces += _field(8, subscription)
    if rows.delay_level is not None:
        pieces += _signed_column(9, rows.delay_level)
    if on_invalid:
        pieces.append(_number(10, on_invalid))
    return b"".join(pieces)


def encode_cancel(topic: bytes, subscription: bytes, rows: columns.EntryColumns) -> bytes:
    """Return the bytes of a `CancelMessagesRequest`; both names are UTF-8, `subscription` empty for every index."""
    pieces = [*_field(1, topic), *_column(2, rows.ledger_id), *_column(3, rows.entry_id)]
    if subscription:
        pieces += _field(4, subscription)
    return b"".join(pieces)


def encode_reschedule(topic: bytes, subscription: bytes, rows: columns.AddColumns) -> bytes:
    """Return the bytes of a `RescheduleMessagesRequest`; names as in `encode_cancel`."""
    # Columns have the same field numbers as in an add.
    pieces: list[_Piece] = [encode_add(topic, rows, 0)]
    if subscription:
        pieces += _field(7, subscription)
    return b"".join(pieces)


def encode_stream_add(request_id: int, add: bytes) -> bytes:
    """Return the bytes of a `StreamAddMessagesRequest`; `add` comes from `encode_add`."""
    return b"".join((_number(1, request_id), *_field(2, add)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OpenConsumers:
    """The additions to the `Open` of a KEY_SHARED subscription; columns are as long as that of the held positions."""

    consumers: Sequence[dispatch_pb2.Consumer]
    held_consumer_id: U32Column
    held_key_hash: U32Column | None
    """None if no position that Tarry planned is held"""


def encode_open(
    topic: bytes, subscription: bytes, kind: int, held: columns.Positions, by_key: OpenConsumers | None = None
) -> bytes:
    """Return the bytes of a `SubscribeRequest` with an `Open`; both names are UTF-8, `kind` is the enum's number."""
    pieces = [*_field(1, topic), *_field(2, subscription), _number(3, kind)]
    pieces += _positions(4, held)
    if held.redelivery_count is not None:
        pieces += _column(11, held.redelivery_count)
    if by_key is not None:
        for consumer in by_key.consumers:
            pieces += _field(8, consumer.SerializeToString())
        pieces += _column(9, by_key.held_consumer_id)
        if by_key.held_key_hash is not None:
            pieces += _column(10, by_key.held_key_hash)
    return _message(1, pieces)


def encode_flow(permits: int, consumer_id: int = 0) -> bytes:
    """Return the bytes of a `SubscribeRequest` with a `Flow`; `consumer_id` is 0 for a SHARED subscription."""
    pieces: list[_Piece] = [_number(1, permits)]
    if consumer_id:
        pieces.append(_number(2, consumer_id))
    return _message(2, pieces)


def encode_acknowledge(request_id: int, positions: columns.Positions) -> bytes:
    """Return the bytes of a `SubscribeRequest` with an `Acknowledge`."""
    return _message(3, [*_request_id(request_id), *_positions(2, positions), *_counts(6, positions)])


def encode_nack(request_id: int, nack: columns.NackColumns) -> bytes:
    """Return the bytes of a `SubscribeRequest` with a `NegativeAcknowledge`."""
    return _message(4, [*_request_id(request_id), *_nack(2, nack)])


def encode_extend(request_id: int, positions: columns.Positions) -> bytes:
    """Return the bytes of a `SubscribeRequest` with an `Extend`."""
    return _message(5, [*_request_id(request_id), *_positions(2, positions)])


def encode_add_consumer(request_id: int, consumer: dispatch_pb2.Consumer) -> bytes:
    """Return the bytes of a `SubscribeRequest` with an `AddConsumer`."""
    return _message(6, [*_request_id(request_id), *_field(2, consumer.SerializeToString())])


def encode_remove_consumer(request_id: int, consumer_id: int) -> bytes:
    """Return the bytes of a `SubscribeRequest` with a `RemoveConsumer`."""
    return _message(7, [*_request_id(request_id), _number(2, consumer_id)])


def encode_plan(request_id: int, plan: columns.PlanColumns) -> bytes:
    """Return the bytes of a `SubscribeRequest` with a `PlanDispatch`."""
    pieces = [*_request_id(request_id), *_column(2, plan.ledger_id), *_column(3, plan.entry_id)]
    if plan.key_hash is not None:
        pieces += _column(4, plan.key_hash)
    return _message(8, pieces)


def encode_mark_delete(request_id: int, position: tuple[int, int]) -> bytes:
    """Return the bytes of a `SubscribeRequest` with a `MarkDelete`."""
    ledger_id, entry_id = position
    numbers = [_number(field, value) for field, value in ((2, ledger_id), (3, entry_id)) if value]
    return _message(9, [*_request_id(request_id), *numbers])


def encode_lane(lane: int, request: bytes) -> bytes:
    """Return the bytes of a `SubscribeManyRequest` with one `SubscribeRequest`; several in a row form one message."""
    return _message(1, [_number(1, lane), *_field(2, request)])


def encode_lane_close(lane: int) -> bytes:
    """Return the bytes of a `SubscribeManyRequest` that closes a lane."""
    return _message(1, [_number(1, lane), _number(3, 1)])


def encode_nack_request(topic: bytes, subscription: bytes, nack: columns.NackColumns) -> bytes:
    """Return the bytes of a `NegativeAcknowledgeRequest`; both names are UTF-8."""
    return b"".join((*_field(1, topic), *_field(2, subscription), *_nack(3, nack)))


def encode_contains(topic: bytes, subscription: bytes, rows: columns.EntryColumns) -> bytes:
    """Return the bytes of a `ContainsMessagesRequest`; both names are UTF-8, `subscription` empty for any."""
    pieces = [*_field(1, topic), *_column(2, rows.ledger_id), *_column(3, rows.entry_id)]
    if rows.last_entry_id is not None:
        pieces += _column(4, rows.last_entry_id)
    if subscription:
        pieces += _field(5, subscription)
    return b"".join(pieces)


def encode_acknowledge_request(topic: bytes, subscription: bytes, positions: columns.Positions) -> bytes:
    """Return the bytes of an `AcknowledgeRequest`; both names are UTF-8."""
    return b"".join((*_field(1, topic), *_field(2, subscription), *_positions(3, positions), *_counts(7, positions)))


def encode_extend_lease(topic: bytes, subscription: bytes, positions: columns.Positions, lease_ms: int) -> bytes:
    """Return the bytes of an `ExtendLeaseRequest`; both names are UTF-8."""
    pieces = [*_field(1, topic), *_field(2, subscription), *_positions(3, positions._replace(batch_index=None))]
    if lease_ms:
        pieces.append(_number(6, lease_ms))
    if positions.batch_index is not None:
        pieces += _column(7, positions.batch_index)
    return b"".join(pieces)


def decode_u64(field: Sequence[int]) -> U64Column:
    """Copy a repeated field of a received message into a new array."""
    return np.array(field, dtype=np.uint64) if field else np.empty(0, dtype=np.uint64)


def decode_u32(field: Sequence[int]) -> U32Column:
    """Copy a repeated field of a received message into a new array."""
    return np.array(field, dtype=np.uint32) if field else np.empty(0, dtype=np.uint32)


def decode_indexes(field: Sequence[int]) -> NDArray[np.int64]:
    """Copy a repeated field of row numbers into a new array."""
    return np.array(field, dtype=np.int64) if field else np.empty(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MessagesColumns:
    """The columns of a `Messages`; the arrays belong to the caller."""

    epoch: int
    ledger_id: U64Column
    entry_id: U64Column
    deliver_at_ms: U64Column
    key_hash: U32Column | None
    """None if no row has a key"""
    redelivery_count: U32Column | None = None
    """None if all are 0"""
    batch_index: U32Column | None = None
    """None if all rows are whole entries"""
    consumer_id: U32Column | None = None
    """With KEY_SHARED, the receiver of each row; otherwise None"""

    def take(self, rows: NDArray[Any]) -> MessagesColumns:
        """Return some of the rows."""
        given = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self)[1:])
        return dataclasses.replace(self, **{name: column[rows] for name, column in given if column is not None})


def messages_columns(messages: dispatch_pb2.Messages) -> MessagesColumns:
    """Return the columns of a message that the generated code has parsed."""
    return MessagesColumns(
        messages.epoch,
        decode_u64(messages.ledger_id),
        decode_u64(messages.entry_id),
        decode_u64(messages.deliver_at_ms),
        *(
            decode_u32(field) if field else None
            for field in (messages.key_hash, messages.redelivery_count, messages.batch_index, messages.consumer_id)
        ),
    )


def decode_messages(response: bytes) -> MessagesColumns | None:
    """Return the columns of a `SubscribeResponse` with a `Messages`, given as bytes.

    Returns None if it holds something else, or is not written as every writer of packed columns does; the generated
    code must parse it then. Measured for 1,000 rows: 17 us, instead of 44 with protobuf 7 and 440 before.
    """
    try:
        if response[0] != _MESSAGES_TAG:
            return None
        size, at = _read_varint(response, 1)
        if at + size != len(response):
            return None
        epoch = 0
        columns_read: dict[int, NDArray[Any]] = {}
        while at < len(response):
            tag = response[at]
            number, at = _read_varint(response, at + 1)
            if tag == _EPOCH_TAG:
                epoch = number
                continue
            dtype = _MESSAGES_COLUMNS.get(tag)
            if dtype is None or tag in columns_read or number % dtype.itemsize or at + number > len(response):
                return None
            columns_read[tag] = np.frombuffer(response, dtype, number // dtype.itemsize, at).astype(
                dtype.newbyteorder("=")
            )
            at += number
    except (IndexError, OverflowError):
        return None
    ledger_id, entry_id, deliver_at_ms = (columns_read.get(tag, _NO_ROWS) for tag in _POSITION_TAGS)
    others = (columns_read.get(tag) for tag in _OTHER_TAGS)
    return MessagesColumns(epoch, ledger_id, entry_id, deliver_at_ms, *others)


@dataclasses.dataclass(frozen=True, slots=True)
class LaneResponse:
    """A message for one lane: the bytes of a `SubscribeResponse`, or the status with which the lane ended."""

    lane: int
    response: bytes
    ended: status_pb2.Status | None


def decode_lanes(message: bytes) -> list[LaneResponse]:
    """Return the contents of a `SubscribeManyResponse`; the lanes' messages stay bytes."""
    responses: list[LaneResponse] = []
    at = 0
    try:
        while at < len(message):
            if message[at] != _RESPONSES_TAG:
                return _lane_responses(message)
            size, at = _read_varint(message, at + 1)
            end = at + size
            lane, response = 0, None
            while at < end:
                tag = message[at]
                number, at = _read_varint(message, at + 1)
                if tag == _LANE_TAG:
                    lane = number
                elif tag == _RESPONSE_TAG and response is None:
                    response = message[at : at + number]
                    at += number
                else:
                    return _lane_responses(message)
            if at != end or response is None:
                return _lane_responses(message)
            responses.append(LaneResponse(lane, response, None))
    except (IndexError, OverflowError):
        return _lane_responses(message)
    return responses if at == len(message) else _lane_responses(message)


def _lane_responses(message: bytes) -> list[LaneResponse]:
    """Return the answers of a message in any form, parsed by the generated code."""
    read = dispatch_pb2.SubscribeManyResponse.FromString(message)
    return [
        LaneResponse(each.lane, each.response.SerializeToString(), each.ended if each.HasField("ended") else None)
        for each in read.responses
    ]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and the place after it. Raises IndexError, OverflowError."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if value >> 64:
        raise OverflowError(f"a varint holds {value}")
    return value, at


def _column(number: int, column: U64Column | U32Column) -> tuple[_Piece, ...]:
    """Return a packed field: its head and the memory of its numbers; nothing if there are none."""
    if not len(column):
        return ()
    # Copied only if its memory is not what is sent
    memory = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<"))
    return _head(number, memory.nbytes), memory.data


def _signed_column(number: int, column: I32Column) -> tuple[_Piece, ...]:
    """Return a packed field of `sint32`: numbers of varying length."""
    # Zigzag, which makes small numbers of either sign short
    zigzag = (column.astype(np.int64) << 1) ^ (column.astype(np.int64) >> 31)
    short = not len(zigzag) or zigzag.max() < 0x80
    data = zigzag.astype(np.uint8).tobytes() if short else b"".join(map(_varint, zigzag.tolist()))
    return (_head(number, len(data)), data) if data else ()


def _positions(first: int, positions: columns.Positions) -> list[_Piece]:
    """Return the columns of positions as fields from that number on."""
    pieces: list[_Piece] = []
    for number, column in enumerate(positions[:4], start=first):
        if column is not None:
            pieces += _column(number, column)
    return pieces


def _counts(number: int, positions: columns.Positions) -> tuple[_Piece, ...]:
    """Return the redelivery counts, as a single one if all are equal."""
    counts = positions.redelivery_count
    if counts is None or not len(counts):
        return ()
    return _column(number, counts[:1] if (counts == counts[0]).all() else counts)


def _nack(first: int, nack: columns.NackColumns) -> list[_Piece]:
    """Return the common fields of the stream's and the single negative acknowledgement, from that number on."""
    pieces = _positions(first, nack.positions)
    if nack.delay_ms is not None:
        pieces += _column(first + 4, nack.delay_ms)
    if nack.delay_level is not None:
        pieces += _signed_column(first + 5, nack.delay_level)
    if nack.reject:
        pieces.append(_number(first + 6, 1))
    if nack.reason:
        pieces += _field(first + 7, utf8("reason", nack.reason))
    if nack.key_hash is not None:
        pieces += _column(first + 8, nack.key_hash)
    pieces += _counts(first + 9, nack.positions)
    if nack.forwarded:
        pieces.append(_number(first + 10, 1))
    return pieces


def _request_id(request_id: int) -> tuple[_Piece, ...]:
    return (_number(1, request_id),) if request_id else ()


def _field(number: int, data: bytes) -> tuple[_Piece, ...]:
    return _head(number, len(data)), data


def _message(number: int, pieces: list[_Piece]) -> bytes:
    """Return a message whose only field is a message made of these pieces."""
    size = sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in pieces)
    return b"".join((_head(number, size), *pieces))


def _head(number: int, size: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
