"""Encodes requests with columns and decodes answers with columns, without a Python object for each row.

The generated code in `tarry.v1` is the contract that this module is tested against; `tarry.packed_fields` has the form
of a single field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from google.rpc import status_pb2
from numpy.typing import NDArray

from tarry import columns, errors
from tarry.packed_fields import NotPlainError, Piece, nested, pack, scan, scan_each, tag_bytes, tags, varint, varint_at
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2

U64Column = NDArray[np.uint64]
U32Column = NDArray[np.uint32]
I32Column = NDArray[np.int32]
Field: TypeAlias = int | bytes | NDArray[Any] | None
T = TypeVar("T", np.uint64, np.uint32)

_ADD = tag_bytes(delayed_delivery_pb2.AddMessagesRequest)
_STREAM_ADD = tag_bytes(delayed_delivery_pb2.StreamAddMessagesRequest)
_CANCEL = tag_bytes(delayed_delivery_pb2.CancelMessagesRequest)
_RESCHEDULE = tag_bytes(delayed_delivery_pb2.RescheduleMessagesRequest)
_CONTAINS = tag_bytes(delayed_delivery_pb2.ContainsMessagesRequest)
_SUBSCRIBE = tag_bytes(dispatch_pb2.SubscribeRequest)
_OPEN = tag_bytes(dispatch_pb2.Open)
_FLOW = tag_bytes(dispatch_pb2.Flow)
_ACKNOWLEDGE = tag_bytes(dispatch_pb2.Acknowledge)
_NACK = tag_bytes(dispatch_pb2.NegativeAcknowledge)
_EXTEND = tag_bytes(dispatch_pb2.Extend)
_ADD_CONSUMER = tag_bytes(dispatch_pb2.AddConsumer)
_REMOVE_CONSUMER = tag_bytes(dispatch_pb2.RemoveConsumer)
_PLAN = tag_bytes(dispatch_pb2.PlanDispatch)
_MARK_DELETE = tag_bytes(dispatch_pb2.MarkDelete)
_SUBSCRIBE_MANY = tag_bytes(dispatch_pb2.SubscribeManyRequest)
_LANE = tag_bytes(dispatch_pb2.LaneRequest)
_NACK_REQUEST = tag_bytes(dispatch_pb2.NegativeAcknowledgeRequest)
_ACKNOWLEDGE_REQUEST = tag_bytes(dispatch_pb2.AcknowledgeRequest)
_EXTEND_LEASE = tag_bytes(dispatch_pb2.ExtendLeaseRequest)

(_MESSAGES,) = tags(dispatch_pb2.SubscribeResponse, "messages")
(_EPOCH,) = tags(dispatch_pb2.Messages, "epoch")
_POSITION_COLUMNS = tags(dispatch_pb2.Messages, "ledger_id", "entry_id", "deliver_at_ms")
_OTHER_COLUMNS = tags(dispatch_pb2.Messages, "key_hash", "redelivery_count", "batch_index", "consumer_id")
_U64, _U32 = np.dtype("<u8"), np.dtype("<u4")
_MESSAGES_FIELDS = frozenset((_EPOCH, *_POSITION_COLUMNS, *_OTHER_COLUMNS))
(_RESPONSES,) = tags(dispatch_pb2.SubscribeManyResponse, "responses")
_RESPONSE_LANE, _RESPONSE = tags(dispatch_pb2.LaneResponse, "lane", "response")
_RESPONSE_FIELDS = frozenset((_RESPONSE_LANE, _RESPONSE))


def utf8(name: str, text: str) -> bytes:
    """Encode text. Raises InvalidArgument if it has no UTF-8 form."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise errors.InvalidArgument(f"{name} is {text!r}; it must be UTF-8 text") from None


def encode_add(
    topic: bytes, rows: columns.AddColumns, already_due: int, subscription: bytes = b"", on_invalid: int = 0
) -> bytes:
    """Encode an `AddMessagesRequest`. Both names are UTF-8; `already_due` and `on_invalid` are numbers of the enums."""
    return _encoded(
        _ADD,
        topic=topic,
        ledger_id=rows.ledger_id,
        entry_id=rows.entry_id,
        deliver_at_ms=rows.deliver_at_ms,
        delay_ms=rows.delay_ms,
        key_hash=rows.key_hash,
        already_due=already_due,
        subscription=subscription,
        delay_level=_signed(rows.delay_level),
        on_invalid=on_invalid,
    )


def encode_cancel(topic: bytes, subscription: bytes, rows: columns.EntryColumns) -> bytes:
    """Encode a `CancelMessagesRequest`. Both names are UTF-8; `subscription` is empty for every index."""
    return _encoded(_CANCEL, topic=topic, subscription=subscription, ledger_id=rows.ledger_id, entry_id=rows.entry_id)


def encode_reschedule(topic: bytes, subscription: bytes, rows: columns.AddColumns) -> bytes:
    """Encode a `RescheduleMessagesRequest`; names as in `encode_cancel`."""
    return _encoded(
        _RESCHEDULE,
        topic=topic,
        subscription=subscription,
        ledger_id=rows.ledger_id,
        entry_id=rows.entry_id,
        deliver_at_ms=rows.deliver_at_ms,
        delay_ms=rows.delay_ms,
        key_hash=rows.key_hash,
    )


def encode_stream_add(request_id: int, add: bytes) -> bytes:
    """Encode a `StreamAddMessagesRequest`; `add` comes from `encode_add`."""
    return _encoded(_STREAM_ADD, request_id=request_id, add=add)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OpenConsumers:
    """The additions to the `Open` of a KEY_SHARED subscription; columns are as long as that of the held positions."""

    consumers: Sequence[dispatch_pb2.Consumer]
    held_consumer_id: U32Column
    held_key_hash: U32Column | None
    """None if no position that Tarry planned is held"""


# All columns of a held position
_HELD_BYTES = 3 * 8 + 4 * 4


def encode_open(
    topic: bytes,
    subscription: bytes,
    kind: int,
    held: columns.Positions,
    by_key: OpenConsumers | None = None,
    *,
    bytes_max: int | None = None,
) -> list[bytes]:
    """Encode an `Open` as `SubscribeRequest`s of at most `bytes_max`; None makes it one, which all daemons know.

    Both names are UTF-8; `kind` is the number of the enum.
    """
    consumers = () if by_key is None else by_key.consumers
    joined = b"".join(nested(_OPEN["consumers"], consumer.SerializeToString()) for consumer in consumers)
    step = max(1, held.rows)
    if bytes_max is not None:
        step = columns.rows_per_request(_HELD_BYTES, step, bytes_max - len(joined))
    messages = []
    for first in range(0, max(1, held.rows), step):
        rows = slice(first, first + step)
        part = held.take(rows)
        body = _encoded(
            _OPEN,
            topic=topic,
            subscription=subscription,
            type=kind,
            held_ledger_id=part.ledger_id,
            held_entry_id=part.entry_id,
            held_deliver_at_ms=part.deliver_at_ms,
            held_batch_index=part.batch_index,
            held_redelivery_count=part.redelivery_count,
            held_consumer_id=None if by_key is None else by_key.held_consumer_id[rows],
            held_key_hash=None if by_key is None or by_key.held_key_hash is None else by_key.held_key_hash[rows],
            more_held=rows.stop < held.rows,
        )
        messages.append(nested(_SUBSCRIBE["open"], body if first else body + joined))
    return messages


def encode_flow(permits: int, consumer_id: int = 0) -> bytes:
    """Encode a `SubscribeRequest` with a `Flow`; a SHARED subscription has `consumer_id` 0."""
    return nested(_SUBSCRIBE["flow"], _encoded(_FLOW, permits=permits, consumer_id=consumer_id))


def encode_acknowledge(request_id: int, positions: columns.Positions) -> bytes:
    """Encode a `SubscribeRequest` with an `Acknowledge`."""
    return nested(_SUBSCRIBE["acknowledge"], _positions(_ACKNOWLEDGE, positions, request_id=request_id))


def encode_nack(request_id: int, nack: columns.NackColumns) -> bytes:
    """Encode a `SubscribeRequest` with a `NegativeAcknowledge`."""
    return nested(_SUBSCRIBE["negative_acknowledge"], _nack(_NACK, nack, request_id=request_id))


def encode_extend(request_id: int, positions: columns.Positions) -> bytes:
    """Encode a `SubscribeRequest` with an `Extend`."""
    positions = positions._replace(redelivery_count=None)
    return nested(_SUBSCRIBE["extend"], _positions(_EXTEND, positions, request_id=request_id))


def encode_add_consumer(request_id: int, consumer: dispatch_pb2.Consumer) -> bytes:
    """Encode a `SubscribeRequest` with an `AddConsumer`."""
    joined = nested(_ADD_CONSUMER["consumer"], consumer.SerializeToString())
    return nested(_SUBSCRIBE["add_consumer"], _encoded(_ADD_CONSUMER, request_id=request_id) + joined)


def encode_remove_consumer(request_id: int, consumer_id: int) -> bytes:
    """Encode a `SubscribeRequest` with a `RemoveConsumer`."""
    body = _encoded(_REMOVE_CONSUMER, request_id=request_id, consumer_id=consumer_id)
    return nested(_SUBSCRIBE["remove_consumer"], body)


def encode_plan(request_id: int, plan: columns.PlanColumns) -> bytes:
    """Encode a `SubscribeRequest` with a `PlanDispatch`."""
    body = _encoded(
        _PLAN, request_id=request_id, ledger_id=plan.ledger_id, entry_id=plan.entry_id, key_hash=plan.key_hash
    )
    return nested(_SUBSCRIBE["plan_dispatch"], body)


def encode_mark_delete(request_id: int, position: tuple[int, int]) -> bytes:
    """Encode a `SubscribeRequest` with a `MarkDelete`."""
    ledger_id, entry_id = position
    body = _encoded(_MARK_DELETE, request_id=request_id, ledger_id=ledger_id, entry_id=entry_id)
    return nested(_SUBSCRIBE["mark_delete"], body)


def encode_lane(lane: int, request: bytes) -> bytes:
    """Encode a `SubscribeManyRequest` with one `SubscribeRequest`. Several in a row are one message."""
    return nested(_SUBSCRIBE_MANY["requests"], _encoded(_LANE, lane=lane, request=request))


def encode_lane_close(lane: int) -> bytes:
    """Encode a `SubscribeManyRequest` that closes a lane."""
    return nested(_SUBSCRIBE_MANY["requests"], _encoded(_LANE, lane=lane, close=True))


def encode_nack_request(topic: bytes, subscription: bytes, nack: columns.NackColumns) -> bytes:
    """Encode a `NegativeAcknowledgeRequest`. Both names are UTF-8."""
    return _nack(_NACK_REQUEST, nack, topic=topic, subscription=subscription)


def encode_contains(topic: bytes, subscription: bytes, rows: columns.EntryColumns) -> bytes:
    """Encode a `ContainsMessagesRequest`. Both names are UTF-8; `subscription` is empty for any."""
    return _encoded(
        _CONTAINS,
        topic=topic,
        ledger_id=rows.ledger_id,
        entry_id=rows.entry_id,
        last_entry_id=rows.last_entry_id,
        subscription=subscription,
    )


def encode_acknowledge_request(topic: bytes, subscription: bytes, positions: columns.Positions) -> bytes:
    """Encode an `AcknowledgeRequest`. Both names are UTF-8."""
    return _positions(_ACKNOWLEDGE_REQUEST, positions, topic=topic, subscription=subscription)


def encode_extend_lease(topic: bytes, subscription: bytes, positions: columns.Positions, lease_ms: int) -> bytes:
    """Encode an `ExtendLeaseRequest`. Both names are UTF-8."""
    positions = positions._replace(redelivery_count=None)
    return _positions(_EXTEND_LEASE, positions, topic=topic, subscription=subscription, lease_ms=lease_ms)


def _positions(tag: Mapping[str, bytes], positions: columns.Positions, **others: Field) -> bytes:
    """Encode a message with columns of positions; one redelivery count where all rows have the same."""
    counts = positions.redelivery_count
    if counts is not None and len(counts) and (counts == counts[0]).all():
        counts = counts[:1]
    return _encoded(
        tag,
        **others,
        ledger_id=positions.ledger_id,
        entry_id=positions.entry_id,
        deliver_at_ms=positions.deliver_at_ms,
        batch_index=positions.batch_index,
        redelivery_count=counts,
    )


def _nack(tag: Mapping[str, bytes], nack: columns.NackColumns, **others: Field) -> bytes:
    """Encode a negative acknowledgement, of a stream or a call of its own."""
    return _positions(
        tag,
        nack.positions,
        **others,
        delay_ms=nack.delay_ms,
        delay_level=_signed(nack.delay_level),
        reject=nack.reject,
        reason=utf8("reason", nack.reason),
        key_hash=nack.key_hash,
        forwarded=nack.forwarded,
    )


def _encoded(tag: Mapping[str, bytes], **fields: Field) -> bytes:
    """Encode a message with these fields. None, 0 and what is empty are left out."""
    pieces: list[Piece] = []
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            pack(pieces, tag[name], value, value.dtype.newbyteorder("<"))
        elif not value:
            continue
        elif isinstance(value, bytes):
            pieces += (tag[name], varint(len(value)), value)
        else:
            pieces += (tag[name], varint(value))
    return b"".join(pieces)


def _signed(column: I32Column | None) -> bytes | None:
    """Encode a column of `sint32`: numbers of varying length."""
    if column is None:
        return None
    # Small numbers of either sign are short this way.
    zigzag = (column.astype(np.int64) << 1) ^ (column.astype(np.int64) >> 31)
    short = not len(zigzag) or zigzag.max() < 0x80
    return zigzag.astype(np.uint8).tobytes() if short else b"".join(map(varint, zigzag.tolist()))


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
    """Decode a `SubscribeResponse` that holds a `Messages`: 17 us for 1,000 rows, instead of 44 by the generated code.

    Returns None if it holds something else, or if the generated code has to read it.
    """
    try:
        if response[0] != _MESSAGES:
            return None
        size, at = varint_at(response, 1)
        if at + size != len(response):
            return None
        fields = scan(response, at, len(response), _MESSAGES_FIELDS)
        ledger_id, entry_id, deliver_at_ms = (
            _column(response, fields.get(tag, (0, 0)), _U64) for tag in _POSITION_COLUMNS
        )
        others = [_column(response, fields[tag], _U32) if tag in fields else None for tag in _OTHER_COLUMNS]
    except (NotPlainError, IndexError):
        return None
    return MessagesColumns(fields.get(_EPOCH, (0, 0))[1], ledger_id, entry_id, deliver_at_ms, *others)


def _column(data: bytes, field: tuple[int, int], form: np.dtype[T]) -> NDArray[T]:
    at, size = field
    if size % form.itemsize:
        raise NotPlainError
    return np.frombuffer(data, form, size // form.itemsize, at).astype(form.newbyteorder("="))


@dataclasses.dataclass(frozen=True, slots=True)
class LaneResponse:
    """A message for one lane: the bytes of a `SubscribeResponse`, or the status with which the lane ended."""

    lane: int
    response: bytes
    ended: status_pb2.Status | None


def decode_lanes(message: bytes) -> list[LaneResponse]:
    """Decode a `SubscribeManyResponse`; what a lane carries stays bytes."""
    responses: list[LaneResponse] = []
    try:
        for fields in scan_each(message, _RESPONSES, _RESPONSE_FIELDS):
            at, size = fields[_RESPONSE]
            lane = fields[_RESPONSE_LANE][1] if _RESPONSE_LANE in fields else 0
            responses.append(LaneResponse(lane, message[at : at + size], None))
    except (NotPlainError, IndexError, KeyError):
        read = dispatch_pb2.SubscribeManyResponse.FromString(message)
        return [
            LaneResponse(each.lane, each.response.SerializeToString(), each.ended if each.HasField("ended") else None)
            for each in read.responses
        ]
    return responses
