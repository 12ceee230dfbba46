"""Lanes of `SubscribeMany`, as a client that sends messages one by one sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2

from tarry.v1 import dispatch_pb2 as pb
from tests.daemon.grpc_services.conftest import Caller, Stream

METHOD = "Dispatch/SubscribeMany"


class Lanes:
    """One stream, and what has come for each of its lanes. `sizes`: answers in each message that came."""

    def __init__(self, caller: Caller) -> None:
        self.stream: Stream = caller.stream(METHOD)
        self.sizes: list[int] = []
        self._arrived: dict[int, list[pb.LaneResponse]] = {}
        self._last = 0
        self._reading = asyncio.Lock()

    @property
    def call(self) -> Any:
        return self.stream.call

    def lane(self) -> Lane:
        """A lane that has a number of its own, and is not open."""
        self._last += 1
        return Lane(self, self._last)

    async def send(self, *requests: pb.LaneRequest) -> None:
        await self.stream.send(pb.SubscribeManyRequest(requests=requests))

    async def next_of(self, lane: int) -> pb.LaneResponse:
        """What came next for a lane. Raises as `Stream.receive`."""
        while not self._arrived.get(lane):
            async with self._reading:
                if self._arrived.get(lane):
                    break
                answer = await self.stream.receive()
                self.sizes.append(len(answer.responses))
                for response in answer.responses:
                    self._arrived.setdefault(response.lane, []).append(response)
        return self._arrived[lane].pop(0)


def by_lane(caller: Caller) -> Any:
    """A lane of a stream of its own."""
    return Lanes(caller).lane()


class Lane:
    """Looks like a `Stream` of `Subscribe`."""

    def __init__(self, lanes: Lanes, number: int) -> None:
        self.number = number
        self._lanes = lanes

    @property
    def call(self) -> Any:
        return self._lanes.call

    async def send(self, request: message.Message | bytes) -> None:
        encoded = request if isinstance(request, bytes) else request.SerializeToString()
        # Also what is no request.
        field = b"\x12" + _varint(len(encoded)) + encoded
        body = b"\x08" + _varint(self.number) + field
        await self._lanes.stream.send(b"\x0a" + _varint(len(body)) + body)

    async def done_sending(self) -> None:
        await self._lanes.send(pb.LaneRequest(lane=self.number, close=True))

    async def receive(self) -> Any:
        """The next answer. Raises `EOFError` at the end, `AioRpcError` when the lane failed."""
        response = await self._lanes.next_of(self.number)
        if response.HasField("response"):
            return response.response
        assert response.HasField("ended")
        if response.ended.code:
            raise _failure(response.ended)
        raise EOFError


def _failure(status: status_pb2.Status) -> grpc.aio.AioRpcError:
    """The status as that of a call."""
    code = next(each for each in grpc.StatusCode if each.value[0] == status.code)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    hints = [(key.replace("_", "-"), value) for key, value in info.metadata.items()]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*hints), status.message)


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7) if number > 0x7F else bytes([number])
