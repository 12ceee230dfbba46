"""Messages of `SubscribeMany`: requests and answers of subscriptions, each with the number of its lane.

Owns: their bytes. What a lane carries is passed on as bytes: who serves the lane reads it.
Does not own: lanes (`subscribe_many`), and what they carry (`subscribe`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from google.rpc import status_pb2

from daemon.grpc_services import parsing, row_requests
from daemon.grpc_services.wire_columns import nested, varint
from tarry.v1 import dispatch_pb2 as pb

_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2

_REQUESTS = pb.SubscribeManyRequest.REQUESTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_LANE = pb.LaneRequest.LANE_FIELD_NUMBER << 3 | _VARINT
_REQUEST = pb.LaneRequest.REQUEST_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_CLOSE = pb.LaneRequest.CLOSE_FIELD_NUMBER << 3 | _VARINT
_FIELDS = frozenset((_LANE, _REQUEST, _CLOSE))
_LANE_MAX = (1 << 32) - 1

_RESPONSES = bytes([pb.SubscribeManyResponse.RESPONSES_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_RESPONSE_LANE = bytes([pb.LaneResponse.LANE_FIELD_NUMBER << 3 | _VARINT])
_RESPONSE = bytes([pb.LaneResponse.RESPONSE_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_ENDED = bytes([pb.LaneResponse.ENDED_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


@dataclasses.dataclass(frozen=True, slots=True)
class LaneRequest:
    """`request`: a `SubscribeRequest`, encoded; None: there is none."""

    lane: int
    request: bytes | None
    close: bool


def requests(data: bytes, *, size_bytes_max: int) -> list[LaneRequest]:
    """What a `SubscribeManyRequest` holds. Raises `InvalidArgument`."""
    try:
        return list(_plain(data))
    except (row_requests.NotPlainError, IndexError):
        message = parsing.parse(pb.SubscribeManyRequest, data, size_bytes_max=size_bytes_max)
        return [
            LaneRequest(each.lane, each.request.SerializeToString() if each.HasField("request") else None, each.close)
            for each in message.requests
        ]


def response(lane: int, encoded: bytes) -> bytes:
    """An encoded `SubscribeManyResponse` with one `SubscribeResponse`. Several in a row are one message."""
    return nested(_RESPONSES, b"".join((_RESPONSE_LANE, varint(lane), nested(_RESPONSE, encoded))))


def ended(lane: int, status: status_pb2.Status) -> bytes:
    """An encoded `SubscribeManyResponse` that tells the end of a lane."""
    return nested(_RESPONSES, b"".join((_RESPONSE_LANE, varint(lane), nested(_ENDED, status.SerializeToString()))))


def _plain(data: bytes) -> Iterator[LaneRequest]:
    """Each field known and at most once. Raises NotPlainError, IndexError: it is for the runtime to read."""
    place = 0
    while place < len(data):
        if data[place] != _REQUESTS:
            raise row_requests.NotPlainError
        size, place = row_requests.varint_at(data, place + 1)
        fields = row_requests.scan(data, place, place + size, _FIELDS)
        place += size
        lane = fields.get(_LANE, (0, 0))[1]
        if lane > _LANE_MAX:
            raise row_requests.NotPlainError
        start, length = fields.get(_REQUEST, (0, 0))
        request = data[start : start + length] if _REQUEST in fields else None
        yield LaneRequest(lane, request, bool(fields.get(_CLOSE, (0, 0))[1]))
    if place != len(data):
        raise row_requests.NotPlainError
